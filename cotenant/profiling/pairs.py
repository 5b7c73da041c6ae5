"""Measuring models side by side, on the path that serves them: two workers at once, each on its share, always busy.

Which pairs are run first is a question of how much each tells of all the others (`predictors.ours.telling`). Pairs that
cut the device alike share their workers.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from cotenant.backends import Backend
from cotenant.core.model import Kind
from cotenant.core.plan import device_name
from cotenant.core.profile import Profiles
from cotenant.core.units import WHOLE
from cotenant.errors import ModelError, RequestError, WorkerError
from cotenant.live.pool import Pool
from cotenant.predictors import Load
from cotenant.predictors.ours import telling
from cotenant.predictors.samples import FASTEST, Sample
from cotenant.profiling.grid import ARENA, LEAST, Candidate, Grid, Listener, Tensors, nearest
from cotenant.worker.arena import Arena
from cotenant.worker.wire import Timing

SPLITS = (250, 500)  # ‰ of the first of a pair, at most half; the other has the rest
BATCHES = 3  # of each model and share, from one row to the largest that is worth it
LONGEST = 0.25  # seconds alone
SECONDS = 0.6  # for a pair, and at least LEAST batches of each
TRIES = 3
AT_ONCE = 24  # pairs that are chosen, then run by cut
MOST = 700  # pairs to choose among: of more, an even part

Run = tuple[Load, Load]


def pairs(profiles: Profiles, kind: Kind, batches: int = BATCHES) -> list[Run]:
    """All pairs worth measuring, the smaller share first, or an even part of very many. A model may be its own."""
    found: list[Run] = []
    for share, rest in splits(kind.cuts):
        small, large = _loads(profiles, kind.name, share, batches), _loads(profiles, kind.name, rest, batches)
        alike = share == rest  # then either order is the same pair
        found += [(one, other) for i, one in enumerate(small) for j, other in enumerate(large) if not alike or i <= j]
    if len(found) <= MOST:
        return found
    some = np.random.default_rng(0).permutation(len(found))[:MOST]
    return [found[i] for i in sorted(some.tolist())]


def measured(runs: Sequence[Run], samples: Sequence[Sample]) -> list[int]:
    """Places of runs of which there are both samples."""
    seen = {(sample.victim, *sample.neighbours) for sample in samples}
    return [place for place, run in enumerate(runs) if run in seen and run[::-1] in seen]


def splits(cuts: Sequence[int]) -> list[tuple[int, int]]:
    """A device cut in two, by legal shares: next to each of SPLITS, and the largest that fits beside it."""
    found: dict[tuple[int, int], None] = {}
    for share in SPLITS:
        beside = [cut for cut in cuts if cut <= WHOLE - nearest(share, cuts)]
        if beside:
            small, large = sorted((nearest(share, cuts), beside[-1]))
            found[small, large] = None
    return list(found)


def _loads(profiles: Profiles, kind: str, share: int, batches: int) -> list[Load]:
    found = []
    for (model, on), profile in profiles.items():
        if on == kind:
            measured = sorted({point.batch for point in profile.points})
            worth = [batch for batch in measured if profile.latency(batch, share) <= LONGEST]
            some = {worth[i] for i in np.linspace(0, len(worth) - 1, batches).round().astype(int)} if worth else set()
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
    grid: Grid,
    seconds: float = SECONDS,
    at_once: int = AT_ONCE,
) -> AsyncGenerator[tuple[Sample, Sample], None]:
    """Run `count` of the pairs, those first that tell most, on the first device of their kind, which must have nothing
    else to do meanwhile.

    done: places of runs that were measured before. grid: how inputs come, as when profiles are measured. at_once: of so
    many pairs those that cut the device alike come together; with more, workers start less often. Gives of each run a
    sample with either as the victim: medians, in seconds, from handing a batch to a worker to having its answer. Raises
    ModelError where a model fails.
    """
    order = itertools.islice(telling(runs, profiles, done), count)
    two = _Two(backend, candidates, grid)
    try:
        while chunk := list(itertools.islice(order, at_once)):
            by_cut = sorted((runs[place] for place in chunk), key=_cut)
            for _, some in itertools.groupby(by_cut, key=_cut):
                alike = list(some)
                await two.cut(alike)
                for run in alike:
                    yield await two.measured(run, seconds)
    except WorkerError as error:
        raise ModelError(f"pairs cannot be measured: {error}") from None
    finally:
        await two.close()


def _cut(run: Run) -> tuple[str, ...]:
    return tuple(f"{load.kind} {load.share:04}" for load in run)


class _Listeners:
    """One for each lane."""

    def __init__(self) -> None:
        self.of: dict[str, Listener] = {}

    def finished(self, lane: str, batch: int, answers: Sequence[Tensors | RequestError], timing: Timing) -> None:
        self.of[lane].finished(lane, batch, answers, timing)

    def failed(self, lane: str, batch: int, reason: str) -> None:
        self.of[lane].failed(lane, batch, reason)

    def died(self, lane: str, reason: str) -> None:
        self.of[lane].died(lane, reason)

    def ready(self, lane: str) -> None:
        self.of[lane] = Listener()


class _Two:
    """Workers side by side."""

    def __init__(self, backend: Backend, candidates: Mapping[str, Candidate], grid: Grid) -> None:
        self._candidates = candidates
        self._grid = grid
        self._listeners = _Listeners()
        self._arena = Arena(ARENA)
        self._pool = Pool(backend, self._arena, self._listeners)
        self._lanes: tuple[str, ...] = ()
        self._cuts = itertools.count()
        self._numbers = itertools.count(1)
        self._alone: dict[Load, float] = {}

    async def cut(self, runs: Sequence[Run]) -> None:
        """From now on there are two workers that are cut as in all these runs, each with every model that it is to
        run. Raises WorkerError where one does not start."""
        number = next(self._cuts)
        device = device_name(runs[0][0].kind)
        before, self._lanes = self._lanes, tuple(f"{device}/pairs-{number}-{place}" for place in (0, 1))
        # Where lanes share a process it must not end, with what it has loaded, before the next are open.
        stays = any(self._pool.shares_process(lane) for lane in before)
        if not stays:
            await self._stop(before)
        for place in (1, 0):  # the larger share first, as the backend wants it
            largest: dict[str, int] = {}
            for load in (run[place] for run in runs):
                largest[load.model] = max(load.batch, largest.get(load.model, 0))
            models = [
                msgspec.structs.replace(self._candidates[it].model, max_batch=rows) for it, rows in largest.items()
            ]
            await self._pool.start(self._lanes[place], runs[0][place].share, models, leaving=before if stays else ())
        if stays:
            await self._stop(before)

    async def close(self) -> None:
        await self._pool.close(grace=1.0)
        self._arena.close()

    async def _stop(self, lanes: Iterable[str]) -> None:
        await asyncio.gather(*(self._pool.stop(lane, grace=1.0) for lane in lanes))

    async def measured(self, run: Run, seconds: float) -> tuple[Sample, Sample]:
        one, other = run
        for _ in range(TRIES):
            try:
                for lane, load in zip(self._lanes, run, strict=True):
                    if load not in self._alone:
                        (self._alone[load],) = await self._busy({lane: load}, seconds / 2)
                a, b = await self._busy(dict(zip(self._lanes, run, strict=True)), seconds)
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
            batches = itertools.cycle(self._candidates[load.model].requests(load.batch, self._grid, self._arena))
            while not enough():
                took = await self._batch(lane, load.model, next(batches))
                if not enough():  # else the other stopped before this one ended
                    latencies[lane].append(took)

        await asyncio.gather(*(keep(lane, load) for lane, load in loads.items()))
        return [statistics.median(each[1:]) for each in latencies.values()]

    async def _batch(self, lane: str, model: str, requests: Sequence[Tensors]) -> float:
        listener = self._listeners.of[lane]
        listener.waiting = asyncio.get_running_loop().create_future()
        sent = time.monotonic()
        self._pool.run(lane, next(self._numbers), model, requests)
        await listener.waiting
        return time.monotonic() - sent
