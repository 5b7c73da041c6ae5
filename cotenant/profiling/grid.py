"""Measuring models over batch size and share, on the path that serves them: the same workers, the same pacing.

A share is measured alone, from the largest down. What a point will take is foreseen from its neighbours, and a point
that no plan could use, because it takes longer than `longest`, is left out: `Profile` promises nothing there.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing

import msgspec

from cotenant.backends import Backend
from cotenant.core.model import Kind
from cotenant.core.plan import device_name
from cotenant.core.profile import Point, Profile
from cotenant.core.tensor import Tensor
from cotenant.core.units import WHOLE
from cotenant.errors import ModelError, RequestError, WorkerError
from cotenant.live.pool import Pool
from cotenant.worker.arena import Arena
from cotenant.worker.wire import LARGE, Timing, WorkerModel

Tensors = tuple[Tensor, ...]

SHARES = (1000, 500, 250, 100, 50)
BATCHES = (1, 2, 4, 8, 16, 32)
LEAST = 3  # batches for one point, at least
MOST = 40
SLOW = 0.1  # seconds; batches that take longer vary little, and cold caches are nothing to them: two will do
INPUTS = 4  # sets of them on a GPU
PAUSE = 0.01  # seconds on a processor
ARENA = 1 << 30  # bytes


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. shares: ‰, descending. seconds: for one point, and two or three batches. longest: see above.

    memory: bytes of the device. A model that fails on a share, and that was seen to take more than half of the memory
    in it, is too large for it and has no points there. inputs: so many different batches take turns. apart: each row
    comes as a request of its own, as callers send them, and not all as one: where batches take little time, what
    putting them together takes is much of it. pause: seconds of rest before each batch. One that follows at once finds
    its weights in the caches and the processor awake, and the smallest models are three to five times as quick then as
    where others have run in between, or nobody has.
    """

    shares: tuple[int, ...] = SHARES
    batches: tuple[int, ...] = BATCHES
    seconds: float = 0.4
    longest: float = 1.0
    memory: int = 1 << 62
    inputs: int = 1
    apart: bool = False
    pause: float = 0.0

    @property
    def points(self) -> int:
        return len(self.shares) * len(self.batches)


def grid_of(kind: Kind, shares: Sequence[int] = SHARES) -> Grid:
    """For a kind of device: of its legal shares those next to `shares`."""
    if kind.name == "cpu":
        return Grid(pause=PAUSE)
    legal = {nearest_share(share, kind.cuts) for share in shares}
    return Grid(shares=tuple(sorted(legal, reverse=True)), memory=kind.memory, inputs=INPUTS, apart=True)


def nearest_share(share: int, cuts: Sequence[int]) -> int:
    """Of legal shares, by ratio."""
    return min(cuts, key=lambda cut: max(cut / share, share / cut))


class Candidate(msgspec.Struct, frozen=True):
    """A model to measure. sample: inputs of so many rows."""

    model: WorkerModel
    sample: Callable[[int], Tensors]

    def requests(self, rows: int, grid: Grid, arena: Arena) -> list[list[Tensors]]:
        """Batches of that many rows, each as its requests, in the memory that workers share: from there a server, too,
        hands on what callers sent."""
        apart = grid.apart and self.model.batched
        counts = [1] * rows if apart else [rows]
        return [[_placed(self.sample(count), arena) for count in counts] for _ in range(grid.inputs)]


def _placed(tensors: Tensors, arena: Arena) -> Tensors:
    """Small tensors, and what finds no room, travel with each batch anew."""
    found = []
    for tensor in tensors:
        block = arena.allocate(len(tensor.data)) if len(tensor.data) >= LARGE else None
        if block is not None:
            block.view[:] = tensor.data
            tensor = msgspec.structs.replace(tensor, data=block.view, block=block)
        found.append(tensor)
    return tuple(found)


class Listener:
    """Waits for one batch at a time."""

    def __init__(self) -> None:
        self.waiting: asyncio.Future[Timing] | None = None

    def _settle(self, result: Timing | str) -> None:
        if self.waiting is None or self.waiting.done():
            return
        if isinstance(result, str):
            self.waiting.set_exception(ModelError(result))
        else:
            self.waiting.set_result(result)

    def finished(self, lane: str, batch: int, answers: Sequence[Tensors | RequestError], timing: Timing) -> None:
        wrong = next((answer for answer in answers if isinstance(answer, RequestError)), None)
        self._settle(timing if wrong is None else str(wrong))

    def failed(self, lane: str, batch: int, reason: str) -> None:
        self._settle(reason)

    def died(self, lane: str, reason: str) -> None:
        self._settle(f"its worker died: {reason}")

    def ready(self, lane: str) -> None:
        pass


