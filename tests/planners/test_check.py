from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from cotenant.core import mig
from cotenant.core.identity import DeviceId
from cotenant.core.mig import GIB
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem
from cotenant.planners.check import check
from cotenant.planning import plan as plan_problem
from tests.planners.problems import MIB, ProportionalInterference, linear

PROBLEM = Problem(
    models=(Model(name="a", slo=0.1), Model(name="b", slo=0.5, max_batch=4)),
    rates={"a": 60.0, "b": 10.0},
    fleet=(Kind(name="k", count=1, cuts=(200, 400, 600), memory=2 * MIB, max_partitions=2),),
    profiles={(name, "k"): linear(name, "k", 0.004, 0.004, cuts=(200, 400, 600)) for name in "ab"},
)
A = Placement(model="a", batch=2, rate=60.0, duty=0.03, latency=0.03)
B = Placement(model="b", batch=1, rate=10.0, duty=0.04, latency=0.04)
SOUND = Plan(
    planner="p",
    devices=(
        Device(
            id=DeviceId("k", 0),
            partitions=(Partition(share=400, placements=(A,)), Partition(share=200, placements=(B,))),
        ),
    ),
)


def changed(**changes: Any) -> Plan:
    """The sound plan with another first device, first partition or first placement."""
    (device,) = SOUND.devices
    first, *others = device.partitions
    replace = msgspec.structs.replace
    placement = replace(A, **changes.get("placement", {}))
    first = replace(first, **({"placements": (placement,)} | changes.get("partition", {})))
    device = replace(device, **({"partitions": (first, *others)} | changes.get("device", {})))
    return replace(SOUND, **({"devices": (device,)} | changes.get("plan", {})))


def test_check_of_a_valid_plan_finds_no_violation() -> None:
    assert check(SOUND, PROBLEM) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"device": {"id": DeviceId("z")}}, "z: the problem has no devices of this kind"),
        ({"plan": {"devices": SOUND.devices * 2}}, "k: 2 devices where there are 1"),
        ({"plan": {"devices": SOUND.devices * 2}}, "k-0: 2 devices of one kind have this index"),
        (
            {"device": {"partitions": (Partition(share=200, placements=()),) * 3}},
            "k-0: 3 partitions where at most 2 are allowed",
        ),
        ({"partition": {"share": 390}}, "k-0/0: 39 % is not a legal share; the nearest is 40 %"),
        (
            {"device": {"partitions": (Partition(share=600, placements=()),) * 2}},
            "k-0: the partitions add up to 120 % of the device",
        ),
        ({"placement": {"procs": 2}}, "k-0: workers need 3 MiB where the device has 2 MiB"),
        ({"placement": {"procs": 2}}, "k-0/0 a: this share and batch were not profiled: latency unknown"),
        ({"placement": {"model": "z"}}, "k-0/0 z: the problem has no such model"),
        ({"partition": {"placements": (A, A)}}, "k-0/0 a: 2 placements on one partition"),
        ({"placement": {"batch": 17}}, "k-0/0 a: batch 17, where the model and its profile allow 1 to 16"),
        ({"placement": {"batch": 0}}, "k-0/0 a: batch 0, where"),
        ({"partition": {"placements": (A, msgspec.structs.replace(B, batch=5))}}, "k-0/0 b: batch 5, where the model"),
        ({"placement": {"rate": -1.0}}, "k-0/0 a: a rate of -1 requests/s"),
        ({"placement": {"rate": float("nan")}}, "k-0/0 a: a rate of nan requests/s"),
        ({"placement": {"rate": 67.0}}, "k-0/0 a: sustains 66.6667 requests/s, is planned for 67"),
        (
            {"placement": {"batch": 16, "latency": 0.17, "duty": 0.17}},
            "k-0/0 a: worst-case latency 340 ms, target 100 ms",
        ),
        ({"placement": {"latency": 0.02}}, "k-0/0 a: a batch takes 30 ms, the plan says 20 ms"),
        ({"placement": {"duty": 0.02}}, "k-0/0 a: a round takes 30 ms, the plan says 20 ms"),
        ({"placement": {"rate": 50.0}}, "a: 50 requests/s are served or reported as unserved, 60 were requested"),
        ({"plan": {"unserved": {"a": 5.0}}}, "a: 65 requests/s are served or reported as unserved, 60 were requested"),
        ({"plan": {"unserved": {"z": 5.0}}}, "z: the problem has no such model"),
        ({"plan": {"scale": 2.0}}, "p: the plan states that it serves 2 of the requested rates, it serves 1"),
    ],
)
def test_check_of_each_violation_gives_one_line(changes: dict[str, Any], line: str) -> None:
    lines = [str(violation) for violation in check(changed(**changes), PROBLEM)]
    assert any(re.match(re.escape(line), found) for found in lines), lines


def test_check_plan_for_a_multiple_of_the_rates_violates_nothing() -> None:
    """A plan for the largest rate serves more than was asked for, of each model alike."""
    half = msgspec.structs.replace(PROBLEM, rates={"a": 30.0, "b": 5.0})
    assert check(changed(plan={"scale": 2.0}), half) == []
    assert {violation.rule for violation in check(changed(plan={"scale": 3.0}), half)} == {"served", "scale"}


def test_check_counts_interference() -> None:
    crowded = msgspec.structs.replace(PROBLEM, interference=ProportionalInterference(1.0))
    rules = [violation.rule for violation in check(SOUND, crowded)]
    assert rules.count("latency") == 2
    assert "keeps up" in rules


