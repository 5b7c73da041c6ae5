"""Send queries as MLPerf's LoadGen does, in its four scenarios (Reddi et al., "MLPerf Inference Benchmark", section 4).

- single-stream: a query of one sample when the last one is answered; what counts is the latency of nine in ten.
- multi-stream: the same with queries of eight samples; what counts is the latency of 99 in 100.
- server: queries of one sample at random (Poisson) times; what counts is the highest rate at which 99 in 100 are
  answered within the target. It is searched for by bisection.
- offline: all samples in one query; what counts is how many are answered per second.

The system under test takes what waits, up to its largest batch, whenever it is idle. Queries come by these rules
(`PublishedRules`), or from LoadGen itself (`profiling.loadgen`). Time is that of the event loop, so that all of it runs
in virtual time as well. MLPerf's minimum durations are those of submissions, ten minutes a run; here the caller says
how long.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SINGLE_STREAM, MULTI_STREAM, SERVER, OFFLINE = "single-stream", "multi-stream", "server", "offline"
SCENARIOS = (SINGLE_STREAM, MULTI_STREAM, SERVER, OFFLINE)
STREAMS = 8  # samples in a query of multi-stream
PERCENTILES = (50, 90, 97, 99)
SERVED_IN_TIME = 0.99  # of the queries of the server scenario
MIN_QUERIES = 3
MIN_SERVER_QUERIES = 100  # of one rate, a percentile of fewer says little; but a low rate is not waited for longer than
PATIENCE = 5  # times the duration of a run
BISECTIONS = 6  # of the range of rates: to 1/64 of the offline throughput

RunBatch = Callable[[int], Awaitable[None]]  # runs one batch of so many samples


class ScenarioResult(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of one scenario.

    queries, samples: answered; seconds: from the first query to the last answer; latencies: seconds by `PERCENTILES`,
    of queries, or of samples in the offline scenario; batch_seconds: median time of the batches of the largest size
    that ran; batch: that size. rate: queries/s that arrived, in the server scenario; 0 where no rate is served in time.
    """

    scenario: str
    queries: int
    samples: int
    seconds: float
    latencies: tuple[float, ...]
    batch: int
    batch_seconds: float
    rate: float | None = None

    @property
    def samples_per_s(self) -> float:
        """Return what the scenario measures as throughput: samples/s, of the server scenario those that arrived."""
        return self.samples / self.seconds if self.rate is None else self.rate


