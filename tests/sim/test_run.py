import math
import statistics
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.core.request import Request
from cotenant.errors import PlanError
from cotenant.measure.report import ModelReport, Report
from cotenant.planners import Problem
from cotenant.planners.forecast import forecast
from cotenant.predictors import ConstantMargin
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Arrived, Command, Event, LaneModel, LaneSpec, Reply, Run
from cotenant.sim.run import simulate, simulate_lanes
from cotenant.sim.service import BatchTimes, Noise, Overhead, Service
from cotenant.workload import Workload
from cotenant.workload.failures import Failure
from cotenant.workload.sources import ClosedLoop, Poisson


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
PLAN = Plan(planner="hand", devices=(Device(id=DeviceId("cpu", 0), partitions=SPLIT),))
SHARED = Plan(
    planner="hand", devices=(Device(id=DeviceId("cpu", 0), partitions=(Partition(share=500, placements=(A, B)),)),)
)


def row(report: Report, name: str) -> ModelReport:
    return next(row for row in report.models if row.model == name)


def test_simulate_report_depends_only_on_the_seed() -> None:
    assert simulate(PLAN, PROBLEM, seconds=5, seed=3) == simulate(PLAN, PROBLEM, seconds=5, seed=3)
    assert simulate(PLAN, PROBLEM, seconds=5, seed=3) != simulate(PLAN, PROBLEM, seconds=5, seed=4)


def test_simulate_isolated_model_is_independent_of_other_loads() -> None:
    before = simulate(PLAN, PROBLEM, seconds=5)
    after = simulate(PLAN, PROBLEM, Workload.poisson({"a": 300.0, "b": 20.0}), seconds=5)
    assert row(before, "a") == row(after, "a")
    assert row(before, "b") != row(after, "b")


def test_simulate_plan_within_capacity_meets_its_slos() -> None:
    for plan in (PLAN, SHARED):
        report = simulate(plan, PROBLEM, seconds=20)
        assert all(model.attainment is not None and model.attainment > 0.99 for model in report.models)


def test_simulate_report_has_the_targets_of_callers() -> None:
    asked = Workload({"a": Poisson(300.0), "b": Poisson(900.0)}, {"a": 0.06, "b": math.inf})
    report = simulate(PLAN, PROBLEM, asked, seconds=5)
    assert (row(report, "a").target, row(report, "b").target) == (0.06, None)
    assert row(report, "b").attainment == 1.0  # late for the model's own
    assert (row(report, "b").p50 or 0.0) > PROBLEM.model("b").slo
    assert Report.from_json(report.to_json()) == report


def test_simulate_batches_are_observed_with_noise_and_overhead() -> None:
    quiet = row(simulate(PLAN, PROBLEM, seconds=20), "b")
    assert quiet.observed == quiet.predicted
    noisy = row(simulate(PLAN, PROBLEM, seconds=20), "a")
    assert noisy.observed is not None and noisy.predicted is not None
    assert noisy.observed != noisy.predicted
    assert noisy.observed == pytest.approx(noisy.predicted, rel=0.02)
    slower = row(simulate(PLAN, PROBLEM, seconds=20, overhead=Overhead(per_batch=0.001)), "b")
    assert slower.observed is not None and slower.predicted is not None
    assert slower.observed == pytest.approx(slower.predicted + 0.001)


def test_simulate_model_without_a_lane_is_rejected() -> None:
    half = Plan(planner="hand", devices=(Device(id=DeviceId("cpu", 0), partitions=SPLIT[:1]),))
    unplaced = row(simulate(half, PROBLEM, seconds=2), "b")
    assert unplaced.outcomes["rejected"] == sum(unplaced.outcomes.values()) > 0
    assert unplaced.attainment == 0


def test_simulate_rate_of_an_unknown_model_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"^unknown model 'c' in this problem; it has a, b$"):
        simulate(PLAN, PROBLEM, Workload.poisson({"c": 1.0}), seconds=1)


