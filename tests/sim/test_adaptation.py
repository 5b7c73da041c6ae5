"""A controller in a simulated run: what it is told, and what becomes of its commands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

from cotenant.control.adaptation import (
    Acquire,
    Adopted,
    ControllerCommand,
    ControllerEvent,
    DevicesFound,
    DevicesGone,
    Observed,
    Release,
    Roll,
    RollEnded,
    Solve,
    Solved,
)
from cotenant.control.controller import Controller
from cotenant.control.revision import RolloutOutcome
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.measure.report import Report
from cotenant.planners import Problem
from cotenant.planning import plan as plan_problem
from cotenant.planning.replan import Replanner
from cotenant.sim.adaptation import Adaptation
from cotenant.sim.cloud import CloudKind, SimulatedCloud
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from cotenant.workload.failures import Failure
from cotenant.workload.sources import Curve

# A device serves 1 / (10 ms) = 100 requests/s of the model, one by one.
PROBLEM = Problem(
    models=(Model(name="a", slo=0.1),),
    rates={"a": 40.0},
    fleet=(Kind(name="gpu", count=4),),
    profiles={("a", "gpu"): Profile("a", "gpu", [Point(share=1000, batch=1, latency=0.01, memory=0)])},
)
GPU = tuple(DeviceId("gpu", index) for index in range(4))


def plan_of(devices: Iterable[DeviceId]) -> Plan:
    held = Partition(share=1000, placements=(Placement(model="a", batch=1, rate=60.0, duty=0.01, latency=0.01),))
    return Plan(planner="hand", devices=tuple(Device(id=device, partitions=(held,)) for device in devices))


def solver(solve: Solve) -> Solved:
    """A device for each 60 requests/s, as far as there are any."""
    wanted = math.ceil(solve.rates["a"] / 60.0)
    there = sorted(solve.devices)[:wanted]
    if not there:
        return Solved(number=solve.number, error="no device is left", devices={"gpu": wanted})
    return Solved(
        number=solve.number,
        plan=plan_of(there),
        devices={"gpu": wanted},
        rates=solve.rates,
        sustained={"a": 60.0 * len(there)},
        short="" if len(there) == wanted else "devices are missing",
    )


class Cloud(SimulatedCloud):
    """Devices that take 3 s to launch."""

    def __init__(self, **lies: Any) -> None:
        kind = CloudKind(kind="gpu", launch_seconds=3.0, quota=len(GPU), **lies)
        super().__init__([kind], seed=1, used=GPU[:1])
        self.released: list[DeviceId] = []

    def handle(self, command: Acquire | Release, now: float) -> None:
        super().handle(command, now)
        if isinstance(command, Release):
            self.released += command.devices


Told = TypeVar("Told")


class Log:
    def __init__(self) -> None:
        self.events: list[tuple[float, ControllerEvent]] = []
        self.commands: list[tuple[float, ControllerCommand]] = []

    def __call__(self, now: float, event: ControllerEvent, commands: list[ControllerCommand]) -> None:
        self.events.append((now, event))
        self.commands += [(now, command) for command in commands]

    def told(self, kind: type[Told]) -> list[tuple[float, Told]]:
        return [(now, event) for now, event in self.events if isinstance(event, kind)]

    def commanded(self, kind: type[Told]) -> list[tuple[float, Told]]:
        return [(now, command) for now, command in self.commands if isinstance(command, kind)]


def run(workload: Workload, seconds: float, cloud: Cloud | None = None, **more: Any) -> tuple[Report, Log, Cloud]:
    log, cloud = Log(), cloud or Cloud()
    adaptation = Adaptation(
        controller=Controller(GPU[:1], {"a": 0.99}),
        solver=solver,
        provider=cloud,
        works=cloud.works,
        solve_seconds=0.25,
        log=log,
    )
    report = simulate(
        plan_of(GPU[:1]),
        PROBLEM,
        workload,
        seconds=seconds,
        adaptation=adaptation,
        startup=1.0,
        **more,
    )
    return report, log, cloud


def stepping(*points: tuple[float, float]) -> Workload:
    """Rates from a time on."""
    corners = [(0.0, points[0][1])]
    for (_, before), (time, rate) in itertools.pairwise(points):
        corners += [(time, before), (time, rate)]
    return Workload(sources={"a": Curve(points=(*corners, (1e4, points[-1][1])))})


@pytest.mark.parametrize("first", ["a", "b"])
def test_model_of_higher_priority_keeps_its_slo_where_devices_do_not_suffice(first: str) -> None:
    latencies = [
        Point(share=share, batch=1, latency=10.0 / share, memory=0) for share in (200, 400, 500, 600, 800, 1000)
    ]
    problem = Problem(
        models=tuple(Model(name=name, slo=0.2, priority=1 if name == first else 2) for name in "ab"),
        rates={"a": 10.0, "b": 10.0},
        fleet=(Kind(name="gpu", cuts=(200, 400, 500, 600, 800, 1000)),),
        profiles={(name, "gpu"): Profile(name, "gpu", latencies) for name in "ab"},
        time_limit=0.5,
    )
    log = Log()
    adaptation = Adaptation(
        controller=Controller(GPU[:1], {"a": 0.99, "b": 0.99}), solver=Replanner(problem, "elastic-plus"), log=log
    )
    rising = Curve(points=((0.0, 10.0), (20.0, 10.0), (20.0, 60.0), (1e4, 60.0)))
    plan = plan_problem(problem, "elastic-plus", validate=False)
    report = simulate(
        plan, problem, Workload(sources={"a": rising, "b": rising}), seconds=120.0, adaptation=adaptation, startup=0.5
    )
    (last,) = {"a", "b"} - {first}
    attainment = {row.model: row.attainment or 0.0 for row in report.models}
    assert attainment[first] > 0.95
    assert 0.2 < attainment[last] < 0.8
    solved = [event for _, event in log.told(Solved)]
    assert any(f"leave unserved: {last} " in event.short for event in solved)
    assert not any(f"{first} " in event.short for event in solved)
    assert len(solved) <= 4, "what cannot be served is no reason to plan again and again"


def test_constant_rate_is_observed_and_changes_nothing() -> None:
    report, log, _ = run(Workload.poisson({"a": 40.0}), 60.0)
    assert [type(command) for _, command in log.commands] == []
    assert isinstance(log.events[0][1], Adopted)
    seen = [event for _, event in log.told(Observed)]
    assert len(seen) == 119
    assert sum(each.offered.get("a", 0) for each in seen) == pytest.approx(40 * 59.5, rel=0.1)
    stayed = sum(each.stayed.get("a", 0) for each in seen)
    assert stayed <= sum(each.offered.get("a", 0) for each in seen) <= stayed + 5
    batches = [each.latencies["a"] for each in seen if "a" in each.latencies]
    assert sum(each.observed for each in batches) == pytest.approx(sum(each.predicted for each in batches))
    assert report.models[0].attainment == 1.0


def test_load_that_doubles_gets_devices_that_launch_and_loses_nothing_after() -> None:
    report, log, _ = run(stepping((0, 40.0), (20, 150.0)), 60.0)
    (acquired, acquire), *_ = log.commanded(Acquire)
    assert 20.0 < acquired < 22.0
    assert acquire.kind == "gpu"
    rolled = log.commanded(Roll)
    assert rolled[-1][1].plan.devices_used >= 3
    assert rolled[0][0] < acquired + 3.0 + 1.0, "as soon as devices are there"
    assert all(event.outcome is RolloutOutcome.COMPLETED for _, event in log.told(RollEnded))
    # 150/s come to what serves 100/s for about 6 s.
    assert report.models[0].missed < 6 * 60
    last = [event for now, event in log.told(Observed) if now > 32]
    stayed = sum(event.stayed["a"] for event in last)
    within = sum(event.within_target["a"] for event in last)
    assert within == stayed


def test_devices_go_back_when_the_load_is_over() -> None:
    _, log, cloud = run(stepping((0, 40.0), (20, 150.0), (60, 30.0)), 200.0)
    (released, _), *_ = log.commanded(Release)
    assert 105.0 <= released < 115.0, "15 times 3 s later"
    assert len(cloud.released) >= 2


def test_device_that_is_lost_is_replaced() -> None:
    failure = Failure(time=20.0, parts=(GPU[0],), back=1000.0)
    report, log, _ = run(Workload.poisson({"a": 40.0}), 60.0, failures=[failure])
    (lost, gone), *_ = log.told(DevicesGone)
    assert lost == 20.0
    assert gone.devices == GPU[:1]
    last = [event for now, event in log.told(Observed) if now > 30]
    stayed = sum(event.stayed.get("a", 0) for event in last)
    within = sum(event.within_target.get("a", 0) for event in last)
    assert stayed > 1000
    assert within == stayed
    assert report.models[0].missed < 10 * 40


def test_other_programs_slow_batches_and_are_noticed() -> None:
    _, log, _ = run(Workload.poisson({"a": 40.0}), 60.0, foreign_load=((20.0, 1.7), (40.0, 1.0)))
    solves = log.commanded(Solve)
    assert solves
    time, first = solves[0]
    assert 21.0 < time < 26.0
    assert first.slowdowns["a"] == pytest.approx(1.7, abs=0.25)


def test_same_seed_gives_the_same_commands() -> None:
    logs = [run(stepping((0, 40.0), (20, 150.0)), 40.0)[1] for _ in range(2)]
    assert logs[0].commands == logs[1].commands
    assert logs[0].events == logs[1].events


def test_utilisation_is_observed() -> None:
    _, log, _ = run(Workload.poisson({"a": 40.0}), 60.0)
    seen = [event for _, event in log.told(Observed)]
    busy = sum(each.latencies["a"].observed for each in seen if "a" in each.latencies)
    assert sum(each.utilisation * each.seconds for each in seen) == pytest.approx(busy, rel=0.05)


def test_device_that_the_cloud_takes_away_serves_no_more_and_is_replaced() -> None:
    cloud = Cloud()
    workload = Workload.poisson({"a": 40.0})
    report, log, _ = run(workload, 60.0, cloud)
    assert report.models[0].attainment == 1.0
    taken = Cloud(lifetime=20.0)
    report, log, _ = run(workload, 120.0, taken)
    gone = [now for now, event in log.told(DevicesGone) if event.reason == "the cloud took it away"]
    assert gone
    found = [now for now, _ in log.told(DevicesFound)]
    assert all(any(now <= then < now + 12.0 for then in found) for now in gone if now < 100)
    assert 0.3 < (report.models[0].attainment or 0.0) < 1.0


def test_device_that_is_not_there_fails_the_rollout_and_nothing_else() -> None:
    lying = Cloud(broken=1.0, broken_seconds=10.0)
    report, log, _ = run(stepping((0, 40.0), (20, 150.0)), 40.0, lying)
    outcomes = {event.outcome for _, event in log.told(RollEnded)}
    assert outcomes == {RolloutOutcome.ROLLED_BACK}
    assert report.models[0].goodput > 45  # requests/s: the device that is there serves on
