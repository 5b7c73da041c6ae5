"""How long does a change of a model's share take, while it is under load? One line for each change.

    python -m benchmarks.share_change [--backend cpu|mps|green] [--shares 20 50] [--times 5]
        [--repository FOLDER --model NAME] [--rows N] [--warm_workers N] [--json]

One lane is always busy. A second one with the other share starts beside it, takes over once it is ready, and the first
one stops: as the server goes over to another plan. Where shares change within a process, so does this. With
warm_workers, which is as a server has it, each change waits until there is one.
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

from cotenant.app.backend import create_backend
from cotenant.backends import Backend
from cotenant.config import read_settings
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.tensor import Tensor
from cotenant.core.units import WHOLE, show_share
from cotenant.errors import CotenantError, RequestError, WorkerError
from cotenant.live.pool import Payload
from cotenant.live.supervised_pool import SupervisedPool
from cotenant.worker.arena import Arena
from cotenant.worker.repository import describe, sample_inputs, scan_repository, worker_model
from cotenant.worker.wire import Timing, WorkerModel

STEADY = 10  # batches that a lane runs before the next change
AHEAD = 60.0  # seconds in which processes have been started ahead


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds, from the decision on. ready: until the other lane was. answered: until its first answer. over: until
    the first lane had stopped. gap: the longest time without an answer meanwhile, and beforehand. lost: batches that
    were not answered. restarted: another process serves it now."""

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
    """Gives a lane its next batch as soon as one is answered: the lane named in `to`."""

    def __init__(self, model: str, payloads: Sequence[Payload]) -> None:
        self.pool: SupervisedPool | None = None
        self.to: LaneId | None = None
        self.answers: list[tuple[float, LaneId]] = []  # when, and of which lane
        self.lost = 0
        self.failure = ""
        self._model = model
        self._payloads = payloads
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # until so many answers

    def go(self) -> None:
        if self.pool is not None and self.to is not None:
            self.pool.run(self.to, 0, self._model, self._payloads)

    async def until(self, answers: int) -> None:
        """That many more. Raises WorkerError once a batch has failed: no other follows it."""
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
    """Changes from one share (‰) to the other and back, so often in all. warm_workers: processes that are started
    ahead, as they are for each change. Raises WorkerError where a worker fails."""
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
    """Until so many processes have been started ahead."""
    try:
        async with asyncio.timeout(AHEAD):
            while pool.warm_workers < warm_workers:
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise WorkerError(f"{pool.warm_workers} of {warm_workers} processes were ready within {AHEAD:g} s") from None


async def _change(
    pool: SupervisedPool, busy: _Busy, model: WorkerModel, old: tuple[LaneId, int], new: tuple[LaneId, int]
) -> Change:
    (lane, before), (following, after) = old, new
    begun, known, lost = time.monotonic(), len(busy.answers), busy.lost
    pids = {status.lane: status.pid for status in pool.status()}
    await pool.start(following, share=after, models=[model], leaving=[lane])
    ready = time.monotonic()
    pids |= {status.lane: status.pid for status in pool.status()}
    # The batch under way on the old lane is the last one there; its answer is what the first on the new one follows.
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
    parser.add_argument("--repository", type=Path, help="where the model is; by default a small network of ONNX")
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, default=1, help="of each batch")
    parser.add_argument("--warm_workers", type=int, default=1, help="worker processes that are started ahead")
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
    if given.json:
        print(msgspec.json.encode(changes).decode())
        return
    print(
        f"backend {given.backend}, model {model.name}, batches of {given.rows}, {given.warm_workers} warm workers, load"
        f" average {os.getloadavg()[0]:.1f}"
    )
    for it in changes:
        print(
            f"{show_share(it.before)} to {show_share(it.after)}: ready after {it.ready:.3f} s, answers after"
            f" {it.answered:.3f} s, over after {it.over:.3f} s; longest time without an answer {it.gap * 1e3:.1f} ms,"
            f" {it.steady * 1e3:.1f} ms before; {it.lost} batches lost;"
            f" {'another process' if it.restarted else 'the same process'}"
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
