"""What batches take, as an event log has it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome, Request
from cotenant.measure.report import ModelReport
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Command, Event, Finished, LaneModel, LaneSpec, Reply, Run
from cotenant.runtime.log import LogLine
from cotenant.sim.loop import Handle
from cotenant.sim.run import simulate
from cotenant.sim.service import BatchTimes, Noise, RecordedBatches
from cotenant.sim.trace_replay import ObservedBatch, collect_observations, fit_batch_times, recorded_batches
from tests.sim.test_run import PLAN, PROBLEM, row

LANE = LaneSpec(id=LaneId.parse("cpu-0/0"), models=(LaneModel(model="a", latencies=(0.010, 0.012, 0.014, 0.016)),))


def ran(number: int, rows: int, start: float, end: float) -> list[LogLine]:
    requests = tuple(Request(number * 10 + n, "a", start, 1.0) for n in range(rows))
    return [
        LogLine(
            start, Finished(LaneId.parse("cpu-0/1"), number), [Run(LaneId.parse("cpu-0/0"), number, "a", requests)]
        ),
        LogLine(end, Finished(LaneId.parse("cpu-0/0"), number), []),
    ]


def test_collect_observations_batches_last_from_start_to_end() -> None:
    lines = [*ran(1, 1, 0.5, 0.6), *ran(2, 2, 1.0, 1.25), *ran(3, 2, 1.5, 1.7), *ran(4, 1, 1.9, 2.1)]
    ((key, took),) = collect_observations(lines, 1.0, 2.0).batches.items()
    assert key == (LaneId.parse("cpu-0/0"), "a")
    assert [batch.rows for batch in took] == [2, 2]
    assert [batch.start for batch in took] == pytest.approx([0.0, 0.5])
    assert [batch.seconds for batch in took] == pytest.approx([0.25, 0.2])


def test_collect_observations_served_requests_last_from_arrival_to_response() -> None:
    first, late, other, never = (Request(n, "ab"[n == 2], 1.0 + n / 10, 9.0) for n in range(4))
    lines = [
        LogLine(1.5, Finished(LaneId.parse("cpu-0/0"), 1), [Reply((first, late), Outcome.SERVED)]),
        LogLine(
            1.6,
            Finished(LaneId.parse("cpu-0/0"), 2),
            [Reply((other,), Outcome.SERVED), Reply((never,), Outcome.EXPIRED)],
        ),
        LogLine(2.5, Finished(LaneId.parse("cpu-0/0"), 3), [Reply((never,), Outcome.SERVED)]),
    ]
    assert collect_observations(lines, 1.05, 2.0).requests == {"a": [pytest.approx(0.4)], "b": [pytest.approx(0.4)]}


def batches(took: dict[int, list[float]]) -> list[ObservedBatch]:
    return [ObservedBatch(0.0, rows, seconds) for rows, all_ in took.items() for seconds in all_]


def test_fit_batch_times_frequent_sizes_are_observed_and_others_on_a_line() -> None:
    took = {(LaneId.parse("cpu-0/0"), "a"): batches({1: [0.025] * 100, 3: [0.033] * 5})}
    known = fit_batch_times([LANE], took)[LANE.id, "a"]
    # Twice what was predicted, and 5 ms for each batch.
    assert known.latencies == pytest.approx((0.025, 0.029, 0.033, 0.037))
    assert known.noise.quantiles == pytest.approx((1.0,) * len(known.noise.probabilities))


def test_fit_batch_times_of_one_size_scale_the_profile() -> None:
    known = fit_batch_times([LANE], {(LaneId.parse("cpu-0/0"), "a"): batches({2: [0.018, 0.018, 0.018]})})[LANE.id, "a"]
    assert known.latencies == pytest.approx((0.015, 0.018, 0.021, 0.024))
    assert fit_batch_times([LANE], {(LaneId.parse("cpu-9/0"), "a"): batches({1: [1.0]})}) == {}


def test_fit_batch_times_that_fall_with_size_are_constant() -> None:
    took = {(LaneId.parse("cpu-0/0"), "a"): batches({1: [0.020] * 5, 4: [0.018] * 5})}
    first, *_, last = fit_batch_times([LANE], took)[LANE.id, "a"].latencies
    assert first == pytest.approx(last) == pytest.approx(0.019, rel=0.02)


def logged() -> tuple[list[LogLine], Handle]:
    """A dispatcher, and the log that it writes."""
    lines: list[LogLine] = []
    dispatcher = Dispatcher()

    def handle(event: Event, now: float) -> list[Command]:
        commands = dispatcher.handle(event, now)
        lines.append(LogLine(now, event, commands))
        return commands

    return lines, handle


def test_simulate_with_observed_times_observes_the_same() -> None:
    lines, handle = logged()

    real = {(LaneId.parse("cpu-0/0"), "a"): BatchTimes(tuple(0.008 + 0.001 * n for n in range(1, 17)), Noise(0.2))}
    slow = simulate(PLAN, PROBLEM, seconds=60, observed=real, handle=handle)
    usual = simulate(PLAN, PROBLEM, seconds=60)
    assert mean(row(slow, "a")) > 1.2 * mean(row(usual, "a"))
    assert row(slow, "b") == row(usual, "b")

    specs = lines[0].event.lanes  # type: ignore[union-attr]
    again = fit_batch_times(specs, collect_observations(lines, 0.0, 60.0).batches)[LANE.id, "a"]
    sizes = Counter(batch.rows for batch in collect_observations(lines, 0.0, 60.0).batches[LANE.id, "a"])
    often = [n for n, count in sizes.items() if count > 300]
    assert len(often) > 3
    for n in often:
        assert again.latencies[n - 1] == pytest.approx(real[LANE.id, "a"].latencies[n - 1], rel=0.05)
    assert np.interp(0.9, again.noise.probabilities, again.noise.quantiles) == pytest.approx(1.28, abs=0.05)


def test_recorded_batches_replay_in_order() -> None:
    """With a spell in which they take four times as long: the same requests wait, to the last one."""
    lines, handle = logged()
    starts = tuple(n / 10 for n in range(600))
    factors = tuple(4.0 if 20 <= start < 25 else 1.0 for start in starts)
    spell = RecordedBatches(tuple(0.008 + 0.001 * n for n in range(1, 17)), starts, (1,) * 600, factors)
    once = simulate(PLAN, PROBLEM, seconds=60, observed={(LaneId.parse("cpu-0/0"), "a"): spell}, handle=handle)
    specs = lines[0].event.lanes  # type: ignore[union-attr]
    told = collect_observations(lines, 0.0, 60.0).batches
    again = simulate(PLAN, PROBLEM, seconds=60, observed=recorded_batches(specs, told))
    a, b = row(once, "a"), row(again, "a")
    assert (a.outcomes, a.attainment) == (b.outcomes, b.attainment)
    assert [b.p50, b.p99, b.mean] == pytest.approx([a.p50, a.p99, a.mean], rel=1e-9)
    whole = simulate(PLAN, PROBLEM, seconds=60, observed=fit_batch_times(specs, told))
    assert row(whole, "a").attainment != a.attainment  # slow ones here and there are not a slow spell


def test_recorded_batches_use_the_nearest_batch_of_equal_rows() -> None:
    record = RecordedBatches((0.010, 0.020), (1.0, 2.0, 3.0), (1, 2, 1), (1.5, 2.0, 3.0))
    assert record.takes(1, 0.0) == pytest.approx(0.015)
    assert record.takes(2, 0.5) == pytest.approx(0.030)  # there is none of two rows near
    assert record.takes(2, 1.1) == pytest.approx(0.040)
    assert record.takes(1, 2.0) == pytest.approx(0.030)
    assert record.takes(1, 9.0) == pytest.approx(0.030)


def mean(report: ModelReport) -> float:
    assert report.observed is not None
    return report.observed