async def profile_model(
    backend: Backend,
    model: WorkerModel,
    sample: Callable[[int], Tensors],
    *,
    kind: str,
    grid: Grid,
    measured: Callable[[int], None] = lambda points: None,
) -> Profile:
    """Measure a model alone on the first device of `kind`, which must have nothing else to do meanwhile.

    sample: inputs of so many rows. measured: called with how many points of the grid are done with since the last call.
    Points are as `measure_profiles` says. Raises ModelError where the model fails, or its worker does.
    """
    points: list[Point] = []
    told = 0
    found = measure_profiles(backend, {model.name: Candidate(model, sample)}, device=device_name(kind), grid=grid)
    async with aclosing(found):
        async for _, point in found:
            if isinstance(point, str):
                raise ModelError(f"model {model.name!r} cannot be measured: {point}")
            if points and point.share != points[-1].share:  # the rest of the larger share is left out
                rest = -told % len(grid.batches)
                told += rest
                measured(rest)
            points.append(point)
            told += 1
            measured(1)
    measured(grid.points - told)
    return Profile(model.name, kind, points)


async def measure_profiles(
    backend: Backend,
    candidates: Mapping[str, Candidate],
    *,
    device: str,
    grid: Grid,
    known: Mapping[str, Sequence[Point]] = {},
) -> AsyncGenerator[tuple[str, Point | str], None]:
    """The points of a grid for some models, each alone on one device, which must have nothing else to do meanwhile.

    known: points that need not be measured again. Gives them as they come, a share at a time, by the model's name; or
    the reason why there will be no more of a model. Where a share is measured of several models, one worker has them
    all: it starts once.

    A point's latency is the median, in seconds, from handing a batch to the worker to having its answer; its features
    are `cv_pct` (the spread of the latency), `p10_ms`, `p90_ms`, `p99_ms`, `cpu_ms` (processor time), on a GPU
    `cuda_ms` (by its own clock), and of a model that has its worker alone `start_s` (how long it took until it was
    warm). Its memory is the device's: what the model says that it takes there or, on a processor, what the worker has.
    """
    found = {name: list(known.get(name, ())) for name in candidates}
    broken: set[str] = set()
    bench = _Bench(backend, candidates, device, grid)
    try:
        for share in sorted(grid.shares, reverse=True):
            wanted = {
                name: batches
                for name, candidate in candidates.items()
                if name not in broken and (batches := _wanted(candidate.model, found[name], share, grid))
            }
            async for name, point in bench.share(share, wanted):
                if isinstance(point, Point):
                    found[name].append(point)
                else:
                    broken.add(name)
                    if _too_large(found[name], share, grid):
                        continue
                yield name, point
    finally:
        await bench.close()


def _wanted(model: WorkerModel, points: Sequence[Point], share: int, grid: Grid) -> list[int]:
    """Batches that are still to be measured on a share, and that some plan could use."""
    batches = [batch for batch in grid.batches if batch <= model.max_batch] or [1]
    known = {point.batch: point.latency for point in points if point.share == share}
    if any(latency > grid.longest for latency in known.values()):
        return []
    return [batch for batch in batches if batch not in known and _foreseen(points, share, batch) <= grid.longest]


def _too_large(points: Sequence[Point], share: int, grid: Grid) -> bool:
    """For that share, where shares have memory of their own."""
    taken = max((point.memory for point in points if point.share > share), default=0)
    return 2 * taken > grid.memory * share // WHOLE


