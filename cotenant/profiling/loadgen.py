"""Have MLPerf's own LoadGen send the queries of `profiling.scenarios` (the package `mlcommons-loadgen`).

LoadGen runs in a thread of its own and calls back for each query; samples are queued on the event loop, and LoadGen is
told when each is answered. Latencies are from its call to the answer. Its logs are not kept.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from cotenant.errors import ConfigError
from cotenant.profiling.scenarios import MIN_QUERIES, SystemUnderTest, Traffic, allowed_late

SAMPLES = 1024  # of the library that LoadGen draws from; it knows numbers only, and any input will do for them
MARGIN = 4  # by which queries may be shorter than the shortest that was seen


class LoadGen:
    """Send queries by LoadGen. seed: of its random times. Raises ConfigError where it is not installed."""

    def __init__(self, seed: int = 0) -> None:
        try:
            import mlperf_loadgen
        except ImportError:
            raise ConfigError("MLPerf's LoadGen is not installed: pip install 'cotenant[loadgen]'") from None
        self._lg: Any = mlperf_loadgen
        self._seed = seed

    async def stream(self, system: SystemUnderTest, samples: int, seconds: float) -> Traffic:
        """Send a query when the last one is answered. LoadGen has queries of one sample, and of eight."""
        settings = self._settings("MultiStream" if samples > 1 else "SingleStream", MIN_QUERIES, seconds)
        if samples > 1:
            settings.multi_stream_samples_per_query = samples
        # LoadGen draws up queries for twice the duration at the latency that it expects, and ends early without more.
        expected = max(1, round(1e9 * await _shortest(system, samples) / MARGIN))
        settings.single_stream_expected_latency_ns = settings.multi_stream_expected_latency_ns = expected
        return await self._run(system, settings, whole=True)

    async def offline(self, system: SystemUnderTest, samples: int) -> Traffic:
        settings = self._settings("Offline", samples, 0.0)
        settings.offline_expected_qps = 1.0  # LoadGen sends more where that, times its duration, is more
        return await self._run(system, settings, whole=False)

    async def at_rate(self, system: SystemUnderTest, rate: float, count: int, target: float) -> Traffic | None:
        """Send queries at a rate. LoadGen does not stop early."""
        settings = self._settings("Server", count, 0.0)
        settings.server_target_qps = rate
        settings.server_target_latency_ns = round(1e9 * target)
        seen = await self._run(system, settings, whole=True)
        late = sum(latency > target for latency in seen.latencies)
        return None if late > allowed_late(len(seen.latencies)) else seen

    def _settings(self, scenario: str, queries: int, seconds: float) -> Any:
        settings = self._lg.TestSettings()
        settings.scenario = getattr(self._lg.TestScenario, scenario)
        settings.mode = self._lg.TestMode.PerformanceOnly
        settings.min_query_count = queries
        settings.min_duration_ms = round(1e3 * seconds)
        settings.schedule_rng_seed = settings.sample_index_rng_seed = settings.qsl_rng_seed = self._seed
        return settings

    async def _run(self, system: SystemUnderTest, settings: Any, *, whole: bool) -> Traffic:
        """Run one test. whole: latencies are of queries, rather than of samples."""
        lg, run = self._lg, _Test(self._lg, system, whole=whole)
        sut = lg.ConstructSUT(run.issue, lambda: None)
        library = lg.ConstructQSL(SAMPLES, SAMPLES, lambda _: None, lambda _: None)
        try:
            with tempfile.TemporaryDirectory() as folder:
                logs = lg.LogSettings()
                logs.log_output.outdir = folder
                logs.log_output.copy_summary_to_stdout = False
                logs.enable_trace = False
                test = asyncio.create_task(
                    asyncio.to_thread(lg.StartTestWithLogSettings, sut, library, settings, logs, "")
                )
                try:
                    await asyncio.shield(test)
                except asyncio.CancelledError:
                    # Its binding has nothing that stops it: the queries that it has drawn up are answered at once,
                    # those of the server scenario when they are due.
                    run.abandon()
                    await test
                    raise
        finally:
            lg.DestroyQSL(library)
            lg.DestroySUT(sut)
        return run.traffic()


async def _shortest(system: SystemUnderTest, samples: int) -> float:
    """Return the seconds of the shortest of some queries, which count for nothing else."""
    loop, latencies = asyncio.get_running_loop(), []
    for _ in range(MIN_QUERIES):
        begun = loop.time()
        await asyncio.gather(*system.submit(samples))
        latencies.append(loop.time() - begun)
    system.batches.clear()
    return min(latencies)


class _Test:
    """Take the queries of one test from LoadGen's thread to the event loop, and their answers back."""

    def __init__(self, lg: Any, system: SystemUnderTest, *, whole: bool) -> None:
        self._lg = lg
        self._system = system
        self._whole = whole
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: set[int] = set()
        self._abandoned = False
        self._latencies: list[float] = []
        self._begun = self._ended = 0.0

    def issue(self, samples: Sequence[Any]) -> None:
        """Take a query, in LoadGen's thread."""
        sent, numbers = time.monotonic(), [sample.id for sample in samples]
        with self._lock:
            abandoned = self._abandoned
            if not abandoned:
                self._pending.update(numbers)
        if abandoned:
            self._complete(numbers)
        else:
            self._loop.call_soon_threadsafe(self._submit, numbers, sent)

    def _submit(self, numbers: Sequence[int], sent: float) -> None:
        """Queue a query's samples, on the event loop."""
        self._begun = self._begun or sent
        if self._system.error is not None:
            self._answered(numbers)
            return
        waiting = self._system.submit(len(numbers))
        left = len(waiting)

        def done(sample: asyncio.Future[None], number: int) -> None:
            nonlocal left
            left -= 1
            if not sample.cancelled() and sample.exception() is None and (not self._whole or not left):
                self._ended = time.monotonic()
                self._latencies.append(self._ended - sent)
            self._answered([number])

        for number, sample in zip(numbers, waiting, strict=True):
            sample.add_done_callback(functools.partial(done, number=number))

    def _answered(self, numbers: Sequence[int]) -> None:
        with self._lock:
            mine = [number for number in numbers if number in self._pending]
            self._pending.difference_update(mine)
        self._complete(mine)

    def _complete(self, numbers: Sequence[int]) -> None:
        self._lg.QuerySamplesComplete([self._lg.QuerySampleResponse(number, 0, 0) for number in numbers])

    def abandon(self) -> None:
        """Answer all that is pending, and all that comes, at once."""
        with self._lock:
            self._abandoned = True
            left = list(self._pending)
            self._pending.clear()
        self._complete(left)

    def traffic(self) -> Traffic:
        """Return what was seen. Raises the error of a batch that failed."""
        if self._system.error is not None:
            raise self._system.error
        return Traffic(self._latencies, self._ended - self._begun)
