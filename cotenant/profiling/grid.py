"""Profile models over batch size and share, through the workers and throttles that serve them.

Each share is measured alone, from the largest down. The latency of a point is extrapolated from the points before it,
and one that no plan could use, because it takes longer than `Grid.longest`, is skipped.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing

import msgspec
import numpy as np

from cotenant.backends import Backend
from cotenant.control.supervisor import HANGING
from cotenant.core.identity import DeviceId, LaneId, own_kind
from cotenant.core.model import Kind
from cotenant.core.profile import Point, Profile
from cotenant.core.tensor import Tensor
from cotenant.core.units import WHOLE
from cotenant.errors import ModelError, RequestError, WorkerError
from cotenant.live.confinement import Confinement
from cotenant.live.foreign_load import ForeignLoad, available_cores
from cotenant.live.supervised_pool import SupervisedPool
from cotenant.profiling.machine_load import FOREIGN
from cotenant.worker.arena import Arena, Block
from cotenant.worker.wire import LARGE, Timing, WorkerModel

Tensors = tuple[Tensor, ...]

SHARES = (1000, 500, 250, 100, 50)
BATCHES = (1, 2, 4, 8, 16, 32)
MIN_BATCHES = 3  # batches measured for one point
MAX_BATCHES = 40
SLOW = 0.1  # seconds; longer batches vary little and cold caches hardly matter to them: two are enough
GPU_INPUT_SETS = 4
CPU_PAUSE = 0.01  # seconds
# Of a short batch more are measured: the smaller the share, the more of the latency is chance.
SHORT = 0.02  # seconds
SHORT_SECONDS = 2.0  # factor on the seconds of a point
MAX_SHORT_BATCHES = 100

# A first profile, in some seconds: what lies between is interpolated.
COARSE_SHARES = (1000, 250, 50)
COARSE_BATCHES = (1, 4, 16)
COARSE_SECONDS = 0.15
COARSE_LONGEST = 0.4
ARENA = 1 << 30  # bytes
FIRST_SLOT = 1_000_000  # of lanes that measure: beyond those of a server, which loads a model on devices that serve


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Configure what to measure.

    shares: ‰, descending. seconds: to spend on one point; at least two or three batches run. longest: seconds above
    which a batch is of no use to any plan. patience: at least so many times the latency of one row on the largest share
    is of use. memory: bytes of the device; a model that fails on a share, and that took more than half of that share's
    memory on a larger one, is too large for it and gets no points there. inputs: how many different batches of inputs
    take turns. separate_rows: each row is a request of its own, as callers send them; for short batches, joining them
    is much of the latency. pause: seconds of rest before each batch; back to back, a small model finds its weights in
    the cache and the core awake and is three to five times as fast as when other models run in between.
    """

    shares: tuple[int, ...] = SHARES
    batches: tuple[int, ...] = BATCHES
    seconds: float = 0.4
    longest: float = 1.0
    patience: float = 0.0
    memory: int = 1 << 62
    inputs: int = 1
    separate_rows: bool = False
    pause: float = 0.0

    @property
    def points(self) -> int:
        return len(self.shares) * len(self.batches)


def grid_of(kind: Kind, shares: Sequence[int] = SHARES) -> Grid:
    """Return the grid for a kind of device: the legal shares nearest to `shares`."""
    if own_kind(kind.name) == "cpu":
        return Grid(pause=CPU_PAUSE)
    return Grid(shares=_legal(kind, shares), memory=kind.memory, inputs=GPU_INPUT_SETS, separate_rows=True)


def coarse_grid_of(kind: Kind) -> Grid:
    """Return the grid of a first profile: few points, and none that takes long."""
    full = grid_of(kind)
    return msgspec.structs.replace(
        full,
        shares=COARSE_SHARES if own_kind(kind.name) == "cpu" else _legal(kind, COARSE_SHARES),
        batches=COARSE_BATCHES,
        seconds=COARSE_SECONDS,
        longest=COARSE_LONGEST,
        patience=WHOLE / COARSE_SHARES[1] * 1.5,
    )


def _legal(kind: Kind, shares: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({nearest_share(share, kind.cuts) for share in shares}, reverse=True))


def nearest_share(share: int, cuts: Sequence[int]) -> int:
    """Return the legal share nearest to `share` by ratio."""
    return min(cuts, key=lambda cut: max(cut / share, share / cut))


