"""Closed loops: through the whole simulator, and the rules of `ClosedLoopCallers` one by one."""

import itertools
import math

import numpy as np
import pytest

from cotenant.core.identity import LaneId
from cotenant.core.model import Model
from cotenant.core.request import Outcome, Request
from cotenant.measure.report import ModelReport
from cotenant.runtime.events import LaneModel, LaneSpec, Reply
from cotenant.sim.closed_loop import RETRY, ClosedLoopCallers
from cotenant.sim.run import simulate_lanes
from cotenant.sim.service import BatchTimes, Noise, Service
from cotenant.workload import Workload
from cotenant.workload.mlperf import multi_stream, offline, server, single_stream
from cotenant.workload.sources import ClosedLoop, Poisson


def played(workload: Workload, *latencies: float, slo: float = math.inf, seconds: float = 100.0) -> ModelReport:
    lanes = (LaneSpec(id=LaneId.parse("cpu-0/0"), models=(LaneModel(model="m", latencies=latencies),)),)
    (row,) = simulate_lanes(lanes, (Model(name="m", slo=slo),), workload, Service(lanes), seconds=seconds).models
    return row


def callers(source: ClosedLoop, until: float = math.inf) -> ClosedLoopCallers:
    return ClosedLoopCallers("m", source, np.random.default_rng(0), 1.0, itertools.count(), until)


def test_closed_loop_single_stream_is_served_back_to_back() -> None:
    row = played(single_stream("m"), 0.03, 0.04)
    assert row.outcomes["served"] == math.ceil(100 / 0.03)
    assert row.p50 == pytest.approx(0.03, rel=0.01)
    assert row.batch == 1.0


def test_closed_loop_multi_sample_query_finishes_before_the_next() -> None:
    row = played(multi_stream("m"), *(0.01 + 0.01 * n for n in range(1, 5)))
    # Eight samples at once are one, which finds the lane free, then four and three.
    query = 0.02 + 0.05 + 0.04
    assert row.outcomes["served"] == 8 * math.ceil(100 / query)


def test_offline_scenario_sends_all_samples_at_once_in_full_batches() -> None:
    row = played(offline("m", 4001), *(0.01 + 0.01 * n for n in range(1, 9)))
    assert row.outcomes["served"] == 4001
    # One runs alone, as the lane is free when it comes.
    assert row.p999 == pytest.approx(0.02 + 500 * 0.09, rel=0.01)


def test_server_scenario_is_poisson() -> None:
    assert server("m", 30.0) == Workload({"m": Poisson(30.0)})


def test_closed_loop_callers_with_think_time_follow_littles_law() -> None:
    """N callers are in service or thinking: N = rate · (latency + think) (Little 1961)."""
    row = played(Workload({"m": ClosedLoop(20, think=1.0)}), 0.004, seconds=500.0)
    assert row.mean is not None
    assert row.offered * (row.mean + 1.0) == pytest.approx(20, rel=0.03)


def test_closed_loop_run_ends_although_callers_continue() -> None:
    row = played(Workload({"m": ClosedLoop(3)}), 0.01, 0.011, 0.012, seconds=2.0)
    assert row.offered == row.served


def test_closed_loop_rejected_caller_backs_off() -> None:
    row = played(Workload({"m": ClosedLoop(2)}), 0.5, slo=0.1, seconds=100.0)
    assert row.outcomes["rejected"] == 200
    told = callers(ClosedLoop(1))
    (request,) = told.first()
    (again,) = told.next(Reply((request,), Outcome.REJECTED, "late", 5.0), 10.0)
    assert again.arrived == 15.0
    (last,) = told.next(Reply((again,), Outcome.REJECTED, "late", 0.0), 20.0)
    assert last == Request(2, "m", 20.0 + RETRY, 21.0 + RETRY)


def test_closed_loop_next_query_follows_the_last_sample() -> None:
    told = callers(ClosedLoop(1, samples=3), until=50.0)
    first = told.first()
    assert [request.arrived for request in first] == [0.0, 0.0, 0.0]
    assert told.next(Reply(tuple(first[1:]), Outcome.SERVED), 4.0) == []
    second = told.next(Reply((first[0],), Outcome.EXPIRED), 5.0)
    assert [(request.id, request.arrived, request.deadline) for request in second] == [
        (number, 5.0, 6.0) for number in (3, 4, 5)
    ]
    assert told.next(Reply(tuple(second), Outcome.SERVED), 50.0) == []


def test_simulate_closed_and_open_sources_of_one_seed_give_one_report() -> None:
    lanes = (
        LaneSpec(
            id=LaneId.parse("cpu-0/0"),
            models=tuple(LaneModel(model=name, latencies=(0.004, 0.006, 0.008)) for name in ("m", "n")),
        ),
    )
    models = (Model(name="m", slo=0.1), Model(name="n", slo=0.1))
    workload = Workload({"n": ClosedLoop(4, think=0.05, samples=2), "m": Poisson(80.0)})
    varied = {(LaneId.parse("cpu-0/0"), "m"): BatchTimes((0.004, 0.006, 0.008), Noise(0.2))}
    one, same, other = (
        simulate_lanes(lanes, models, workload, Service(lanes, seed, varied), seconds=20.0, seed=seed)
        for seed in (1, 1, 2)
    )
    assert one == same != other
    assert all(row.offered > 50 for row in one.models)