def test_simulate_worker_death_costs_time_until_its_restart() -> None:
    whole = row(simulate(PLAN, PROBLEM, seconds=10), "a")
    broken = row(
        simulate(PLAN, PROBLEM, seconds=10, failures=[Failure(parts=(LaneId.parse("cpu-0/0"),), time=4.0, back=1.0)]),
        "a",
    )
    assert sum(broken.outcomes.values()) == sum(whole.outcomes.values())
    assert broken.attainment == pytest.approx(0.9, abs=0.03)


def on_nodes(*nodes: str) -> tuple[Plan, Problem]:
    """The plan and the problem with a device on each of some nodes, half of the rates for each."""
    fleet = tuple(Kind(name=f"{node}/cpu") for node in nodes)
    profiles = {(name, kind.name): profile(name, 0.0).on(kind.name, 0.0005) for name in "ab" for kind in fleet}
    devices = tuple(Device(id=DeviceId("cpu", node=node), partitions=SPLIT) for node in nodes)
    return Plan(planner="hand", devices=devices), msgspec.structs.replace(PROBLEM, fleet=fleet, profiles=profiles)


def test_simulate_batches_on_a_node_take_the_network_more() -> None:
    seldom = Workload.poisson({"b": 2.0})
    here = row(simulate(PLAN, PROBLEM, seldom, seconds=50), "b")
    there = row(simulate(*on_nodes("node-a"), seldom, seconds=50), "b")
    assert here.p50 is not None and there.p50 is not None
    assert there.p50 - here.p50 == pytest.approx(0.0005, abs=0.0001)


def test_simulate_cut_node_costs_what_it_holds_until_it_is_noticed() -> None:
    plan, problem = on_nodes("node-a", "node-b")

    def lost(noticed: float, back: float = math.inf) -> int:
        cut = Failure(nodes=("node-a",), time=4.0, noticed=noticed, back=back)
        report = simulate(plan, problem, seconds=10, failures=[cut])
        assert sum(sum(each.outcomes.values()) for each in report.models) == whole
        return sum(each.outcomes["rejected"] + each.outcomes["expired"] for each in report.models)

    report = simulate(plan, problem, seconds=10)
    whole = sum(sum(each.outcomes.values()) for each in report.models)
    assert all(each.attainment is not None and each.attainment > 0.99 for each in report.models)
    at_once, noticed, late = (lost(noticed=seconds) for seconds in (0.0, 0.8, 3.0))
    assert at_once == 0  # the other node serves all
    # Each lane that is cut off holds a batch that nobody answers, and expires what is queued behind it.
    assert 0 < noticed <= late
    assert lost(noticed=0.8, back=1.0) <= noticed + 10


def test_simulate_cut_that_ends_before_it_is_noticed_only_delays_answers() -> None:
    plan, problem = on_nodes("node-a")
    workload = Workload.poisson({"a": 50.0, "b": 50.0})
    cut = Failure(nodes=("node-a",), time=4.0, back=0.03)
    report = simulate(plan, problem, workload, seconds=10, failures=[cut], startup=60.0)
    assert sum(each.outcomes["served"] for each in report.models) == sum(
        sum(each.outcomes.values()) for each in report.models
    )


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_simulate_every_arrival_ends_exactly_once(factor: float) -> None:
    """Whatever breaks, comes back or not, and whatever plan comes next: also of those who wait for their answers."""
    arrived: list[int] = []
    replied: Counter[int] = Counter()
    dispatcher = Dispatcher()

    def handle(event: Event, now: float) -> list[Command]:
        if isinstance(event, Arrived):
            arrived.append(event.request.id)
        commands = dispatcher.handle(event, now)
        dispatcher.invariants()
        for command in commands:
            if isinstance(command, Reply):
                replied.update(request.id for request in command.requests)
        return commands

    workload = Workload({"a": Poisson(300.0 * factor), "b": ClosedLoop(round(10 * factor), think=0.01, samples=3)})
    failures = [
        Failure(parts=(LaneId.parse("cpu-0/0"),), time=0.5, back=0.3),
        Failure(parts=(DeviceId.parse("cpu-0"),), time=0.6, back=0.1),
        Failure(parts=(LaneId.parse("cpu-0/1"),), time=1.55),
    ]
    report = simulate(
        PLAN,
        PROBLEM,
        workload,
        seconds=4.0,
        failures=failures,
        changes=[(1.0, SHARED), (1.5, PLAN), (2.0, Plan(planner="hand"))],
        startup=0.2,
        handle=handle,
    )
    assert not dispatcher.lanes
    assert len(arrived) == len(set(arrived)) > 400
    assert replied == Counter(arrived)
    assert sum(sum(model.outcomes.values()) for model in report.models) == len(arrived)