def test_check_of_several_workers_counts_their_batches() -> None:
    points = [msgspec.structs.replace(point, procs=2) for point in PROBLEM.profiles["a", "k"].points]
    both = type(PROBLEM.profiles["a", "k"])("a", "k", [*PROBLEM.profiles["a", "k"].points, *points])
    problem = msgspec.structs.replace(
        PROBLEM,
        profiles={**PROBLEM.profiles, ("a", "k"): both},
        rates={"a": 120.0, "b": 10.0},
        fleet=(msgspec.structs.replace(PROBLEM.fleet[0], memory=3 * MIB),),
    )
    assert check(changed(placement={"procs": 2, "rate": 120.0}), problem) == []


def on_mig(*placed: tuple[int, int], memory: int = GIB) -> list[str]:
    """What is wrong with instances of (share in ‰, workers) of an A100-80GB, each worker with so much memory."""
    kind = Kind(name="k", geometry="mig-a100-80gb", cuts=mig.instance_shares("mig-a100-80gb"), memory=80 * GIB)
    points = [
        Point(share=share, batch=1, latency=0.02, memory=memory, procs=procs)
        for share in kind.cuts
        for procs in (1, 2, 3)
    ]
    rate = 5.0
    problem = Problem(
        models=(Model(name="a", slo=0.1),),
        rates={"a": rate * len(placed)},
        fleet=(kind,),
        profiles={("a", "k"): Profile("a", "k", points)},
    )
    partitions = tuple(
        Partition(
            share=share,
            placements=(Placement(model="a", batch=1, rate=rate, duty=0.02, latency=0.02, procs=procs),),
        )
        for share, procs in placed
    )
    plan = Plan(planner="p", devices=(Device(id=DeviceId("k", 0), partitions=partitions),))
    return [str(violation) for violation in check(plan, problem)]


def test_check_of_mig_instances_needs_a_legal_placement() -> None:
    line = "k-0: MIG has no such instances side by side with the memory that their workers need"
    assert on_mig(*[(142, 1)] * 7) == []
    assert on_mig((428, 1), (571, 1)) == []
    assert on_mig((428, 1), (428, 1), (142, 1)) == [line]
    assert line in on_mig((571, 1), (571, 1))


def test_check_of_mig_instances_counts_memory_of_each() -> None:
    line = "k-0: MIG has no such instances side by side with the memory that their workers need"
    assert on_mig((142, 2), memory=9 * GIB) == []
    assert on_mig((142, 3), memory=9 * GIB) == [line]
    # 20 GB instances of a seventh fit four times, and leave no slice of memory for a fifth.
    assert on_mig(*[(142, 1)] * 4, memory=12 * GIB) == []
    assert on_mig(*[(142, 1)] * 5, memory=12 * GIB) == [line]


@pytest.mark.parametrize("procs", [1, 2, 3])
def test_check_of_parallel_workers_counts_batches_per_round(procs: int) -> None:
    points = [Point(share=1000, batch=2, latency=0.02 * (1 + n), memory=1, procs=n) for n in (1, 2, 3)]
    seconds = 0.02 * (1 + procs)
    for part, rules in ((0.999, []), (1.001, ["keeps up"])):
        rate = part * procs * 2 / seconds
        problem = Problem(
            models=(Model(name="a", slo=1.0),),
            rates={"a": rate},
            fleet=(Kind(name="k"),),
            profiles={("a", "k"): Profile("a", "k", points)},
        )
        placement = Placement(model="a", batch=2, rate=rate, duty=seconds, latency=seconds, procs=procs)
        device = Device(id=DeviceId("k", 0), partitions=(Partition(share=1000, placements=(placement,)),))
        assert [violation.rule for violation in check(Plan(planner="p", devices=(device,)), problem)] == rules


MIXED = Problem(
    models=(Model(name="a", slo=0.1), Model(name="b", slo=0.5), Model(name="never", slo=0.001)),
    rates={"a": 0.0, "b": 10.0, "never": 1.0},
    fleet=(Kind(name="k", count=1, price=1.0), Kind(name="l", count=2, price=3.0), Kind(name="bare", count=None)),
    profiles={(name, kind): linear(name, kind, 0.004, 0.004) for name in ("a", "b", "never") for kind in "kl"},
)


def test_check_counts_devices_of_each_kind() -> None:
    device = Device(id=DeviceId("k", 0), partitions=())
    other = msgspec.structs.replace(device, id=DeviceId("l"))
    plan = Plan(planner="p", unserved={"b": 10.0, "never": 1.0}, scale=0.0)
    for devices, lines in (
        ((device, other), []),
        ((device, msgspec.structs.replace(device, id=DeviceId("k", 1))), ["k: 2 devices where there are 1"]),
        ((other, other), ["l-0: 2 devices of one kind have this index"]),
        ((msgspec.structs.replace(device, id=DeviceId("bare")),), []),
    ):
        assert [str(v) for v in check(msgspec.structs.replace(plan, devices=devices), MIXED)] == lines


def test_check_of_a_profile_of_another_kind_reports_it_missing() -> None:
    placement = Placement(model="b", batch=1, rate=10.0, duty=0.008, latency=0.008)
    device = Device(id=DeviceId("bare", 0), partitions=(Partition(share=1000, placements=(placement,)),))
    plan = Plan(planner="p", devices=(device,), unserved={"never": 1.0}, scale=0.0)
    assert [violation.rule for violation in check(plan, MIXED)] == ["profile"]


@pytest.mark.parametrize("name", ["elastic", "squishy", "bestfit"])
def test_check_of_zero_rates_and_infeasible_targets_reports_them(name: str) -> None:
    plan = plan_problem(MIXED, name, validate=False)
    assert check(plan, MIXED) == []
    assert plan.unserved == {"never": 1.0}
    assert plan.rate("b") == pytest.approx(10.0)
    assert (plan.rate("a"), plan.scale) == (0.0, 0.0)
    assert [device.kind for device in plan.devices] == ["k"]
    assert plan.cost_per_hour == 1.0
