import math
from collections import Counter

import pytest

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.errors import PlanError
from cotenant.measure.report import ModelReport, Report
from cotenant.planners import Problem
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Arrived, Command, Event, LaneModel, LaneSpec, Reply
from cotenant.sim.failures import Failure
from cotenant.sim.run import run, simulate
from cotenant.sim.service import Service
from cotenant.workload import Workload


def profile(name: str, cv: float) -> Profile:
    points = [
        Point(share=500, batch=rows, latency=0.004 + 0.001 * rows, memory=0, features={"cv_pct": cv})
        for rows in (1, 8, 16)
    ]
    return Profile(name, "cpu", points)


PROBLEM = Problem(
    models=(Model(name="a", slo=0.08), Model(name="b", slo=0.08)),
    rates={"a": 300.0, "b": 200.0},
    fleet=(Kind(name="cpu"),),
    profiles={("a", "cpu"): profile("a", 10.0), ("b", "cpu"): profile("b", 0.0)},
)
A, B = (Placement(model=name, batch=16, rate=r, duty=0.04, latency=0.02) for name, r in PROBLEM.rates.items())
SPLIT = (Partition(share=500, placements=(A,)), Partition(share=500, placements=(B,)))
PLAN = Plan(planner="hand", devices=(Device(kind="cpu", id=0, partitions=SPLIT),))
SHARED = Plan(
    planner="hand", devices=(Device(kind="cpu", id=0, partitions=(Partition(share=500, placements=(A, B)),)),)
)


def row(report: Report, name: str) -> ModelReport:
    return next(row for row in report.models if row.model == name)


def test_one_seed_gives_one_report_and_another_seed_another() -> None:
    assert simulate(PROBLEM, PLAN, seconds=5, seed=3) == simulate(PROBLEM, PLAN, seconds=5, seed=3)
    assert simulate(PROBLEM, PLAN, seconds=5, seed=3) != simulate(PROBLEM, PLAN, seconds=5, seed=4)


def test_a_model_on_a_partition_of_its_own_does_not_notice_what_others_are_asked() -> None:
    before = simulate(PROBLEM, PLAN, seconds=5)
    after = simulate(PROBLEM, PLAN, Workload.poisson({"a": 300.0, "b": 20.0}), seconds=5)
    assert row(before, "a") == row(after, "a")
    assert row(before, "b") != row(after, "b")


def test_a_plan_within_its_means_keeps_its_promises() -> None:
    for plan in (PLAN, SHARED):
        report = simulate(PROBLEM, plan, seconds=20)
        assert all(model.attainment is not None and model.attainment > 0.99 for model in report.models)


def test_batches_are_observed_with_their_noise_and_what_the_server_adds() -> None:
    quiet = row(simulate(PROBLEM, PLAN, seconds=20), "b")
    assert quiet.observed == quiet.predicted
    noisy = row(simulate(PROBLEM, PLAN, seconds=20), "a")
    assert noisy.observed is not None and noisy.predicted is not None
    assert noisy.observed != noisy.predicted
    assert noisy.observed == pytest.approx(noisy.predicted, rel=0.02)
    slower = row(simulate(PROBLEM, PLAN, seconds=20, per_batch=0.001), "b")
    assert slower.observed is not None and slower.predicted is not None
    assert slower.observed == pytest.approx(slower.predicted + 0.001)


def test_a_model_without_a_lane_is_refused() -> None:
    half = Plan(planner="hand", devices=(Device(kind="cpu", id=0, partitions=SPLIT[:1]),))
    unplaced = row(simulate(PROBLEM, half, seconds=2), "b")
    assert unplaced.ends["refused"] == sum(unplaced.ends.values()) > 0
    assert unplaced.attainment == 0


def test_a_rate_for_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^no model 'c' in this problem; it has a, b$"):
        simulate(PROBLEM, PLAN, Workload.poisson({"c": 1.0}), seconds=1)


def test_a_death_costs_time_and_a_restart_ends_it() -> None:
    whole = row(simulate(PROBLEM, PLAN, seconds=10), "a")
    broken = row(simulate(PROBLEM, PLAN, seconds=10, failures=[Failure(parts=("cpu0/0",), time=4.0, back=1.0)]), "a")
    assert sum(broken.ends.values()) == sum(whole.ends.values())
    assert broken.attainment == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_every_arrival_ends_exactly_once(factor: float) -> None:
    arrived: list[int] = []
    replied: Counter[int] = Counter()
    dispatcher = Dispatcher()

    def handle(event: Event, now: float) -> list[Command]:
        if isinstance(event, Arrived):
            arrived.append(event.request.id)
        commands = dispatcher.handle(event, now)
        for command in commands:
            if isinstance(command, Reply):
                replied.update(request.id for request in command.requests)
        return commands

    lanes = tuple(
        LaneSpec(id=f"cpu0/{slot}", models=(LaneModel(model="a", latencies=(0.01, 0.015)),)) for slot in range(2)
    )
    models = (Model(name="a", slo=0.05), Model(name="nowhere", slo=0.05))
    rates = {"a": 200.0 * factor, "nowhere": 10.0}
    failures = [Failure(parts=("cpu0/0",), time=1.0, back=0.5), Failure(parts=("cpu0/1",), time=1.2, back=0.1)]
    report = run(lanes, models, Workload.poisson(rates), Service(lanes), seconds=4.0, failures=failures, handle=handle)
    dispatcher.invariants()
    assert replied == Counter(arrived)
    assert sum(sum(model.ends.values()) for model in report.models) == len(arrived)


def test_a_lane_without_batching_is_the_queue_of_the_textbook() -> None:
    """M/D/1: a mean wait of rho / (2 (1 - rho)) services (Pollaczek 1930, Khinchine 1932)."""
    lanes = (LaneSpec(id="cpu0/0", models=(LaneModel(model="m", latencies=(0.01,)),)),)
    models = (Model(name="m", slo=math.inf),)
    for load in (0.3, 0.6, 0.8):
        report = run(lanes, models, Workload.poisson({"m": load * 100}), Service(lanes), seconds=300.0, seed=1)
        expected = 0.01 + 0.01 * load / (2 * (1 - load))
        assert report.models[0].mean == pytest.approx(expected, rel=0.05)