def test_simulate_shared_lane_under_overload_keeps_its_goodput() -> None:
    """One of them is asked for ten times as much as the other, whose batches come between its own."""
    latencies = tuple(0.004 + 0.001 * rows for rows in range(1, 17))
    lane = LaneSpec(
        id=LaneId(DeviceId("k"), 0), models=tuple(LaneModel(model=name, latencies=latencies) for name in "ab")
    )
    batches = {(lane.id, name): BatchTimes(latencies, Noise(0.05)) for name in "ab"}

    def goodput(times: float) -> float:
        models = [Model(name=name, slo=0.1) for name in "ab"]
        workload = Workload.poisson({"a": 650 * times, "b": 65 * times})
        report = simulate_lanes([lane], models, workload, Service([lane], 0, batches), seconds=20)
        return sum(each.outcomes["served"] for each in report.models) / 20

    within = goodput(0.9)
    assert all(goodput(times) > 0.75 * within for times in (1.2, 1.5, 2.0))


def test_simulate_lane_without_batching_is_an_m_d_1_queue() -> None:
    """M/D/1: a mean wait of rho / (2 (1 - rho)) services (Pollaczek 1930, Khinchine 1932)."""
    lanes = (LaneSpec(id=LaneId.parse("cpu-0/0"), models=(LaneModel(model="m", latencies=(0.01,)),)),)
    models = (Model(name="m", slo=math.inf),)
    for load in (0.3, 0.6, 0.8):
        report = simulate_lanes(
            lanes, models, Workload.poisson({"m": load * 100}), Service(lanes), seconds=300.0, seed=1
        )
        expected = 0.01 + 0.01 * load / (2 * (1 - load))
        assert report.models[0].mean == pytest.approx(expected, rel=0.05)


def test_simulate_batch_latencies_come_from_the_problem_and_not_the_plan() -> None:
    world = msgspec.structs.replace(PROBLEM, interference=ConstantMargin(1.5))
    seen = row(simulate(PLAN, world, seconds=10), "b")
    assert seen.observed is not None and seen.predicted is not None
    assert seen.observed == pytest.approx(1.5 * seen.predicted)


def test_noise_has_the_measured_median_and_spread() -> None:
    lane = LaneSpec(id=LaneId.parse("cpu-0/0"), models=(LaneModel(model="a", latencies=(0.01,)),))
    service = Service([lane], 0, {(LaneId.parse("cpu-0/0"), "a"): BatchTimes((0.01,), Noise(0.3))})
    taken = [
        service.takes(Run(LaneId.parse("cpu-0/0"), n, "a", (Request(n, "a", 0, 1),)), 0.0)[2] / 0.01
        for n in range(20_000)
    ]
    assert statistics.median(taken) == pytest.approx(1, rel=0.01)
    assert statistics.pstdev(taken) == pytest.approx(0.3, rel=0.05)
    assert statistics.fmean(taken) == pytest.approx(1.0407, rel=0.01)  # of a lognormal distribution
    assert next(Noise().draws(np.random.default_rng(0))) == 1


def test_noise_interpolates_measured_quantiles() -> None:
    features = {"cv_pct": 40.0, "p10_ms": 9.0, "p90_ms": 15.0, "p99_ms": 40.0}
    draws = Noise.of(features, 0.01).draws(np.random.default_rng(0))
    taken = np.array([next(draws) for _ in range(50_000)])
    assert np.quantile(taken, [0.05, 0.5, 0.9, 0.98, 0.995]) == pytest.approx([0.9, 1.0, 1.5, 3.72, 4.0], rel=0.03)
    assert taken.mean() == pytest.approx(1.2575, rel=0.01)  # straight lines between the levels
    assert Noise.of({"cv_pct": 40.0}, 0.01) == Noise(0.4)
    assert Noise.of({}, 0.01) == Noise()


