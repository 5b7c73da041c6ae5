"""Run a Python job step by step: `python -m cotenant.worker.jobs.steps WORK`, started by the job's shim.

WORK is a `StepWork` as JSON. Between two steps the job waits while its share is 0, and learns whether it is to stop.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import msgspec

from cotenant.errors import ConfigError, DeviceError, ModelError
from cotenant.worker.jobs.context import JobContext, Step, Steps, as_step
from cotenant.worker.jobs.messages import PROGRESS, SHARE, SHARE_SIZE, Failed, Stepped, encode_line
from cotenant.worker.jobs.step_streams import StepStreams

TELL = 0.2  # seconds between two reports of progress
LOOK = 0.002  # seconds between two looks while the share is 0
_TOLD = "it was asked to stop"


class StepWork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe the work. function: ``module:name`` or ``path/to/file.py:name``. directory: for checkpoints. work: the
    working directory of what has no file; empty: the present one. groups: the share is of groups of multiprocessors, by
    CUDA green contexts. Other fields: of `JobContext`."""

    function: str
    directory: str
    work: str = ""
    batch: int | None = None
    steps: int | None = None
    threads: int = 1
    cuda: bool = False
    groups: bool = False
    options: dict[str, Any] = {}


class Progress:
    """Tell the shim how far the job is, not more often than somebody looks. descriptor: of the pipe; None: nobody
    listens."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._told_at = -TELL
        self._untold: Stepped | None = None

    def stepped(self, done: Step, now: float) -> None:
        self._untold = Stepped(steps=done.done or 0, total=done.total, metrics=done.metrics)
        if now - self._told_at >= TELL:
            self._told_at = now
            self.flush()

    def flush(self) -> None:
        if self._untold is not None:
            self._write(encode_line(self._untold))
            self._untold = None

    def failed(self, reason: str, *, hopeless: bool) -> None:
        self.flush()
        self._write(encode_line(Failed(reason=reason, hopeless=hopeless)))

    def _write(self, line: bytes) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, line)


class _Stop:
    """Remember that the job was told to stop."""

    def __init__(self) -> None:
        self.told = False
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self.told = True


def run(work: StepWork, progress: Progress, granted: mmap.mmap | None) -> int:
    """Run the work to its end; return the exit status."""
    stop = _Stop()
    directory = Path(work.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        context = JobContext(
            directory,
            batch=work.batch,
            steps=work.steps,
            threads=work.threads,
            cuda=work.cuda,
            options=work.options,
            granted=granted,
        )
        with StepStreams(context, enabled=work.groups) as streams:
            completed = _drive(_generator(work, context), context, progress, stop, streams)
    except (ConfigError, ModelError) as error:
        progress.failed(str(error), hopeless=True)
        return 1
    except DeviceError as error:
        progress.failed(str(error), hopeless=False)
        return 1
    except ModuleNotFoundError as error:
        traceback.print_exc()
        progress.failed(f"{error.msg}; install it where the server runs", hopeless=True)
        return 1
    except BaseException as error:  # noqa: BLE001  # also SystemExit of the user's code: its reason is told
        traceback.print_exc()
        progress.failed(f"{type(error).__name__}: {' '.join(str(error).split())}", hopeless=False)
        return 1
    if not completed:
        progress.failed(_TOLD, hopeless=False)
        return 1
    progress.flush()
    return 0


def _drive(steps: Steps, context: JobContext, progress: Progress, stop: _Stop, streams: StepStreams) -> bool:
    """Take step after step; return whether the job came to its own end, or to that of the steps asked for."""
    done = 0
    try:
        while True:
            while not context.share and not stop.told:
                time.sleep(LOOK)
            if stop.told:
                return False
            with streams.step():
                value = next(steps, _END)
            if value is _END:
                return True
            last = as_step(value, done)
            done = last.done or 0
            if last.total is None and context.steps is not None:
                last = msgspec.structs.replace(last, total=context.steps)
            progress.stepped(last, time.monotonic())
            if context.steps is not None and done >= context.steps:
                return True
    finally:
        with contextlib.suppress(RuntimeError) if stop.told else contextlib.nullcontext():
            steps.close()  # GeneratorExit at its `yield`; one that goes on instead is killed


_END = object()


def _generator(work: StepWork, context: JobContext) -> Steps:
    """Return the job's generator, in its working directory. Raises ConfigError where there is none of that name."""
    place, _, function = work.function.rpartition(":")
    if place.endswith(".py"):
        module: ModuleType = _load_file(Path(place).absolute())
    else:
        module = importlib.import_module(place)
        if work.work:
            Path(work.work).mkdir(parents=True, exist_ok=True)
            os.chdir(work.work)
    found: Callable[[JobContext], object] | None = getattr(module, function, None)
    if not callable(found):
        names = [each for each, value in vars(module).items() if inspect.isgeneratorfunction(value)]
        others = f"; its generator functions are {', '.join(names)}" if names else ""
        raise ConfigError(f"{place}: no function {function!r}{others}")
    steps = found(context)
    if not isinstance(steps, Generator):
        raise ConfigError(f"{work.function}: is not a generator function; let it `yield` at the end of each step")
    return steps


def _load_file(path: Path) -> ModuleType:
    """Import a file as Python would run it: from its own folder."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from None
    return module


def main() -> None:
    try:
        work = msgspec.json.decode(sys.argv[1], type=StepWork)
    except (IndexError, msgspec.DecodeError) as error:
        sys.exit(f"this program is started by the shim of a job: {error}")
    told, share = os.environ.pop(PROGRESS, ""), os.environ.pop(SHARE, "")
    granted = mmap.mmap(int(share), SHARE_SIZE) if share else None
    status = run(work, Progress(int(told) if told else None), granted)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)


if __name__ == "__main__":
    main()
