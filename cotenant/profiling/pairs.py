"""Measuring models side by side, on the path that serves them: two workers at once, each on its share, always busy.

Which pairs are run first is a question of how much each tells of all the others (`predictors.ours.telling`). Pairs that
cut the device alike share their workers.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec
import numpy as np

from cotenant.backends import Backend
from cotenant.core.profile import Profiles
from cotenant.core.units import WHOLE
from cotenant.errors import ModelError, RequestError, WorkerError
from cotenant.live.pool import Pool
from cotenant.predictors import Load
from cotenant.predictors.ours import telling
from cotenant.predictors.samples import FASTEST, Sample
from cotenant.profiling.grid import LEAST, Listener, Tensors
from cotenant.worker.arena import Arena
from cotenant.worker.wire import Timing, WorkerModel

LANES = ("pairs/0", "pairs/1")
SPLITS = (250, 500)  # ‰ of the first of a pair, at most half; the other has the rest
BATCHES = 3  # of each model and share, from one row to the largest that is worth it
LONGEST = 0.25  # seconds alone
SECONDS = 0.6  # for a pair, and at least LEAST batches of each
TRIES = 3
AT_ONCE = 24  # pairs that are chosen, then run by cut
MOST = 700  # pairs to choose among: of more, an even part

Run = tuple[Load, Load]


class Candidate(msgspec.Struct, frozen=True):
    """sample: inputs of so many rows."""

    model: WorkerModel
    sample: Callable[[int], Tensors]


def pairs(profiles: Profiles, kind: str) -> list[Run]:
    """All pairs worth measuring, the smaller share first, or an even part of very many. A model may be its own."""
    found: list[Run] = []
    for share in SPLITS:
        small, large = _loads(profiles, kind, share), _loads(profiles, kind, WHOLE - share)
        alike = share == WHOLE - share  # then either order is the same pair
        found += [(one, other) for i, one in enumerate(small) for j, other in enumerate(large) if not alike or i <= j]
    if len(found) <= MOST:
        return found
    some = np.random.default_rng(0).permutation(len(found))[:MOST]
    return [found[i] for i in sorted(some.tolist())]


def _loads(profiles: Profiles, kind: str, share: int) -> list[Load]:
    found = []
    for (model, on), profile in profiles.items():
        if on == kind:
            measured = sorted({point.batch for point in profile.points})
            worth = [batch for batch in measured if profile.latency(batch, share) <= LONGEST]
            some = {worth[i] for i in np.linspace(0, len(worth) - 1, BATCHES).round().astype(int)} if worth else set()
            found += [Load(model, kind, batch, share) for batch in sorted(some)]
    return found


async def measure(
    backend: Backend,
    candidates: Mapping[str, Candidate],
    runs: Sequence[Run],
    profiles: Profiles,
    *,
    done: Sequence[int] = (),
    count: int,
    seconds: float = SECONDS,
) -> AsyncIterator[tuple[Sample, Sample]]:
    """Run `count` of the pairs, those first that tell most, on a device that must have nothing else to do meanwhile.

    done: places of runs that were measured before. Gives of each run a sample with either as the victim: medians, in
    seconds, from handing a batch to a worker to having its answer. Raises ModelError where a model fails.
    """
    order = itertools.islice(telling(runs, profiles, done), count)
    while chunk := list(itertools.islice(order, AT_ONCE)):
        by_cut = sorted((runs[place] for place in chunk), key=_cut)
        for _, some in itertools.groupby(by_cut, key=_cut):
            alike = list(some)
            async with _workers(backend, candidates, alike) as two:
                for run in alike:
                    yield await two.measured(run, seconds)


def _cut(run: Run) -> tuple[int, ...]:
    return tuple(load.share for load in run)


@asynccontextmanager
async def _workers(backend: Backend, candidates: Mapping[str, Candidate], runs: Sequence[Run]) -> AsyncIterator[_Two]:
    """Two that are cut alike in all the runs, each with every model that it is to run."""
    listeners = _Listeners()
    pool = Pool(backend, Arena(1 << 30), listeners)
    try:
        for place in (1, 0):  # the larger share first, as the backend wants it
            largest: dict[str, int] = {}
            for load in (run[place] for run in runs):
                largest[load.model] = max(load.batch, largest.get(load.model, 0))
            models = [msgspec.structs.replace(candidates[it].model, max_batch=rows) for it, rows in largest.items()]
            await pool.start(LANES[place], runs[0][place].share, models)
        yield _Two(pool, listeners, candidates)
    except WorkerError as error:
        raise ModelError(f"pairs cannot be measured: {error}") from None
    finally:
        await pool.close(grace=1.0)


class _Listeners:
    """One for each lane."""

    def __init__(self) -> None:
        self.of = {lane: Listener() for lane in LANES}

    def finished(self, lane: str, batch: int, answers: Sequence[Tensors | RequestError], timing: Timing) -> None:
        self.of[lane].finished(lane, batch, answers, timing)

    def failed(self, lane: str, batch: int, reason: str) -> None:
        self.of[lane].failed(lane, batch, reason)

    def died(self, lane: str, reason: str) -> None:
        self.of[lane].died(lane, reason)

    def ready(self, lane: str) -> None:
        pass


class _Two:
    """Workers side by side."""

    def __init__(self, pool: Pool, listeners: _Listeners, candidates: Mapping[str, Candidate]) -> None:
        self._pool = pool
        self._listeners = listeners
        self._candidates = candidates
        self._numbers = itertools.count(1)
        self._alone: dict[Load, float] = {}

    async def measured(self, run: Run, seconds: float) -> tuple[Sample, Sample]:
        one, other = run
        for _ in range(TRIES):
            try:
                for lane, load in zip(LANES, run, strict=True):
                    if load not in self._alone:
                        (self._alone[load],) = await self._busy({lane: load}, seconds / 2)
                a, b = await self._busy(dict(zip(LANES, run, strict=True)), seconds)
            except (ModelError, WorkerError) as error:
                raise ModelError(f"{one.model!r} beside {other.model!r} cannot be measured: {error}") from None
            both = Sample(one, (other,), self._alone[one], a), Sample(other, (one,), self._alone[other], b)
            if all(sample.slowdown >= FASTEST for sample in both):
                return both
            for load in run:  # it was held up when it ran alone
                self._alone.pop(load, None)
        raise ModelError(
            f"{one.model!r} beside {other.model!r} seems faster than alone, again and again; this machine has something"
            " else to do: try when it is quiet, and what was measured will be gone on with"
        )

    async def _busy(self, loads: Mapping[str, Load], seconds: float) -> list[float]:
        """Keep each lane busy until all have run LEAST batches and one to begin with; the median of those of each."""
        latencies: dict[str, list[float]] = {lane: [] for lane in loads}
        begun = time.monotonic()

        def enough() -> bool:
            return time.monotonic() - begun >= seconds and all(len(each) > LEAST for each in latencies.values())

        async def keep(lane: str, load: Load) -> None:
            inputs = self._candidates[load.model].sample(load.batch)
            while not enough():
                took = await self._batch(lane, load.model, inputs)
                if not enough():  # else the other stopped before this one ended
                    latencies[lane].append(took)

        await asyncio.gather(*(keep(lane, load) for lane, load in loads.items()))
        return [statistics.median(each[1:]) for each in latencies.values()]

    async def _batch(self, lane: str, model: str, inputs: Tensors) -> float:
        listener = self._listeners.of[lane]
        listener.waiting = asyncio.get_running_loop().create_future()
        sent = time.monotonic()
        self._pool.run(lane, next(self._numbers), model, [inputs])
        await listener.waiting
        return time.monotonic() - sent
