from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.planners import Problem
from cotenant.planners.check import check
from tests.planners.problems import MIB, Crowded, linear

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
            kind="k",
            id=0,
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


def test_a_sound_plan_violates_nothing() -> None:
    assert check(SOUND, PROBLEM) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"device": {"kind": "z"}}, "z: the problem has no devices of this kind"),
        ({"plan": {"devices": SOUND.devices * 2}}, "k: 2 devices where there are 1"),
        ({"plan": {"devices": SOUND.devices * 2}}, "k0: 2 devices of one kind have this number"),
        (
            {"device": {"partitions": (Partition(share=200, placements=()),) * 3}},
            "k0: 3 partitions where at most 2 are allowed",
        ),
        ({"partition": {"share": 390}}, "k0/0: 39 % is no legal share; the nearest is 40 %"),
        (
            {"device": {"partitions": (Partition(share=600, placements=()),) * 2}},
            "k0: the partitions add up to 120 % of the device",
        ),
        ({"placement": {"procs": 2}}, "k0: workers need 3 MiB where the device has 2 MiB"),
        ({"placement": {"procs": 2}}, "k0/0 a: nothing was measured for this share and batch: latency is unknown"),
        ({"placement": {"model": "z"}}, "k0/0 z: the problem has no such model"),
        ({"partition": {"placements": (A, A)}}, "k0/0 a: 2 placements on one partition"),
        ({"placement": {"batch": 17}}, "k0/0 a: batch 17, where the model and its profile allow 1 to 16"),
        ({"placement": {"batch": 0}}, "k0/0 a: batch 0, where"),
        ({"partition": {"placements": (A, msgspec.structs.replace(B, batch=5))}}, "k0/0 b: batch 5, where the model"),
        ({"placement": {"rate": -1.0}}, "k0/0 a: a rate of -1 requests/s"),
        ({"placement": {"rate": float("nan")}}, "k0/0 a: a rate of nan requests/s"),
        ({"placement": {"rate": 67.0}}, "k0/0 a: carries 66.6667 requests/s, is to carry 67"),
        ({"placement": {"batch": 16, "latency": 0.17, "duty": 0.17}}, "k0/0 a: may take 340 ms, target 100 ms"),
        ({"placement": {"latency": 0.02}}, "k0/0 a: a batch takes 30 ms, the plan says 20 ms"),
        ({"placement": {"duty": 0.02}}, "k0/0 a: a round takes 30 ms, the plan says 20 ms"),
        ({"placement": {"rate": 50.0}}, "a: 50 requests/s are served or said to be unserved, 60 were asked for"),
        ({"plan": {"unserved": {"a": 5.0}}}, "a: 65 requests/s are served or said to be unserved, 60 were asked for"),
        ({"plan": {"unserved": {"z": 5.0}}}, "z: the problem has no such model"),
        ({"plan": {"scale": 2.0}}, "p: the plan says it serves 2 of the rates asked for, it serves 1"),
    ],
)
def test_each_violation_is_one_clear_line(changes: dict[str, Any], line: str) -> None:
    lines = [str(violation) for violation in check(changed(**changes), PROBLEM)]
    assert any(re.match(re.escape(line), found) for found in lines), lines


def test_neighbours_count() -> None:
    crowded = msgspec.structs.replace(PROBLEM, interference=Crowded(1.0))
    rules = [violation.rule for violation in check(SOUND, crowded)]
    assert rules.count("latency") == 2
    assert "keeps up" in rules


def test_several_workers_of_a_model_carry_as_many_batches() -> None:
    points = [msgspec.structs.replace(point, procs=2) for point in PROBLEM.profiles["a", "k"].points]
    both = type(PROBLEM.profiles["a", "k"])("a", "k", [*PROBLEM.profiles["a", "k"].points, *points])
    problem = msgspec.structs.replace(
        PROBLEM,
        profiles={**PROBLEM.profiles, ("a", "k"): both},
        rates={"a": 120.0, "b": 10.0},
        fleet=(msgspec.structs.replace(PROBLEM.fleet[0], memory=3 * MIB),),
    )
    assert check(changed(placement={"procs": 2, "rate": 120.0}), problem) == []