class Candidate(msgspec.Struct, frozen=True):
    """Describe a model to measure. sample: makes inputs with the given number of rows."""

    model: WorkerModel
    sample: Callable[[int], Tensors]

    def requests(self, rows: int, grid: Grid, arena: Arena) -> list[list[Tensors]]:
        """Make `grid.inputs` batches of that many rows as lists of requests, in the arena, where a server has them
        too."""
        return _copied(_reserved(self.inputs(rows, grid), arena))

    def inputs(self, rows: int, grid: Grid) -> list[list[Tensors]]:
        """Make the same elsewhere than in the arena, which takes a while: not for an event loop that serves."""
        counts = [1] * rows if grid.separate_rows and self.model.batched else [rows]
        return [[self.sample(count) for count in counts] for _ in range(grid.inputs)]


# A batch as lists of requests, whose tensors each have a block to go to.
_Reserved = list[list[tuple[Tensor, Block | None]]]


def _reserved(batches: Sequence[Sequence[Tensors]], arena: Arena) -> list[_Reserved]:
    """Allocate blocks for large tensors; small ones, and those without room, are sent with each batch."""
    return [
        [
            [(tensor, arena.allocate(len(tensor.data)) if len(tensor.data) >= LARGE else None) for tensor in tensors]
            for tensors in requests
        ]
        for requests in batches
    ]


def _copied(batches: Sequence[_Reserved]) -> list[list[Tensors]]:
    """Copy tensors to their blocks, which takes a while: not for an event loop that serves."""
    return [[tuple(_moved(*place) for place in places) for places in requests] for requests in batches]


def _moved(tensor: Tensor, block: Block | None) -> Tensor:
    if block is None:
        return tensor
    # By NumPy, which lets other threads run meanwhile.
    np.copyto(np.frombuffer(block.view, np.uint8), np.frombuffer(tensor.data, np.uint8))
    return msgspec.structs.replace(tensor, data=block.view, block=block)


class Listener:
    """Wait for one batch at a time, as a pool listener."""

    def __init__(self) -> None:
        self.waiting: asyncio.Future[Timing] | None = None

    def _settle(self, result: Timing | str) -> None:
        if self.waiting is None or self.waiting.done():
            return
        if isinstance(result, str):
            self.waiting.set_exception(ModelError(result))
        else:
            self.waiting.set_result(result)

    def finished(self, lane: LaneId, batch: int, answers: Sequence[Tensors | RequestError], timing: Timing) -> None:
        error = next((answer for answer in answers if isinstance(answer, RequestError)), None)
        self._settle(timing if error is None else str(error))

    def failed(self, lane: LaneId, batch: int, reason: str) -> None:
        self._settle(reason)

    def died(self, lane: LaneId, reason: str) -> None:
        self._settle(f"its worker died: {reason}")

    def ready(self, lane: LaneId) -> None:
        pass


async def run_batch(
    pool: SupervisedPool, listener: Listener, lane: LaneId, number: int, model: str, requests: Sequence[Tensors]
) -> tuple[float, Timing]:
    """Run one batch; return its seconds, from handing it to the worker to receiving its result, and the worker's
    timing. Raises ModelError if it fails, WorkerError if the worker is not ready."""
    listener.waiting = asyncio.get_running_loop().create_future()
    sent = time.monotonic()
    pool.run(lane, number, model, requests)
    timing = await listener.waiting
    return time.monotonic() - sent, timing


def worker_memory(pool: SupervisedPool, lane: LaneId | None) -> int:
    """Return the bytes of a lane's worker process; 0 where there is none."""
    return next((status.memory for status in pool.status() if status.lane == lane), 0)


async def profile_model(
    backend: Backend,
    model: WorkerModel,
    sample: Callable[[int], Tensors],
    *,
    kind: str,
    grid: Grid,
    measured: Callable[[int], None] = lambda points: None,
    confinement: Confinement | None = None,
) -> Profile:
    """Profile a model alone on the first device of `kind`, which must be idle otherwise.

    sample: makes inputs with the given number of rows. measured: called with the number of grid points completed since
    the last call. confinement: of the worker. See `measure_profiles` for the points. Raises ModelError if the model or
    its worker fails.
    """
    points: list[Point] = []
    completed = 0
    candidates = {model.name: Candidate(model, sample)}
    results = measure_profiles(backend, candidates, device=DeviceId(kind), grid=grid, confinement=confinement)
    async with aclosing(results):
        async for _, point in results:
            if isinstance(point, str):
                raise ModelError(f"model {model.name!r} cannot be measured: {point}")
            if points and point.share != points[-1].share:  # the rest of the larger share was skipped
                skipped = -completed % len(grid.batches)
                completed += skipped
                measured(skipped)
            points.append(point)
            completed += 1
            measured(1)
    measured(grid.points - completed)
    return Profile(model.name, kind, points)