def test_simulate_worker_start_takes_the_profiled_time() -> None:
    def loaded(points: tuple[Point, ...]) -> list[Point]:
        return [msgspec.structs.replace(point, features={"start_s": 1.0}) for point in points]

    profiles = {key: Profile(*key, loaded(known.points)) for key, known in PROBLEM.profiles.items()}
    problem = msgspec.structs.replace(PROBLEM, profiles=profiles)
    fails = [Failure(parts=(LaneId.parse("cpu-0/0"),), time=4.0, back=0.0)]
    broken = row(simulate(PLAN, problem, seconds=10, failures=fails), "a")
    assert broken.attainment == pytest.approx(0.9, abs=0.03)
    at_once = row(simulate(PLAN, problem, seconds=10, failures=fails, startup=0.0), "a")
    assert at_once.attainment == pytest.approx(0.999, abs=0.0005)  # the delay before a restart costs 0.01 s of 10


def test_simulate_link_adds_the_transfer_time_of_bytes() -> None:
    lane = LaneSpec(id=LaneId.parse("cpu-0/0"), models=(LaneModel(model="a", latencies=(0.01, 0.02)),))
    overhead = Overhead(per_batch=0.001, per_request=0.0001, bandwidth=1e9, sizes={"a": 6e5})
    service = Service([lane], overhead=overhead)
    rows, predicted, took = service.takes(Run(LaneId.parse("cpu-0/0"), 1, "a", (Request(1, "a", 0, 1, size=2),)), 0.0)
    assert (rows, predicted) == (2, 0.02)
    assert took == pytest.approx(0.02 + 0.001 + 0.0001 + 2 * 6e-4)


def test_simulate_plan_for_other_devices_is_rejected() -> None:
    where = Device(id=DeviceId("tpu", 0), partitions=SPLIT)
    with pytest.raises(
        PlanError, match=r"^the plan is for other devices: tpu: the problem has no devices of this kind"
    ):
        simulate(Plan(planner="hand", devices=(where,)), PROBLEM, seconds=1)
    small = msgspec.structs.replace(PROBLEM, fleet=(Kind(name="cpu", memory=0),), profiles=heavy())
    with pytest.raises(PlanError, match=r"cpu-0: workers need 2 GiB where the device has 0 B; plan again$"):
        simulate(PLAN, small, seconds=1)


def heavy() -> dict[tuple[str, str], Profile]:
    return {
        key: Profile(*key, [msgspec.structs.replace(point, memory=1 << 30) for point in known.points])
        for key, known in PROBLEM.profiles.items()
    }


def _plan(draw: st.DataObject, number: int) -> Plan:
    """Some cuts of a device or two, each with one of the models or both."""
    devices = []
    for device in range(draw.draw(st.integers(0, 2), label=f"devices {number}")):
        cuts = draw.draw(st.lists(st.sampled_from([(A,), (B,), (A, B)]), min_size=1, max_size=2), label="cuts")
        devices.append(
            Device(id=DeviceId("cpu", device), partitions=tuple(Partition(share=500, placements=it) for it in cuts))
        )
    return Plan(planner="hand", devices=tuple(devices))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_simulate_random_failures_and_plans_end_every_request_once(data: st.DataObject) -> None:
    ended: Counter[int] = Counter()
    arrived: set[int] = set()
    dispatcher = Dispatcher()

    def handle(event: Event, now: float) -> list[Command]:
        commands = dispatcher.handle(event, now)
        dispatcher.invariants()
        if isinstance(event, Arrived):
            arrived.add(event.request.id)
        ended.update(it.id for command in commands if isinstance(command, Reply) for it in command.requests)
        return commands

    first = PLAN if data.draw(st.booleans(), label="split") else SHARED
    names: list[DeviceId | LaneId] = [
        DeviceId("cpu"),
        *(LaneId(DeviceId("cpu"), slot) for slot in range(len(first.devices[0].partitions))),
    ]
    times = st.floats(0, 1.2).map(lambda time: round(time, 2))  # coarse, so that some fall together
    failures = [
        Failure(parts=(data.draw(st.sampled_from(names)),), time=data.draw(times), back=data.draw(times))
        for _ in range(data.draw(st.integers(0, 4), label="failures"))
    ]
    changes = [(data.draw(times), _plan(data, number)) for number in range(data.draw(st.integers(0, 3)))]
    report = simulate(
        first,
        msgspec.structs.replace(PROBLEM, fleet=(Kind(name="cpu", count=2),)),
        Workload({"a": Poisson(200.0), "b": ClosedLoop(5, think=0.02, samples=2)}),
        seconds=1.0,
        failures=failures,
        changes=changes,
        startup=data.draw(st.sampled_from([0.0, 0.1, 1.0]), label="startup"),
        handle=handle,
    )
    assert ended == Counter(arrived)
    assert sum(sum(model.outcomes.values()) for model in report.models) == len(arrived)


