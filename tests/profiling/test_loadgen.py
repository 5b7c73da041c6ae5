"""MLPerf's LoadGen, where it is installed, against the same scenarios by its published rules."""

from __future__ import annotations

import asyncio
import sys

import pytest

from cotenant.errors import ConfigError, ModelError
from cotenant.profiling.loadgen import LoadGen
from cotenant.profiling.scenarios import (
    MULTI_STREAM,
    OFFLINE,
    SCENARIOS,
    SERVER,
    SINGLE_STREAM,
    RunBatch,
    ScenarioResult,
    run_scenario,
)

FIXED, EACH = 0.002, 0.001  # seconds of a batch, and of each sample in it; a busy machine takes longer


async def batch(samples: int) -> None:
    await asyncio.sleep(FIXED + EACH * samples)


def result(scenario: str, run: RunBatch = batch, target: float = 60.0) -> ScenarioResult:
    pytest.importorskip("mlperf_loadgen")
    return asyncio.run(run_scenario(scenario, run, 8, seconds=0.1, target=target, generator=LoadGen()))


def test_loadgen_that_is_not_installed_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_loadgen", None)
    with pytest.raises(ConfigError, match=r"LoadGen is not installed: pip install 'cotenant\[loadgen\]'"):
        LoadGen()


def test_streams_send_a_query_when_the_last_one_is_answered() -> None:
    single, multi = result(SINGLE_STREAM), result(MULTI_STREAM)
    assert single.samples == single.queries >= 3 and single.batch == 1
    assert multi.samples == 8 * multi.queries and multi.batch == 8
    assert single.latencies[0] >= FIXED + EACH and multi.latencies[0] >= FIXED + 8 * EACH


@pytest.mark.parametrize("scenario", [SINGLE_STREAM, MULTI_STREAM])
def test_streams_of_short_queries_last_as_long_as_they_are_asked_to(scenario: str) -> None:
    async def short(samples: int) -> None:
        await asyncio.sleep(0.0001)

    assert result(scenario, short).seconds >= 0.09  # of 0.1, less the last query


def test_offline_sends_all_samples_at_once() -> None:
    found = result(OFFLINE)
    assert found.queries == 1 and found.samples % 8 == 0 and found.batch == 8
    assert found.samples_per_s <= 8 / (FIXED + 8 * EACH)


def test_server_serves_a_rate_where_the_target_is_long_and_none_where_no_batch_meets_it() -> None:
    loose, tight = result(SERVER), result(SERVER, target=FIXED / 2)
    assert loose.rate is not None and loose.rate > 0 and loose.latencies[-1] <= 60
    assert tight.rate == 0


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_failed_batch_ends_loadgen_and_is_told(scenario: str) -> None:
    ran = 0

    async def failing(samples: int) -> None:
        nonlocal ran
        ran += 1
        await batch(samples)
        if ran == 6:
            raise ModelError("no memory")

    with pytest.raises(ModelError, match="no memory"):
        result(scenario, failing)


def test_cancelled_scenario_ends_loadgen() -> None:
    async def scene() -> None:
        async def stuck(samples: int) -> None:
            await asyncio.sleep(0 if stuck_after.pop() else 3600)

        stuck_after = [False, True]  # from the end: the batch that warms up ends, the next one does not
        task = asyncio.create_task(run_scenario(SINGLE_STREAM, stuck, 1, seconds=0.05, target=1.0, generator=LoadGen()))
        while len(stuck_after) > 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    pytest.importorskip("mlperf_loadgen")
    asyncio.run(asyncio.wait_for(scene(), 60))
