"""Measuring a model over batch size and share, on the path that serves it: the same workers, the same pacing.

A share is measured alone, from the largest down. What a point will take is foreseen from its neighbours, and a point
that no plan could use, because it takes longer than `longest`, is left out: `Profile` promises nothing there.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec

from cotenant.backends import Backend
from cotenant.core.profile import Point, Profile
from cotenant.core.tensor import Tensor
from cotenant.errors import ModelError, RequestError, WorkerError
from cotenant.live.pool import Pool
from cotenant.worker.arena import Arena
from cotenant.worker.wire import Timing, WorkerModel

Tensors = tuple[Tensor, ...]

SHARES = (1000, 500, 250, 100, 50)
BATCHES = (1, 2, 4, 8, 16, 32)
LEAST = 3  # batches for one point, at least
MOST = 40
SLOW = 0.1  # seconds; batches that take longer vary little, and cold caches are nothing to them: two will do


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. shares: ‰, descending. seconds: for one point, and two or three batches. longest: see above."""

    shares: tuple[int, ...] = SHARES
    batches: tuple[int, ...] = BATCHES
    seconds: float = 0.4
    longest: float = 1.0

    @property
    def points(self) -> int:
        return len(self.shares) * len(self.batches)


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


async def profile(
    backend: Backend,
    model: WorkerModel,
    sample: Callable[[int], Tensors],
    *,
    kind: str,
    grid: Grid,
    measured: Callable[[int], None] = lambda points: None,
) -> Profile:
    """Measure a model alone on a device of `kind`, which must have nothing else to do meanwhile.

    sample: inputs of so many rows. measured: called with how many points of the grid are done with since the last call.
    A point's latency is the median, in seconds, from handing a batch to the worker to having its answer; its features
    are `cv_pct` (the spread of the latency), `p10_ms`, `p90_ms`, `p99_ms`, `cpu_ms` (processor time) and `start_s` (how
    long the worker took until it was warm). Raises ModelError where the model fails, or its worker does.
    """
    batches = [batch for batch in grid.batches if batch <= model.max_batch] or [1]
    points: list[Point] = []
    listener = Listener()
    arena = Arena(1 << 30)
    pool = Pool(backend, arena, listener)
    try:
        for share in sorted(grid.shares, reverse=True):
            usable = [batch for batch in batches if _foreseen(points, share, batch) <= grid.longest]
            if usable:
                lane = f"profile/{share}"
                sized = msgspec.structs.replace(model, max_batch=usable[-1])
                begun = time.monotonic()
                await pool.start(lane, share, [sized])
                startup = time.monotonic() - begun
                for batch in usable:
                    point = await _point(pool, listener, lane, model.name, batch, sample, share, grid)
                    point.features["start_s"] = startup
                    points.append(point)
                    measured(1)
                    if point.latency > grid.longest:
                        break
                await pool.stop(lane, grace=1.0)
            measured(len(grid.batches) - sum(point.share == share for point in points))
    except (ModelError, WorkerError) as error:
        raise ModelError(f"model {model.name!r} cannot be measured: {error}") from None
    finally:
        await pool.close(grace=1.0)
    return Profile(model.name, kind, points)


def _foreseen(points: Sequence[Point], share: int, batch: int) -> float:
    """About how long a batch will take, from what the next larger share took; 0 where that is not known."""
    larger = [point for point in points if point.share > share]
    if not larger:
        return 0.0
    nearest = min(point.share for point in larger)
    known = {point.batch: point.latency for point in larger if point.share == nearest}
    if batch in known:
        return known[batch] * nearest / share
    below = max(known)
    return known[below] * nearest / share * batch / below


async def _point(
    pool: Pool,
    listener: Listener,
    lane: str,
    model: str,
    batch: int,
    sample: Callable[[int], Tensors],
    share: int,
    grid: Grid,
) -> Point:
    inputs = sample(batch)
    latencies: list[float] = []
    cpu: list[float] = []
    begun = time.monotonic()
    number = 0
    least = LEAST
    while len(latencies) < least or (time.monotonic() - begun < grid.seconds and len(latencies) < MOST):
        number += 1
        listener.waiting = asyncio.get_running_loop().create_future()
        sent = time.monotonic()
        pool.run(lane, number, model, [inputs])
        timing = await listener.waiting
        taken = time.monotonic() - sent
        if number == 1 and taken < SLOW:
            continue  # it had cold caches, and memory that was not yet touched
        latencies.append(taken)
        cpu.append(timing.cpu)
        if taken > grid.longest:
            break  # too long for any plan: one look is enough
        least = LEAST if taken < SLOW else LEAST - 1
    latency = statistics.median(latencies)
    spread = statistics.pstdev(latencies) / latency if len(latencies) > 1 else 0.0
    ordered = sorted(latencies)
    memory = next(status.memory for status in pool.status() if status.lane == lane)
    return Point(
        share=share,
        batch=batch,
        latency=latency,
        memory=memory,
        features={
            "cv_pct": 100 * spread,
            **{f"p{percent}_ms": 1e3 * ordered[percent * len(ordered) // 100] for percent in (10, 90, 99)},
            "cpu_ms": 1e3 * statistics.median(cpu),
        },
    )