def test_simulate_old_and_new_workers_share_device_memory() -> None:
    """A worker takes 400 MiB: two stand on 1 GiB, but while they make way for two others there are four."""
    points = [msgspec.structs.replace(point, memory=400 << 20) for point in profile("a", 0.0).points]
    profiles = {(name, "cpu"): Profile(name, "cpu", points) for name in "ab"}

    def changed(memory: int) -> Report:
        fleet = (Kind(name="cpu", count=1, memory=memory),)
        problem = msgspec.structs.replace(PROBLEM, fleet=fleet, profiles=profiles)
        return simulate(PLAN, problem, seconds=2, changes=[(1.0, SHARED)])

    assert changed(2 << 30).models
    refused = (
        r"^the plan cannot change after 1 s: cpu-0 has 1 GiB of memory, and its workers need 1\.56 GiB, old and new"
        r' together; plan for fewer workers, or allow a gap by `rollout_memory = "gap"`$'
    )
    with pytest.raises(PlanError, match=refused):
        changed(1 << 30)


def test_simulate_parallel_workers_agree_with_the_forecast() -> None:
    """Batches take half as long again beside another worker, so that two answer a third more than one."""
    points = [
        Point(share=1000, batch=rows, latency=(0.004 + 0.001 * rows) * (1 + procs) / 2, memory=1, procs=procs)
        for rows in (1, 2, 4, 8)
        for procs in (1, 2)
    ]

    def planned(procs: int, rate: float) -> tuple[Report, float]:
        problem = Problem(
            models=(Model(name="a", slo=0.06),),
            rates={"a": rate},
            fleet=(Kind(name="k", count=1),),
            profiles={("a", "k"): Profile("a", "k", points)},
        )
        latency = 0.012 * (1 + procs) / 2
        placement = Placement(model="a", batch=8, rate=rate, duty=latency, latency=latency, procs=procs)
        partition = Partition(share=1000, placements=(placement,))
        plan = Plan(planner="hand", devices=(Device(id=DeviceId("k", 0), partitions=(partition,)),))
        return simulate(plan, problem, seconds=40), forecast(plan, problem).models["a"].attainment

    for rate in (400.0, 700.0):
        report, expected = planned(2, rate)
        assert row(report, "a").attainment == pytest.approx(expected, abs=0.01)
    two, one = planned(2, 1200.0)[0].models[0], planned(1, 1200.0)[0].models[0]
    assert two.goodput == pytest.approx(one.goodput * 4 / 3, rel=0.05)


def test_standby_worker_takes_over_where_another_would_have_to_start() -> None:
    failure = Failure(parts=(LaneId.parse("cpu-0/0"),), time=4.0, back=0.0)

    def attained(standbys: int) -> float:
        report = simulate(PLAN, PROBLEM, seconds=10, failures=[failure], startup=2.0, standbys=standbys)
        return row(report, "a").attainment or 0.0

    assert attained(0) < 0.85
    assert attained(1) > 0.98
