"""What a Python job sees: what it is to do, and how it says how far it is.

A job is a generator function of one argument, a `JobContext`. Each `yield` ends a step: there the job may be told to
stop, which raises GeneratorExit, so that a `finally` can save a checkpoint into `job.directory`. A later attempt gets
the same folder, and goes on from what it finds there.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cotenant.errors import ConfigError
from cotenant.worker.jobs.messages import read_share


class Step(msgspec.Struct, frozen=True):
    """Report a step that is done. done: steps so far, those of earlier attempts included; None: one more. total: of how
    many; None: unknown. metrics: such as a loss or an accuracy."""

    done: int | None = None
    total: int | None = None
    metrics: dict[str, float] = {}


def step(done: int | None = None, total: int | None = None, **metrics: float) -> Step:
    """Return what a job yields at the end of a step: `yield cotenant.step(done, total, loss=0.3)`.

    Raises ConfigError for counts below 0 and for metrics that are not numbers.
    """
    for name, count in (("done", done), ("total", total)):
        if count is not None and (not isinstance(count, int) or count < 0):
            raise ConfigError(f"step({name}={count!r}): a number of steps is a whole number, 0 or more")
    return Step(done, total, {name: _number(name, value) for name, value in metrics.items()})


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # PyTorch raises the last for a tensor of several elements
        raise ConfigError(f"step({name}={value!r}): a metric is a number") from None


class JobContext:
    """Describe the attempt to the job's function.

    directory: for its checkpoints; the same for all attempts. batch, steps: as they were asked for; None: as the job
    likes. threads: how many may compute at once. cuda: it has a GPU. options: what the kind of work needs besides.
    """

    def __init__(
        self,
        directory: Path,
        *,
        batch: int | None = None,
        steps: int | None = None,
        threads: int = 1,
        cuda: bool = False,
        options: Mapping[str, Any] | None = None,
        granted: mmap.mmap | None = None,
    ) -> None:
        self.directory = directory
        self.batch = batch
        self.steps = steps
        self.threads = threads
        self.cuda = cuda
        self.options = dict(options or {})
        self._granted = granted

    @property
    def share(self) -> float:
        """The part of the device that the job is granted now, from 0 to 1. It need not look: it waits at its next
        `yield` while that is 0."""
        return 1.0 if self._granted is None else read_share(self._granted) / 1000


Steps = Generator[Step | Mapping[str, float] | None, None, None]


def as_step(value: object, done: int) -> Step:
    """Return what a job has yielded as a step with its number. done: steps before it. Raises ConfigError."""
    match value:
        case None:
            found = Step()
        case Step():
            found = value
        case Mapping():
            found = step(**{str(name): metric for name, metric in value.items()})
        case _:
            raise ConfigError(
                f"yield {value!r}: a job yields cotenant.step(done, total, **metrics), a mapping of metrics, or nothing"
            )
    metrics = {name: metric for name, metric in found.metrics.items() if math.isfinite(metric)}
    return Step(done + 1 if found.done is None else found.done, found.total, metrics)