async def measure_profiles(
    backend: Backend,
    candidates: Mapping[str, Candidate],
    *,
    device: DeviceId,
    grid: Grid,
    known: Mapping[str, Sequence[Point]] = {},
    confinement: Confinement | None = None,
    grace: float = 1.0,
) -> AsyncGenerator[tuple[str, Point | str], None]:
    """Measure the grid points of some models, each alone on one device, which must be idle otherwise.

    known: points that are not measured again. confinement: of the worker; of batches that fail in the memory that it
    leaves, and larger ones, there are no points. grace: seconds that it may take to exit at
    the end. Yields (model, point) as they come, one share at a time, or (model, reason) if there will be no more points
    of a model. One worker serves all models of a share, so that it starts once.

    A point's latency is the median, in seconds, from handing a batch to the worker to receiving its result. Features:
    `cv_pct` (coefficient of variation of the latency), `p10_ms`, `p90_ms`, `p99_ms`, `cpu_ms` (CPU time), `foreign_pct`
    (percent of the processors that other programs used), on a GPU `cuda_ms` (CUDA events), and for a model that has the
    worker to itself `start_s` (until it was warm). Memory is the device memory that the model reports or, on a CPU, the
    memory of the worker.
    """
    points = {name: list(known.get(name, ())) for name in candidates}
    broken: set[str] = set()
    bench = _Bench(backend, candidates, device, grid, confinement)
    try:
        for share in sorted(grid.shares, reverse=True):
            wanted = {
                name: batches
                for name, candidate in candidates.items()
                if name not in broken and (batches := _missing_batches(candidate.model, points[name], share, grid))
            }
            async for name, point in bench.share(share, wanted):
                if isinstance(point, Point):
                    points[name].append(point)
                else:
                    broken.add(name)
                    if _too_large(points[name], share, grid):
                        continue
                yield name, point
    finally:
        await bench.close(grace)


def count_missing(model: WorkerModel, points: Sequence[Point], grid: Grid) -> int:
    """Return how many points of a grid some plan could use and are not among these."""
    return sum(len(_missing_batches(model, points, share, grid)) for share in grid.shares)


def _missing_batches(model: WorkerModel, points: Sequence[Point], share: int, grid: Grid) -> list[int]:
    """Return the batches that are not measured on a share yet and that some plan could use."""
    batches = [batch for batch in grid.batches if batch <= model.max_batch] or [1]
    known = {point.batch: point.latency for point in points if point.share == share}
    longest = _longest(points, grid)
    if any(latency > longest for latency in known.values()):
        return []
    return [batch for batch in batches if batch not in known and _extrapolated(points, share, batch) <= longest]


def _longest(points: Sequence[Point], grid: Grid) -> float:
    """Return the seconds above which a batch of a model with these points is of no use."""
    first = max(points, key=lambda point: (point.share, -point.batch), default=None)
    return grid.longest if first is None else max(grid.longest, grid.patience * first.latency)


def _too_large(points: Sequence[Point], share: int, grid: Grid) -> bool:
    """Return whether the model is too large for a share of a device that partitions memory."""
    taken = max((point.memory for point in points if point.share > share), default=0)
    return 2 * taken > grid.memory * share // WHOLE


def _extrapolated(points: Sequence[Point], share: int, batch: int) -> float:
    """Estimate a latency in seconds from the next larger share; 0 if there is none."""
    larger = [point for point in points if point.share > share]
    if not larger:
        return 0.0
    above = min(point.share for point in larger)
    known = {point.batch: point.latency for point in larger if point.share == above}
    if batch in known:
        return known[batch] * above / share
    below = max(known)
    return known[below] * above / share * batch / below


