"""Measure how long a change of a model's share takes under load; print one line for each change.

    python -m benchmarks.share_change [--backend cpu|mps|green] [--shares 20 50] [--times 5]
        [--repository FOLDER --model NAME] [--rows N] [--warm_workers N] [--json]

One lane is always busy. A second lane with the other share starts as its shadow, takes over when it is ready, and the
first stops, as in a rollout. On backends that change shares within a process, so does this. With warm workers, as in
the server, each change waits until there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.harness import show_result
from cotenant.app.backend import create_backend
from cotenant.backends import Backend
from cotenant.config import read_settings
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.tensor import Tensor
from cotenant.core.units import WHOLE, show_share
from cotenant.errors import CotenantError, RequestError, WorkerError
from cotenant.live.batch_listener import Payload
from cotenant.live.supervised_pool import SupervisedPool
from cotenant.worker.arena import Arena
from cotenant.worker.repository import describe, sample_inputs, scan_repository, worker_model
from cotenant.worker.wire import Timing, WorkerModel

STEADY = 10  # batches before the next change
PRESTART_TIMEOUT = 60.0  # seconds


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one change; seconds since its start.

    ready: until the new lane was ready; answered: until its first response; over: until the old lane had stopped. gap,
    steady: longest time without a response during the change and before it. lost: batches without a response.
    restarted: another process serves now.
    """

    before: int
    after: int
    ready: float
    answered: float
    over: float
    gap: float
    steady: float
    lost: int
    restarted: bool


class _Busy:
    """Keep the lane named in `to` busy: send its next batch as soon as one is answered."""

    def __init__(self, model: str, payloads: Sequence[Payload]) -> None:
        self.pool: SupervisedPool | None = None
        self.to: LaneId | None = None
        self.answers: list[tuple[float, LaneId]] = []  # time, and lane
        self.lost = 0
        self.failure = ""
        self._model = model
        self._payloads = payloads
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # number of responses to wait for

    def go(self) -> None:
        if self.pool is not None and self.to is not None:
            self.pool.run(self.to, 0, self._model, self._payloads)

    async def until(self, answers: int) -> None:
        """Wait for that many more responses. Raises WorkerError once a batch has failed: no other follows it."""
        if self.failure:
            raise WorkerError(self.failure)
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((len(self.answers) + answers, done))
        await done

    def ready(self, lane: LaneId) -> None:
        pass

    def finished(self, lane: LaneId, batch: int, answers: Sequence[Payload | RequestError], timing: Timing) -> None:
        self.lost += any(isinstance(answer, RequestError) for answer in answers)
        self.answers.append((time.monotonic(), lane))
        for count, done in self._waiting:
            if len(self.answers) >= count and not done.done():
                done.set_result(None)
        self.go()

    def failed(self, lane: LaneId, batch: int, reason: str) -> None:
        self._fail(f"{lane}: {reason}")

    def died(self, lane: LaneId, reason: str) -> None:
        self._fail(f"{lane}: {reason}")

    def _fail(self, reason: str) -> None:
        self.lost += 1
        self.failure = reason
        for _, done in self._waiting:
            if not done.done():
                done.set_exception(WorkerError(reason))


async def measure(
    backend: Backend,
    model: WorkerModel,
    payloads: Sequence[Payload],
    shares: tuple[int, int],
    times: int,
    warm_workers: int = 1,
) -> list[Change]:
    """Change from one share (‰) to the other and back, `times` in all.

    warm_workers: pre-started processes to wait for before each change. Raises WorkerError if a worker fails.
    """
    device = DeviceId(backend.fleet()[0].name)
    busy = _Busy(model.name, payloads)
    arena = Arena(1 << 28)
    pool = busy.pool = SupervisedPool(backend, arena, busy, warm_workers=warm_workers)
    changes = []
    try:
        lane, before = LaneId(device, 0), shares[0]
        await pool.start(lane, share=before, models=[model])
        busy.to = lane
        busy.go()
        for number in range(1, times + 1):
            following, after = LaneId(device, number), shares[number % 2]
            await prepared(pool, warm_workers)
            await busy.until(STEADY)
            changes.append(await _change(pool, busy, model, (lane, before), (following, after)))
            lane, before = following, after
    finally:
        busy.to = None
        await pool.close(grace=10.0)
    return changes


