"""Measuring models side by side, on the path that serves them: a worker for each, on its share, always busy.

Which runs come first is a question of how much each tells of all the others
(`predictors.gaussian_process.select_experiments`). Most are
pairs. What several neighbours cost adds up only nearly, and how nearly is told by sets of three and four. Runs that cut
the device alike share their workers.
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
from cotenant.core import mig
from cotenant.core.model import Kind
from cotenant.core.plan import device_name
from cotenant.core.profile import Profiles
from cotenant.core.units import WHOLE, show_names
from cotenant.errors import ModelError, RequestError, WorkerError
from cotenant.live.pool import Pool
from cotenant.predictors import Load
from cotenant.predictors.gaussian_process import select_experiments
from cotenant.predictors.samples import FASTEST, Sample
from cotenant.profiling.grid import ARENA, LEAST, Candidate, Grid, Listener, Tensors, nearest_share
from cotenant.worker.arena import Arena
from cotenant.worker.wire import Timing

FIRST = ((250,), (500,), (250, 250), (250, 250, 250))  # ‰; one more has the rest of the device
TURNS = {2: 6, 3: 1, 4: 1}  # of so many models side by side so many runs
BATCHES = 3  # of each model and share, from one row to the largest that is worth it
LONGEST = 0.25  # seconds alone
SECONDS = 0.6  # for a run, and at least LEAST batches of each
TRIES = 3
AT_ONCE = 32  # runs that are chosen, then run by cut
PART = 0.2  # of all pairs: what more of them would tell is little
MOST = 700  # pairs to choose among: of more, an even part
DRAWN = 60  # sets to choose among, for each way to cut the device

Run = tuple[Load, ...]


def candidate_pairs(profiles: Profiles, kind: Kind, batches: int = BATCHES) -> list[Run]:
    """What is worth measuring, the smaller shares first: all pairs, or an even part of very many, and some larger sets,
    drawn at random. A model may be beside itself."""
    found: list[Run] = []
    for cut in pair_shares(kind):
        loads = [_loads(profiles, kind.name, share, batches) for share in cut]
        found += _pairs(*loads) if len(cut) == 2 else _drawn(loads)
    fitting = [run for run in found if sum(profiles[it.model, it.kind].memory(it.batch) for it in run) <= kind.memory]
    pairs = [run for run in fitting if len(run) == 2]
    if len(pairs) > MOST:
        some = np.random.default_rng(0).permutation(len(pairs))[:MOST]
        pairs = [pairs[i] for i in sorted(some.tolist())]
    return pairs + [run for run in fitting if len(run) > 2]


def _pairs(small: Sequence[Load], large: Sequence[Load]) -> list[Run]:
    alike = small == large  # then either order is the same pair
    return [(one, other) for i, one in enumerate(small) for j, other in enumerate(large) if not alike or i <= j]


def _drawn(loads: Sequence[Sequence[Load]]) -> list[Run]:
    if not all(loads):
        return []
    rng = np.random.default_rng(0)
    drawn = (sorted((it[int(rng.integers(len(it)))] for it in loads), key=_order) for _ in range(DRAWN))
    return list(dict.fromkeys(map(tuple, drawn)))


def _order(load: Load) -> tuple[int, str, int]:
    return load.share, load.model, load.batch


def enough_samples(runs: Sequence[Run]) -> int:
    """How many of them to measure: a fifth of all pairs, and what comes of larger sets by turns."""
    pairs = sum(len(run) == 2 for run in runs)
    turns = sum(TURNS[size] for size in {len(run) for run in runs})
    return min(len(runs), max(1, round(PART * pairs * turns / TURNS[2])))


def measured_pairs(runs: Sequence[Run], samples: Sequence[Sample]) -> list[int]:
    """Places of runs of which there are all samples."""
    seen = {(sample.victim, *sample.colocated) for sample in samples}
    return [place for place, run in enumerate(runs) if seen.issuperset((it, *rest) for it, rest in _views(run))]


def _views(run: Run) -> list[tuple[Load, Run]]:
    """Each load with the others."""
    return [(load, (*run[:i], *run[i + 1 :])) for i, load in enumerate(run)]


def pair_shares(kind: Kind) -> list[tuple[int, ...]]:
    """Ways to cut a device for two and more: by legal shares next to FIRST, and the largest that fits beside them."""
    found: dict[tuple[int, ...], None] = {}
    for wanted in FIRST:
        shares = [nearest_share(share, kind.cuts) for share in wanted]
        beside = [cut for cut in kind.cuts if cut <= WHOLE - sum(shares)]
        if beside and _legal(cut := tuple(sorted((*shares, beside[-1]))), kind):
            found[cut] = None
    return list(found)


def _legal(cut: Sequence[int], kind: Kind) -> bool:
    return kind.geometry is None or mig.placements_fit(kind.geometry, [(share, 0) for share in cut]) is not None


def _loads(profiles: Profiles, kind: str, share: int, batches: int) -> list[Load]:
    found = []
    for (model, on), profile in profiles.items():
        if on == kind:
            measured = sorted({point.batch for point in profile.points})
            worth = [batch for batch in measured if profile.latency(batch, share) <= LONGEST]
            some = {worth[i] for i in np.linspace(0, len(worth) - 1, batches).round().astype(int)} if worth else set()
            found += [Load(model, kind, batch, share) for batch in sorted(some)]
    return found


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
    at_once: int = AT_ONCE,
) -> AsyncGenerator[list[Sample], None]:
    """Do `count` of the runs, those first that tell most, on the first device of their kind, which must have nothing
    else to do meanwhile.

    done: places of runs that were measured before. grid: how inputs come, as when profiles are measured. at_once: of so
    many runs those that cut the device alike come together; with more, workers start less often. Gives of each run a
    sample with each as the victim: medians, in seconds, from handing a batch to a worker to having its answer. Raises
    ModelError where a model fails.
    """
    order = itertools.islice(select_experiments(runs, profiles, TURNS, done), count)
    bench = _Bench(backend, candidates, grid)
    try:
        while chunk := list(itertools.islice(order, at_once)):
            by_cut = sorted((runs[place] for place in chunk), key=_cut)
            for _, some in itertools.groupby(by_cut, key=_cut):
                alike = list(some)
                await bench.cut(alike)
                for run in alike:
                    yield await bench.measured(run, seconds)
    except WorkerError as error:
        raise ModelError(f"models cannot be measured side by side: {error}") from None
    finally:
        await bench.close()


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


class _Bench:
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

    async def cut(self, runs: Sequence[Run]) -> None:
        """From now on there are workers that are cut as in all these runs, each with every model that it is to run.
        Raises WorkerError where one does not start."""
        number = next(self._cuts)
        device = device_name(runs[0][0].kind)
        before, self._lanes = self._lanes, tuple(f"{device}/pairs-{number}-{place}" for place in range(len(runs[0])))
        # Where lanes share a process it must not end, with what it has loaded, before the next are open.
        stays = any(self._pool.shares_process(lane) for lane in before)
        if not stays:
            await self._stop(before)
        for place in reversed(range(len(runs[0]))):  # the larger share first, as the backend wants it
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

    async def measured(self, run: Run, seconds: float) -> list[Sample]:
        """Each load alone just before, since on a machine that others use it took another time some minutes ago."""
        first, *others = (repr(load.model) for load in run)
        who = f"{first} beside {show_names(others)}"
        for _ in range(TRIES):
            try:
                lanes = dict(zip(self._lanes, run, strict=True))
                alone = [(await self._busy({lane: load}, seconds / 2))[0] for lane, load in lanes.items()]
                together = await self._busy(lanes, seconds)
            except (ModelError, WorkerError) as error:
                raise ModelError(f"{who} cannot be measured: {error}") from None
            samples = [
                Sample(load, rest, before, took)
                for (load, rest), before, took in zip(_views(run), alone, together, strict=True)
            ]
            if all(sample.slowdown >= FASTEST for sample in samples):
                return samples  # else one was held up when it ran alone
        raise ModelError(
            f"{who} seems faster than alone, again and again; this machine has something else to do: try when it is"
            " quiet, and what was measured will be gone on with"
        )

    async def _busy(self, loads: Mapping[str, Load], seconds: float) -> list[float]:
        """Keep each lane busy, but for a profile's pauses, until all have run LEAST batches and one to begin with; the
        median of those of each."""
        latencies: dict[str, list[float]] = {lane: [] for lane in loads}
        begun = time.monotonic()

        def enough() -> bool:
            return time.monotonic() - begun >= seconds and all(len(each) > LEAST for each in latencies.values())

        async def keep(lane: str, load: Load) -> None:
            batches = itertools.cycle(self._candidates[load.model].requests(load.batch, self._grid, self._arena))
            rest = 0.0
            while not enough():
                await asyncio.sleep(max(self._grid.pause - rest, 0.0))
                took, rest = await self._batch(lane, load.model, next(batches))
                if not enough():  # else the other stopped before this one ended
                    latencies[lane].append(took)

        await asyncio.gather(*(keep(lane, load) for lane, load in loads.items()))
        return [statistics.median(each[1:]) for each in latencies.values()]

    async def _batch(self, lane: str, model: str, requests: Sequence[Tensors]) -> tuple[float, float]:
        """Seconds that it took, and that its worker rests after it to hold its share."""
        listener = self._listeners.of[lane]
        listener.waiting = asyncio.get_running_loop().create_future()
        sent = time.monotonic()
        self._pool.run(lane, next(self._numbers), model, requests)
        timing = await listener.waiting
        return time.monotonic() - sent, timing.pause