class SystemUnderTest:
    """Queue samples and run them in batches, as long as `serving` lasts."""

    def __init__(self, run: RunBatch, max_batch: int) -> None:
        self._run = run
        self.max_batch = max_batch
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._running: list[asyncio.Future[None]] = []
        self._filled = asyncio.Event()
        self.error: BaseException | None = None  # of the batch that failed; none runs after it
        self.batches: list[tuple[int, float]] = []  # samples and seconds of each

    def submit(self, samples: int) -> list[asyncio.Future[None]]:
        """Queue samples; return what is done when each is answered. Once a batch fails, all have its error, and this
        raises it."""
        if self.error is not None:
            raise self.error
        loop = asyncio.get_running_loop()
        added = [loop.create_future() for _ in range(samples)]
        self._waiting.extend(added)
        self._filled.set()
        return added

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[SystemUnderTest]:
        """Run batches in the meantime."""
        task = asyncio.create_task(self._serve())
        task.add_done_callback(self._ended)
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._waiting:
                self._filled.clear()
                await self._filled.wait()
            self._running = [self._waiting.popleft() for _ in range(min(self.max_batch, len(self._waiting)))]
            begun = loop.time()
            await self._run(len(self._running))
            self.batches.append((len(self._running), loop.time() - begun))
            for each in self._running:
                if not each.done():
                    each.set_result(None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.error = None if task.cancelled() else task.exception()
        for each in (*self._running, *self._waiting):
            if self.error is not None and not each.done():
                each.set_exception(self.error)


class Traffic(msgspec.Struct, frozen=True):
    """Hold what a generator saw: seconds of each query (offline: of each sample), and of all together."""

    latencies: Sequence[float]
    seconds: float


class Generator(Protocol):
    """Send queries to a system, and wait until all are answered. Each raises what the system's batches raise."""

    async def stream(self, system: SystemUnderTest, samples: int, seconds: float) -> Traffic:
        """Send a query of so many samples when the last one is answered, for so many seconds."""
        ...

    async def offline(self, system: SystemUnderTest, samples: int) -> Traffic:
        """Send all samples at once."""
        ...

    async def at_rate(self, system: SystemUnderTest, rate: float, count: int, target: float) -> Traffic | None:
        """Send so many queries at random times; None as soon as too many of them exceed the target in seconds."""
        ...


class PublishedRules:
    """Send queries by MLPerf's published rules."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    async def stream(self, system: SystemUnderTest, samples: int, seconds: float) -> Traffic:
        loop = asyncio.get_running_loop()
        begun = now = loop.time()
        latencies: list[float] = []
        while len(latencies) < MIN_QUERIES or now - begun < seconds:
            await asyncio.gather(*system.submit(samples))
            sent, now = now, loop.time()
            latencies.append(now - sent)
        return Traffic(latencies, now - begun)

    async def offline(self, system: SystemUnderTest, samples: int) -> Traffic:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        latencies: list[float] = []
        waiting = system.submit(samples)
        for each in waiting:
            each.add_done_callback(lambda _: latencies.append(loop.time() - begun))
        await asyncio.gather(*waiting)
        return Traffic(latencies, loop.time() - begun)

    async def at_rate(self, system: SystemUnderTest, rate: float, count: int, target: float) -> Traffic | None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        latencies: list[float] = []
        waiting: list[asyncio.Future[None]] = []
        late = 0

        def record(due: float) -> None:
            nonlocal late
            latencies.append(loop.time() - due)  # a query that is sent late counts from when it was due
            late += latencies[-1] > target

        def recorder(due: float) -> Callable[[asyncio.Future[None]], None]:
            return lambda _: record(due)

        for due in (begun + np.cumsum(self._rng.exponential(1 / rate, count))).tolist():
            await asyncio.sleep(max(0.0, due - loop.time()))
            if late > allowed_late(count):
                break
            (query,) = system.submit(1)
            query.add_done_callback(recorder(due))
            waiting.append(query)
        await asyncio.gather(*waiting)
        return None if late > allowed_late(count) else Traffic(latencies, loop.time() - begun)


def allowed_late(queries: int) -> int:
    """Return how many of so many queries may exceed the target."""
    return math.floor((1 - SERVED_IN_TIME) * queries)


async def run_scenario(
    scenario: str,
    run: RunBatch,
    max_batch: int,
    *,
    seconds: float,
    target: float,
    top: float = math.inf,
    generator: Generator | None = None,
) -> ScenarioResult:
    """Run a scenario after one batch that warms up.

    seconds: of the run, and of each rate that the server scenario tries. target: seconds in which it answers 99 of 100
    queries. top: samples/s that it needs not try to exceed. generator: by default by the published rules. Raises
    whatever `run` raises.
    """
    system, sends = SystemUnderTest(run, max_batch), generator or PublishedRules()
    async with system.serving():
        await asyncio.gather(*system.submit(max_batch))
        system.batches.clear()
        if scenario == SERVER:
            return await _server(system, sends, seconds, target, top)
        if scenario == OFFLINE:
            return await _offline(system, sends, seconds)
        samples = STREAMS if scenario == MULTI_STREAM else 1
        seen = await sends.stream(system, samples, seconds)
        return _result(system, scenario, seen, samples * len(seen.latencies))


async def _offline(system: SystemUnderTest, sends: Generator, seconds: float) -> ScenarioResult:
    """Send as many samples as take about so many seconds."""
    system.batches.clear()
    await asyncio.gather(*system.submit(MIN_QUERIES * system.max_batch))
    batches = max(MIN_QUERIES, math.ceil(seconds / float(np.median([took for _, took in system.batches]))))
    system.batches.clear()
    seen = await sends.offline(system, batches * system.max_batch)
    return msgspec.structs.replace(_result(system, OFFLINE, seen, len(seen.latencies)), queries=1)


async def _server(
    system: SystemUnderTest, sends: Generator, seconds: float, target: float, top: float
) -> ScenarioResult:
    """Find the highest rate that is served in time, up to `top`, by default what the system does offline."""
    high = top if math.isfinite(top) else (await _offline(system, sends, seconds)).samples_per_s
    low, best = 0.0, None
    for _ in range(BISECTIONS):
        rate = (low + high) / 2
        if rate * seconds < 1:
            break
        count = max(round(rate * seconds), min(MIN_SERVER_QUERIES, round(rate * seconds * PATIENCE)))
        system.batches.clear()
        seen = await sends.at_rate(system, rate, count, target)
        if seen is None:
            high = rate
        else:
            low, best = rate, msgspec.structs.replace(_result(system, SERVER, seen, count), rate=rate)
    if best is not None:
        return best
    nothing = tuple(math.inf for _ in PERCENTILES)
    return ScenarioResult(
        scenario=SERVER, queries=0, samples=0, seconds=seconds, latencies=nothing, batch=1, batch_seconds=0, rate=0.0
    )


def _result(system: SystemUnderTest, scenario: str, seen: Traffic, samples: int) -> ScenarioResult:
    largest = max(size for size, _ in system.batches)
    return ScenarioResult(
        scenario=scenario,
        queries=len(seen.latencies),
        samples=samples,
        seconds=seen.seconds,
        latencies=tuple(map(float, np.percentile(seen.latencies, PERCENTILES, method="inverted_cdf"))),
        batch=largest,
        batch_seconds=float(np.median([took for size, took in system.batches if size == largest])),
    )
