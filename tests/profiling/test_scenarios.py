"""MLPerf's scenarios in virtual time, on a system whose batches take a known time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from cotenant.errors import ModelError
from cotenant.profiling.scenarios import (
    MULTI_STREAM,
    OFFLINE,
    PERCENTILES,
    SCENARIOS,
    SERVER,
    SINGLE_STREAM,
    ScenarioResult,
    SystemUnderTest,
    run_scenario,
)
from tests.virtual_loop import virtual_loop

FIXED, EACH = 0.010, 0.002  # seconds of a batch, and of each sample in it


def virtual(coroutine: Coroutine[Any, Any, Any]) -> Any:
    loop = virtual_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


async def batch(samples: int) -> None:
    await asyncio.sleep(FIXED + EACH * samples)


def result(
    scenario: str, *, seconds: float = 10.0, target: float = 0.1, run: Callable[[int], Awaitable[None]] = batch
) -> ScenarioResult:
    found: ScenarioResult = virtual(run_scenario(scenario, run, 8, seconds=seconds, target=target))
    return found


def test_single_stream_sends_one_sample_when_the_last_is_answered() -> None:
    found = result(SINGLE_STREAM)
    assert found.samples == found.queries == math.ceil(10 / (FIXED + EACH))
    assert found.latencies == pytest.approx((FIXED + EACH,) * len(PERCENTILES))
    assert found.samples_per_s == pytest.approx(1 / (FIXED + EACH))
    assert found.batch == 1
    assert found.batch_seconds == pytest.approx(FIXED + EACH)


def test_multi_stream_sends_eight_samples_at_once() -> None:
    found = result(MULTI_STREAM)
    assert found.samples == 8 * found.queries
    assert found.latencies[-1] == pytest.approx(FIXED + 8 * EACH)
    assert found.samples_per_s == pytest.approx(8 / (FIXED + 8 * EACH))


def test_multi_stream_on_a_system_with_small_batches_takes_several_for_a_query() -> None:
    found: ScenarioResult = virtual(run_scenario(MULTI_STREAM, batch, 3, seconds=10, target=1))
    assert found.latencies[0] == pytest.approx(2 * (FIXED + 3 * EACH) + FIXED + 2 * EACH)


def test_offline_has_all_samples_wait_and_batches_full() -> None:
    found = result(OFFLINE)
    assert found.queries == 1
    assert found.samples_per_s == pytest.approx(8 / (FIXED + 8 * EACH))
    assert found.seconds == pytest.approx(10, rel=0.01)
    assert found.latencies[0] == pytest.approx(found.seconds / 2, rel=0.01)


def test_server_finds_a_rate_below_offline_that_keeps_the_target() -> None:
    offline = result(OFFLINE)
    loose, tight = (result(SERVER, target=target, seconds=3) for target in (0.2, 0.04))
    assert loose.rate is not None and tight.rate is not None
    assert 0.2 * offline.samples_per_s < tight.rate < loose.rate < offline.samples_per_s
    assert tight.latencies[-1] <= 0.04 < loose.latencies[-1] <= 0.2


def test_server_whose_batches_exceed_the_target_serves_nothing() -> None:
    found = result(SERVER, target=FIXED / 2)
    assert found.rate == found.samples_per_s == 0
    assert found.latencies == (math.inf,) * len(PERCENTILES)


def test_server_needs_not_exceed_a_rate_that_is_given() -> None:
    found: ScenarioResult = virtual(run_scenario(SERVER, batch, 8, seconds=10, target=1.0, top=20.0))
    assert found.rate is not None and 15 < found.rate < 25  # bisected between 0 and 20, as drawn


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_are_repeatable(scenario: str) -> None:
    assert result(scenario, seconds=2) == result(scenario, seconds=2)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_failed_batch_ends_the_scenario_with_its_error(scenario: str) -> None:
    ran = 0

    async def failing(samples: int) -> None:
        nonlocal ran
        ran += 1
        await batch(samples)
        if ran == 5:
            raise ModelError("no memory")

    with pytest.raises(ModelError, match="no memory"):
        result(scenario, run=failing)


def test_system_takes_what_waits_up_to_its_largest_batch() -> None:
    async def scene() -> list[int]:
        system = SystemUnderTest(batch, 4)
        async with system.serving():
            first = system.submit(1)
            await asyncio.sleep(FIXED / 2)
            await asyncio.gather(*first, *system.submit(6))
        return [size for size, _ in system.batches]

    assert virtual(scene()) == [1, 4, 2]