class _Bench:
    """Measure one lane at a time."""

    def __init__(
        self,
        backend: Backend,
        candidates: Mapping[str, Candidate],
        device: DeviceId,
        grid: Grid,
        confinement: Confinement | None,
    ) -> None:
        self._candidates = candidates
        self._device = device
        self._grid = grid
        self._arena = Arena(ARENA)
        self._listener = Listener()
        self._pool = SupervisedPool(backend, self._arena, self._listener, confinement=confinement)
        self._confined = confinement is not None and confinement.memory is not None
        self._numbers = itertools.count(1)
        self._slots = itertools.count(FIRST_SLOT)
        self._lane: LaneId | None = None  # the one that is open
        self._first: dict[str, Point] = {}  # of each model
        self._foreign = ForeignLoad(available_cores())

    async def share(self, share: int, wanted: Mapping[str, Sequence[int]]) -> AsyncIterator[tuple[str, Point | str]]:
        """Measure batches, given by model, on a share."""
        batches = dict(wanted)
        groups = [list(batches)] if batches else []
        while groups:
            names = groups.pop()
            begun = time.monotonic()
            try:
                await self._open(share, {name: batches[name][-1] for name in names})
            except WorkerError as error:
                if len(names) > 1:
                    groups += [[name] for name in names[::-1]]  # one model may keep the others from starting
                elif self._confined and len(batches[names[0]]) > 1:
                    batches[names[0]] = batches[names[0]][:-1]  # which it runs when it starts: too large, perhaps
                    groups.append(names)
                else:
                    yield names[0], str(error)
                continue
            startup = {"start_s": time.monotonic() - begun} if len(names) == 1 else {}
            for place, name in enumerate(names):
                async for point in self._points(name, share, batches[name]):
                    if isinstance(point, Point):
                        point.features.update(startup)
                    yield name, point
                if not self._ready:
                    groups += [names[place + 1 :]] if names[place + 1 :] else []
                    break

    async def close(self, grace: float) -> None:
        await self._pool.close(grace)
        self._arena.close()

    async def _open(self, share: int, batches: Mapping[str, int]) -> None:
        """Replace the open lane by one with these models. A process that lanes share must not end, with what it has
        loaded, before the next lane is open."""
        before = self._lane
        leaving = [before] if before is not None and self._pool.shares_process(before) else []
        if before is not None and not leaving:
            await self._pool.stop(before, grace=1.0)
        self._lane = LaneId(self._device, next(self._slots))
        models = [
            msgspec.structs.replace(self._candidates[name].model, max_batch=largest)
            for name, largest in batches.items()
        ]
        try:
            await self._pool.start(self._lane, share, models, leaving=leaving)
        finally:
            for lane in leaving:
                await self._pool.stop(lane, grace=1.0)

    @property
    def _ready(self) -> bool:
        return any(status.state == "ready" for status in self._pool.status() if status.lane == self._lane)

    async def _points(self, name: str, share: int, batches: Sequence[int]) -> AsyncIterator[Point | str]:
        for batch in batches:
            try:
                point = await self._point(name, share, batch)
            except (ModelError, WorkerError) as error:
                if name in self._first and (HANGING in str(error) or self._confined):
                    return  # too long for any plan, or too large for the worker's memory
                yield str(error)
                return
            yield point
            self._first.setdefault(name, point)
            if point.latency > self._longest(name):
                return

    def _longest(self, name: str) -> float:
        return _longest([self._first[name]] if name in self._first else [], self._grid)

    async def _point(self, name: str, share: int, batch: int) -> Point:
        """Measure one batch size. Raises ModelError if the model fails."""
        grid, candidate = self._grid, self._candidates[name]
        longest = self._longest(name)
        reserved = _reserved(await asyncio.to_thread(candidate.inputs, batch, grid), self._arena)
        batches = itertools.cycle(await asyncio.to_thread(_copied, reserved))
        del reserved  # with the tensors that were copied
        latencies: list[float] = []
        timings: list[Timing] = []
        begun = time.monotonic()
        first = True
        rest = 0.0
        required, most, seconds = MIN_BATCHES, MAX_BATCHES, grid.seconds
        assert self._lane is not None
        self._foreign.read(begun)
        while len(latencies) < required or (time.monotonic() - begun < seconds and len(latencies) < most):
            await asyncio.sleep(max(grid.pause - rest, 0.0))
            taken, timing = await run_batch(
                self._pool, self._listener, self._lane, next(self._numbers), name, next(batches)
            )
            rest = timing.pause  # the throttle of a small share is a rest too
            if first and (taken < SLOW or timing.device):
                # Cold caches, untouched memory; on a GPU libraries choose a kernel for each operator of a new size,
                # which takes 0.1 s and more.
                first, begun = False, time.monotonic()
                continue
            latencies.append(taken)
            timings.append(timing)
            if taken > longest:
                break  # too long for any plan
            required = MIN_BATCHES if taken < SLOW else MIN_BATCHES - 1
            if taken < SHORT:
                most, seconds = MAX_SHORT_BATCHES, grid.seconds * SHORT_SECONDS
        latency = statistics.median(latencies)
        spread = statistics.pstdev(latencies) / latency if len(latencies) > 1 else 0.0
        ordered = sorted(latencies)
        foreign = None if self._device.node else self._foreign.read(time.monotonic())  # it reads this machine
        device = statistics.median(timing.device for timing in timings)
        device_memory = max(timing.memory for timing in timings)
        return Point(
            share=share,
            batch=batch,
            latency=latency,
            memory=device_memory or worker_memory(self._pool, self._lane),
            features={
                "cv_pct": 100 * spread,
                **{f"p{percent}_ms": 1e3 * ordered[percent * len(ordered) // 100] for percent in (10, 90, 99)},
                "cpu_ms": 1e3 * statistics.median(timing.cpu for timing in timings),
                **({"cuda_ms": 1e3 * device} if device else {}),
                **({} if foreign is None else {FOREIGN: 100 * foreign}),
            },
        )
