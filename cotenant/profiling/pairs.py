"""Measure co-located models through the workers that serve them: one worker each, on its share, always busy.

The most informative runs come first (`predictors.gaussian_process.select_experiments`). Most are pairs; sets of three
and four tell how the effects of several co-located models combine. Runs that cut the device alike share their workers.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing

import msgspec
import numpy as np

from cotenant.backends import Backend
from cotenant.core import mig
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.core.profile import Profiles
from cotenant.core.units import WHOLE, show_names
from cotenant.errors import ModelError, RequestError, WorkerError
from cotenant.live.supervised_pool import SupervisedPool
from cotenant.predictors import Load
from cotenant.predictors.gaussian_process import select_experiments
from cotenant.predictors.samples import MIN_TIME_RATIO, Sample
from cotenant.profiling.grid import (
    ARENA,
    MIN_BATCHES,
    Candidate,
    Grid,
    Listener,
    Tensors,
    nearest_share,
    run_batch,
)
from cotenant.worker.arena import Arena
from cotenant.worker.wire import Timing

SHARES = ((250,), (500,), (250, 250), (250, 250, 250))  # ‰; one more partition gets the rest of the device
RUNS_PER_TURN = {2: 6, 3: 1, 4: 1}  # by the number of co-located models
BATCH_SIZES = 3  # of each model and share, from one row to the largest worth measuring
MAX_LATENCY = 0.25  # seconds alone; slower batches are not measured
SECONDS = 0.6  # for a run, and at least MIN_BATCHES batches of each model
ATTEMPTS = 3
RUNS_AT_ONCE = 32  # candidate runs that are selected together, then grouped by cut
MEASURED_FRACTION = 0.2  # fraction of all pairs; more of them add little
MAX_PAIRS = 700  # maximum runs to choose from; of more, an even sample
SETS_PER_CUT = 60  # random sets of three or four to choose from

Run = tuple[Load, ...]


def candidate_pairs(profiles: Profiles, kind: Kind, batches: int = BATCH_SIZES) -> list[Run]:
    """Return the runs worth measuring, smaller shares first: all pairs, or an even sample of very many, and some random
    sets of three and four. A model may be co-located with itself."""
    runs: list[Run] = []
    for cut in pair_shares(kind):
        loads = [_loads(profiles, kind.name, share, batches) for share in cut]
        runs += _pairs(*loads) if len(cut) == 2 else _random_sets(loads)
    fitting = [
        run for run in runs if sum(profiles[load.model, load.kind].memory(load.batch) for load in run) <= kind.memory
    ]
    pairs = [run for run in fitting if len(run) == 2]
    if len(pairs) > MAX_PAIRS:
        sample = np.random.default_rng(0).permutation(len(pairs))[:MAX_PAIRS]
        pairs = [pairs[i] for i in sorted(sample.tolist())]
    return pairs + [run for run in fitting if len(run) > 2]


def _pairs(small: Sequence[Load], large: Sequence[Load]) -> list[Run]:
    symmetric = small == large  # then either order is the same pair
    return [(one, other) for i, one in enumerate(small) for j, other in enumerate(large) if not symmetric or i <= j]


def _random_sets(loads: Sequence[Sequence[Load]]) -> list[Run]:
    if not all(loads):
        return []
    rng = np.random.default_rng(0)
    sets = (sorted((each[int(rng.integers(len(each)))] for each in loads), key=_order) for _ in range(SETS_PER_CUT))
    return list(dict.fromkeys(map(tuple, sets)))


def _order(load: Load) -> tuple[int, str, int]:
    return load.share, load.model, load.batch


def enough_samples(runs: Sequence[Run]) -> int:
    """Return how many runs to measure: a fifth of all pairs, and larger sets in proportion (RUNS_PER_TURN)."""
    pairs = sum(len(run) == 2 for run in runs)
    turn = sum(RUNS_PER_TURN[size] for size in {len(run) for run in runs})
    return min(len(runs), max(1, round(MEASURED_FRACTION * pairs * turn / RUNS_PER_TURN[2])))


def measured_pairs(runs: Sequence[Run], samples: Sequence[Sample]) -> list[int]:
    """Return the indices of the runs of which all samples are there."""
    known = {(sample.victim, *sample.colocated) for sample in samples}
    return [
        index
        for index, run in enumerate(runs)
        if known.issuperset((victim, *colocated) for victim, colocated in _victims(run))
    ]


def _victims(run: Run) -> list[tuple[Load, Run]]:
    """Return each load as the victim, with the others."""
    return [(load, (*run[:i], *run[i + 1 :])) for i, load in enumerate(run)]


def pair_shares(kind: Kind) -> list[tuple[int, ...]]:
    """Return cuts of a device in two and more: the legal shares nearest to SHARES, and the largest that fits."""
    cuts: dict[tuple[int, ...], None] = {}
    for targets in SHARES:
        shares = [nearest_share(share, kind.cuts) for share in targets]
        rest = [cut for cut in kind.cuts if cut <= WHOLE - sum(shares)]
        if rest and _legal(cut := tuple(sorted((*shares, rest[-1]))), kind):
            cuts[cut] = None
    return list(cuts)


def _legal(cut: Sequence[int], kind: Kind) -> bool:
    return kind.geometry is None or mig.placements_fit(kind.geometry, [(share, 0) for share in cut]) is not None


def _loads(profiles: Profiles, kind: str, share: int, batches: int) -> list[Load]:
    loads = []
    for (model, on), profile in profiles.items():
        if on == kind:
            measured = sorted({point.batch for point in profile.points})
            usable = [batch for batch in measured if profile.latency(batch, share) <= MAX_LATENCY]
            if usable:
                chosen = {usable[i] for i in np.linspace(0, len(usable) - 1, batches).round().astype(int)}
                loads += [Load(model, kind, batch, share) for batch in sorted(chosen)]
    return loads


async def measure_pairs(
    backend: Backend,
    candidates: Mapping[str, Candidate],
    runs: Sequence[Run],
    profiles: Profiles,
    *,
    done: Sequence[int] = (),
    count: int,
    grid: Grid,
    seconds: float = SECONDS,
    at_once: int = RUNS_AT_ONCE,
) -> AsyncGenerator[list[Sample] | str, None]:
    """Measure `count` of the runs, most informative first, on the first device of their kind, which must be idle
    otherwise.

    done: indices of runs that were measured before. grid: how inputs are sent, as for profiles. at_once: how many runs
    are grouped by cut at a time; more of them means fewer worker starts. Yields for each run one sample per victim:
    medians, in seconds, from handing a batch to a worker to receiving its result; or why a run could not be measured,
    with the names of its models.
    """
    order = itertools.islice(select_experiments(runs, profiles, RUNS_PER_TURN, done), count)
    bench = _Bench(backend, candidates, grid)
    try:
        while chunk := list(itertools.islice(order, at_once)):
            by_cut = sorted((runs[index] for index in chunk), key=_cut)
            for _, group in itertools.groupby(by_cut, key=_cut):
                async with aclosing(_measure_group(bench, list(group), seconds)) as found:
                    async for each in found:
                        yield each
    finally:
        await bench.close()


async def _measure_group(
    bench: _Bench, runs: Sequence[Run], seconds: float
) -> AsyncGenerator[list[Sample] | str, None]:
    """Measure runs of the same cut in one set of workers. After a run that fails, others take their place; where they
    do not start with all models, each run gets its own."""
    groups = [list(runs)]
    while groups:
        group = groups.pop()
        try:
            await bench.cut(group)
        except WorkerError as error:
            if len(group) == 1:
                yield _failed(group[0], error)
            else:
                groups += [[run] for run in reversed(group)]
            continue
        for place, run in enumerate(group):
            try:
                samples = await bench.measure(run, seconds)
            except (ModelError, WorkerError) as error:
                if group[place + 1 :]:
                    groups.append(group[place + 1 :])
                yield _failed(run, error)
                break
            yield samples


def _failed(run: Run, error: Exception) -> str:
    return f"{_described(run)} cannot be measured: {error}"


def _described(run: Run) -> str:
    first, *others = (repr(load.model) for load in run)
    return f"{first} co-located with {show_names(others)}"


def _cut(run: Run) -> tuple[str, ...]:
    return tuple(f"{load.kind} {load.share:04}" for load in run)


class _Listeners:
    """Hold one listener for each lane."""

    def __init__(self) -> None:
        self.of: dict[LaneId, Listener] = {}

    def finished(self, lane: LaneId, batch: int, answers: Sequence[Tensors | RequestError], timing: Timing) -> None:
        self.of[lane].finished(lane, batch, answers, timing)

    def failed(self, lane: LaneId, batch: int, reason: str) -> None:
        self.of[lane].failed(lane, batch, reason)

    def died(self, lane: LaneId, reason: str) -> None:
        self.of[lane].died(lane, reason)

    def ready(self, lane: LaneId) -> None:
        self.of[lane] = Listener()


class _Bench:
    """Measure co-located workers."""

    def __init__(self, backend: Backend, candidates: Mapping[str, Candidate], grid: Grid) -> None:
        self._candidates = candidates
        self._grid = grid
        self._listeners = _Listeners()
        self._arena = Arena(ARENA)
        self._pool = SupervisedPool(backend, self._arena, self._listeners)
        self._lanes: tuple[LaneId, ...] = ()
        self._slots = itertools.count()
        self._numbers = itertools.count(1)

    async def cut(self, runs: Sequence[Run]) -> None:
        """Start workers for the cut that these runs have in common, each with all models that it is to run.

        Raises WorkerError if one does not start.
        """
        device = DeviceId(runs[0][0].kind)
        before, self._lanes = self._lanes, tuple(LaneId(device, next(self._slots)) for _ in runs[0])
        # A process that lanes share must not end, with what it has loaded, before the next lanes are open.
        stays = any(self._pool.shares_process(lane) for lane in before)
        if not stays:
            await self._stop(before)
        try:
            for place in reversed(range(len(runs[0]))):  # larger share first, as backends require
                largest: dict[str, int] = {}
                for load in (run[place] for run in runs):
                    largest[load.model] = max(load.batch, largest.get(load.model, 0))
                models = [
                    msgspec.structs.replace(self._candidates[name].model, max_batch=rows)
                    for name, rows in largest.items()
                ]
                await self._pool.start(
                    self._lanes[place], runs[0][place].share, models, leaving=before if stays else ()
                )
        finally:
            if stays:
                await self._stop(before)

    async def close(self) -> None:
        await self._pool.close(grace=1.0)
        self._arena.close()

    async def _stop(self, lanes: Iterable[LaneId]) -> None:
        await asyncio.gather(*(self._pool.stop(lane, grace=1.0) for lane in lanes))

    async def measure(self, run: Run, seconds: float) -> list[Sample]:
        """Measure a run, and each load alone just before: on a shared machine its latency of minutes ago is stale.
        Raises ModelError and WorkerError, after which the workers are not measured any more."""
        for _ in range(ATTEMPTS):
            lanes = dict(zip(self._lanes, run, strict=True))
            alone = [(await self._busy({lane: load}, seconds / 2))[0] for lane, load in lanes.items()]
            together = await self._busy(lanes, seconds)
            if all(after >= MIN_TIME_RATIO * before for before, after in zip(alone, together, strict=True)):
                return [
                    Sample(victim, colocated, before, after)
                    for (victim, colocated), before, after in zip(_victims(run), alone, together, strict=True)
                ]
            # Otherwise one was disturbed while it ran alone.
        raise ModelError(
            f"it was faster than alone {ATTEMPTS} times; the machine is busy: try again when it is quiet, which"
            " continues from here"
        )

    async def _busy(self, loads: Mapping[LaneId, Load], seconds: float) -> list[float]:
        """Keep each lane busy, with the pauses of a profile, until all have run MIN_BATCHES batches after a first one;
        return the median latency of each lane in seconds."""
        latencies: dict[LaneId, list[float]] = {lane: [] for lane in loads}
        begun = time.monotonic()

        def enough() -> bool:
            return time.monotonic() - begun >= seconds and all(len(each) > MIN_BATCHES for each in latencies.values())

        async def keep(lane: LaneId, load: Load) -> None:
            batches = itertools.cycle(self._candidates[load.model].requests(load.batch, self._grid, self._arena))
            rest = 0.0
            while not enough():
                await asyncio.sleep(max(self._grid.pause - rest, 0.0))
                took, rest = await self._batch(lane, load.model, next(batches))
                if not enough():  # otherwise the others stopped before this batch ended
                    latencies[lane].append(took)

        keeping = [asyncio.create_task(keep(lane, load)) for lane, load in loads.items()]
        try:
            await asyncio.gather(*keeping)
        finally:
            for task in keeping:  # those beside one that failed would wait for it for ever
                task.cancel()
        return [statistics.median(each[1:]) for each in latencies.values()]

    async def _batch(self, lane: LaneId, model: str, requests: Sequence[Tensors]) -> tuple[float, float]:
        """Run one batch; return its seconds, and those of the throttle's pause after it."""
        taken, timing = await run_batch(
            self._pool, self._listeners.of[lane], lane, next(self._numbers), model, requests
        )
        return taken, timing.pause