def _foreseen(points: Sequence[Point], share: int, batch: int) -> float:
    """About how long a batch will take, from what the next larger share took; 0 where that is not known."""
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
    """One lane at a time."""

    def __init__(self, backend: Backend, candidates: Mapping[str, Candidate], device: str, grid: Grid) -> None:
        self._candidates = candidates
        self._device = device
        self._grid = grid
        self._arena = Arena(ARENA)
        self._listener = Listener()
        self._pool = Pool(backend, self._arena, self._listener)
        self._numbers = itertools.count(1)
        self._lane = ""  # the one that is open

    async def share(self, share: int, wanted: Mapping[str, Sequence[int]]) -> AsyncIterator[tuple[str, Point | str]]:
        """wanted: batches by model."""
        groups = [list(wanted)] if wanted else []
        while groups:
            names = groups.pop()
            begun = time.monotonic()
            try:
                await self._open(share, {name: wanted[name][-1] for name in names})
            except WorkerError as error:
                if len(names) == 1:
                    yield names[0], str(error)
                groups += [[name] for name in names[::-1] if len(names) > 1]  # one keeps the others from starting
                continue
            startup = {"start_s": time.monotonic() - begun} if len(names) == 1 else {}
            for place, name in enumerate(names):
                async for point in self._points(name, share, wanted[name]):
                    if isinstance(point, Point):
                        point.features.update(startup)
                    yield name, point
                if not self._ready:
                    groups += [names[place + 1 :]] if names[place + 1 :] else []
                    break

    async def close(self) -> None:
        await self._pool.close(grace=1.0)
        self._arena.close()

    async def _open(self, share: int, batches: Mapping[str, int]) -> None:
        """A lane with these models, in place of the one before. Where lanes share a process it must not end, with what
        it has loaded, before the next is open."""
        before = self._lane
        stays = self._pool.shares_process(before)
        if before and not stays:
            await self._pool.stop(before, grace=1.0)
        lane = f"{self._device}/profile-{share}"
        self._lane = f"{lane}-{next(self._numbers)}" if lane == before else lane
        models = [
            msgspec.structs.replace(self._candidates[name].model, max_batch=largest)
            for name, largest in batches.items()
        ]
        try:
            await self._pool.start(self._lane, share, models, leaving=[before] if stays else [])
        finally:
            if stays:
                await self._pool.stop(before, grace=1.0)

    @property
    def _ready(self) -> bool:
        return any(status.state == "ready" for status in self._pool.status() if status.lane == self._lane)

    async def _points(self, name: str, share: int, batches: Sequence[int]) -> AsyncIterator[Point | str]:
        for batch in batches:
            try:
                point = await self._point(name, share, batch)
            except (ModelError, WorkerError) as error:
                yield str(error)
                return
            yield point
            if point.latency > self._grid.longest:
                return

    async def _point(self, name: str, share: int, batch: int) -> Point:
        """Raises ModelError where the model fails."""
        grid, candidate = self._grid, self._candidates[name]
        batches = itertools.cycle(candidate.requests(batch, grid, self._arena))
        latencies: list[float] = []
        timings: list[Timing] = []
        begun = time.monotonic()
        first = True
        rest = 0.0
        least = LEAST
        while len(latencies) < least or (time.monotonic() - begun < grid.seconds and len(latencies) < MOST):
            await asyncio.sleep(max(grid.pause - rest, 0.0))
            self._listener.waiting = asyncio.get_running_loop().create_future()
            sent = time.monotonic()
            self._pool.run(self._lane, next(self._numbers), name, next(batches))
            timing = await self._listener.waiting
            taken = time.monotonic() - sent
            rest = timing.pause  # a small share is a rest
            if first and taken < SLOW:
                first = False
                continue  # it had cold caches, and memory that was not yet touched
            latencies.append(taken)
            timings.append(timing)
            if taken > grid.longest:
                break  # too long for any plan: one look is enough
            least = LEAST if taken < SLOW else LEAST - 1
        latency = statistics.median(latencies)
        spread = statistics.pstdev(latencies) / latency if len(latencies) > 1 else 0.0
        ordered = sorted(latencies)
        device = statistics.median(timing.device for timing in timings)
        held = max(timing.memory for timing in timings)
        return Point(
            share=share,
            batch=batch,
            latency=latency,
            memory=held or next(status.memory for status in self._pool.status() if status.lane == self._lane),
            features={
                "cv_pct": 100 * spread,
                **{f"p{percent}_ms": 1e3 * ordered[percent * len(ordered) // 100] for percent in (10, 90, 99)},
                "cpu_ms": 1e3 * statistics.median(timing.cpu for timing in timings),
                **({"cuda_ms": 1e3 * device} if device else {}),
            },
        )