async def prepared(pool: SupervisedPool, warm_workers: int) -> None:
    """Wait until the warm pool has that many workers."""
    try:
        async with asyncio.timeout(PRESTART_TIMEOUT):
            while pool.warm_workers < warm_workers:
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise WorkerError(
            f"{pool.warm_workers} of {warm_workers} warm workers were ready within {PRESTART_TIMEOUT:g} s"
        ) from None


async def _change(
    pool: SupervisedPool, busy: _Busy, model: WorkerModel, old: tuple[LaneId, int], new: tuple[LaneId, int]
) -> Change:
    """Change to the new lane and measure."""
    (lane, before), (following, after) = old, new
    begun, known, lost = time.monotonic(), len(busy.answers), busy.lost
    pids = {status.lane: status.pid for status in pool.status()}
    await pool.start(following, share=after, models=[model], leaving=[lane])
    ready = time.monotonic()
    pids |= {status.lane: status.pid for status in pool.status()}
    # The running batch is the last one on the old lane; its response triggers the first on the new one.
    busy.to = following
    while busy.answers[-1][1] != following:
        await busy.until(1)
    answered = busy.answers[-1][0]
    await pool.stop(lane, grace=10.0)
    over = time.monotonic()
    await busy.until(STEADY)
    moments = [when for when, _ in busy.answers]
    return Change(
        before=before,
        after=after,
        ready=ready - begun,
        answered=answered - begun,
        over=over - begun,
        gap=max(later - earlier for earlier, later in itertools.pairwise(moments[known - 1 : -STEADY + 1])),
        steady=max(later - earlier for earlier, later in itertools.pairwise(moments[known - STEADY : known])),
        lost=busy.lost - lost,
        restarted=pids[lane] != pids[following],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.share_change",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", choices=("cpu", "mps", "green"), default="cpu")
    parser.add_argument("--shares", type=float, nargs=2, default=[20, 50], metavar="PERCENT")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--repository", type=Path, help="Model repository; default: a small ONNX network.")
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, default=1, help="Rows in each batch.")
    parser.add_argument("--warm_workers", type=int, default=1, help="Pre-started worker processes.")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    first, second = (round(WHOLE * share / 100) for share in given.shares)
    with tempfile.TemporaryDirectory() as folder:
        try:
            settings = msgspec.structs.replace(read_settings(), backend=given.backend)
            model, payloads = _model(given.repository, given.model, given.rows, Path(folder))
            backend = create_backend(settings)
            try:
                changes = asyncio.run(
                    measure(backend, model, payloads, (first, second), given.times, given.warm_workers)
                )
            finally:
                backend.stop()
        except CotenantError as error:
            sys.exit(str(error))
    show_result(
        changes,
        f"backend {given.backend}, model {model.name}, batches of {given.rows}, {given.warm_workers} warm workers, load"
        f" average {os.getloadavg()[0]:.1f}",
        *map(_line, changes),
    )


def _line(change: Change) -> str:
    return (
        f"{show_share(change.before)} to {show_share(change.after)}: ready after {change.ready:.3f} s, first"
        f" response after {change.answered:.3f} s, complete after {change.over:.3f} s; longest time without a"
        f" response {change.gap * 1e3:.1f} ms, {change.steady * 1e3:.1f} ms before; {change.lost} batches lost;"
        f" {'another process' if change.restarted else 'the same process'}"
    )


def _model(repository: Path | None, name: str | None, rows: int, folder: Path) -> tuple[WorkerModel, list[Payload]]:
    if repository is None:
        from benchmarks import onnx_models  # needs onnx, which a machine with a GPU may lack

        model = onnx_models.convolutions(folder / "m.onnx")
        pictures = np.ones((rows, *model.inputs[0].shape[1:]), np.float32)
        return model, [(Tensor("x", "FP32", pictures.shape, pictures.tobytes()),)]
    entries = {entry.name: entry for entry in scan_repository(repository) if not entry.reason}
    if name not in entries:
        raise WorkerError(f"--model: {name!r} is not in {repository}; it holds {', '.join(entries) or 'none'}")
    entry, info = entries[name], describe(entries[name])
    return worker_model(entry, info), [sample_inputs(entry, info, rows, np.random.default_rng(0))]


if __name__ == "__main__":
    main()
