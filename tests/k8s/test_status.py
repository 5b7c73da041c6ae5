"""What is told of a model and a pool, and when it is written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cotenant.control.controller_status import ModelState
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.k8s.specs import FoundModel, read_device_pools, read_served_models
from cotenant.k8s.status import MOVING_SECONDS, ServerView, model_status, pool_status, worth_writing
from cotenant.live.oip import IndexEntry
from cotenant.live.status import AdaptationStatus, ModelStatus, RevisionStatus, Status
from tests.k8s.manifests import BASE, documents
from tests.k8s.schema import admitted

NOW, BEFORE = "2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z"
CPU = Kind(name="node-a/cpu", count=2)


def plan(rate: float = 100.0, unserved: float = 0.0) -> Plan:
    placement = Placement(model="m", batch=4, procs=1, rate=rate, duty=0.01, latency=0.01)
    device = Device(id=DeviceId("cpu", 0, node="node-a"), partitions=(Partition(share=400, placements=(placement,)),))
    return Plan(planner="test", devices=(device,) if rate else (), unserved={"m": unserved} if unserved else {})


def adaptation(attainment: float | None, short: str = "") -> AdaptationStatus:
    state = ModelState(
        offered=90.04, planned=100.0, sustained=120.0, slowdown=1.0, observed_slowdown=1.0, attainment=attainment
    )
    return AdaptationStatus(
        activity="watching",
        reason="",
        short=short,
        foreign_load=None,
        processors=2,
        observed_slowdown=1.0,
        models={"m": state},
        decisions=(),
    )


def view(plan: Plan, state: str = "READY", attainment: float | None = 0.995, **changes: Any) -> ServerView:
    reason = changes.pop("reason", "")
    status = Status(
        backend="cpu",
        isolation="",
        ready=True,
        plan=msgspec.Raw(plan.to_json()),
        rollout=RevisionStatus(revision=7),
        targets={"m": 0.05},
        planned={"m": 100.0},
        models=[IndexEntry(name="m", state=state, reason=reason)] if state else [],
        statistics={"m": ModelStatus(outcomes={"served": 1}, attainment=0.99714, mean=0.01)},
        workers=[],
        adaptation=adaptation(attainment, changes.pop("short", "")),
    )
    given: dict[str, Any] = {"fleet": (CPU,), "available": {"m"}, "repository": "/models"} | changes
    return ServerView(status=status, plan=plan, **given)


def model(**status: Any) -> FoundModel:
    metadata = {"name": "m", "namespace": "models", "generation": 3, "creationTimestamp": BEFORE}
    (found,) = read_served_models([{"metadata": metadata, "spec": {"attainment": "99%"}, "status": status}])
    return found


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}


def message(status: dict[str, Any], type: str) -> str:
    (found,) = [each["message"] for each in status["conditions"] if each["type"] == type]
    return str(found)


def test_model_that_is_served_has_figures_and_conditions() -> None:
    status = model_status(model(), view(plan()), "", NOW)
    assert conditions(status) == {
        "Accepted": ("True", "Accepted"),
        "Planned": ("True", "Placed"),
        "SLOMet": ("True", "SLOMet"),
        "Ready": ("True", "Serving"),
    }
    del status["conditions"]
    assert status == {
        "observedGeneration": 3,
        "model": "m",
        "revision": 7,
        "slo": "50ms",
        "attainment": "99.71%",
        "plannedRate": 100.0,
        "offeredRate": 90.0,
        "placements": [{"device": "node-a/cpu-0", "share": "40%", "batch": 4, "rate": 100.0}],
    }


def test_model_that_fits_in_part_is_told_what_is_short() -> None:
    status = model_status(model(), view(plan(rate=60.0, unserved=40.0), short="2 devices are short"), "", NOW)
    assert conditions(status)["Planned"] == ("False", "Unschedulable")
    assert conditions(status)["Ready"] == ("True", "Serving")
    assert message(status, "Planned").startswith("40 of 100 requests/s fit on no device within the target; 2 devices")


def test_model_that_does_not_fit_is_not_ready_for_that_reason() -> None:
    status = model_status(model(), view(plan(rate=0.0, unserved=100.0), "UNAVAILABLE"), "", NOW)
    assert conditions(status)["Ready"] == ("False", "Unschedulable")


@pytest.mark.parametrize(
    ("attainment", "condition"),
    [(0.99, ("True", "SLOMet")), (0.9899, ("False", "SLOViolated")), (None, ("Unknown", "NoRequests"))],
)
def test_attainment_of_late_is_held_against_the_objective(attainment: float | None, condition: tuple[str, str]) -> None:
    assert conditions(model_status(model(), view(plan(), attainment=attainment), "", NOW))["SLOMet"] == condition


@pytest.mark.parametrize(
    ("changes", "ready"),
    [
        ({"state": "", "fleet": ()}, ("False", "NoDevices")),
        ({"state": "", "changing": True}, ("False", "Pending")),
        ({"state": "LOADING"}, ("False", "Loading")),
        ({"state": "UNAVAILABLE", "reason": "not a model"}, ("False", "Unavailable")),
        ({"state": "", "available": set()}, ("False", "ModelNotFound")),
    ],
)
def test_model_that_is_not_served_says_why(changes: dict[str, Any], ready: tuple[str, str]) -> None:
    assert conditions(model_status(model(), view(plan(), **changes), "", NOW))["Ready"] == ready


def test_change_that_was_rejected_leaves_the_model_ready() -> None:
    status = model_status(model(), view(plan()), "no memory is left", NOW)
    assert conditions(status)["Accepted"] == ("False", "Rejected")
    assert conditions(status)["Ready"] == ("True", "Serving")
    assert message(status, "Accepted") == "no memory is left"


def test_condition_keeps_the_time_since_when_it_is_so() -> None:
    before = [
        {"type": "Ready", "status": "True", "reason": "Serving", "message": "", "lastTransitionTime": BEFORE},
        {"type": "SLOMet", "status": "False", "reason": "SLOViolated", "message": "", "lastTransitionTime": BEFORE},
    ]
    status = model_status(model(conditions=before), view(plan()), "", NOW)
    since = {each["type"]: each["lastTransitionTime"] for each in status["conditions"]}
    assert (since["Ready"], since["SLOMet"], since["Planned"]) == (BEFORE, NOW, NOW)
    again = model_status(model(**status), view(plan()), "", "2026-01-03T00:00:00Z")
    assert again == status


@pytest.mark.parametrize("conditions", [None, "none", [None], [{}], [{"type": "Ready"}]])
def test_status_that_somebody_has_broken_is_replaced(conditions: Any) -> None:
    assert model_status(model(conditions=conditions), view(plan()), "", NOW)["conditions"]


def test_moving_figures_are_written_seldom_or_with_another_change() -> None:
    status = model_status(model(), view(plan()), "", NOW)
    moved = {**status, "attainment": "98.00%", "offeredRate": 1.0}
    assert not worth_writing(status, status, 1e9)
    assert not worth_writing(status, moved, MOVING_SECONDS - 1)
    assert worth_writing(status, moved, MOVING_SECONDS)
    assert worth_writing(status, {**moved, "revision": 8}, 0.0)
    assert worth_writing({}, status, 0.0)


def pool(**spec: Any) -> Any:
    body = {"metadata": {"name": "p", "generation": 1}, "spec": {"kind": "cpu", "pricePerHour": 0.5, **spec}}
    (found,) = read_device_pools([body])
    return found


def test_pool_counts_devices_of_its_kind_on_all_nodes() -> None:
    fleet = (CPU, Kind(name="node-b/cpu", count=3), Kind(name="h100", count=8))
    status = pool_status(pool(), view(plan(), fleet=fleet), "", NOW)
    assert (status["nodes"], status["devices"], status["used"], status["costPerHour"]) == (2, 5, 1, 0.5)
    assert conditions(status) == {"Ready": ("True", "DevicesFound")}


def test_pool_names_the_nodes_that_share_in_another_way() -> None:
    status = pool_status(pool(sharing=["mps"]), view(plan()), "", NOW, {"node-a": "mig"})
    assert conditions(status) == {"Ready": ("False", "SharingNotAllowed")}
    assert message(status, "Ready").endswith("node-a (mig)")


def test_every_status_keeps_to_the_schema() -> None:
    statuses = [
        ("servedmodels.yaml", model_status(model(), view(made, state), rejection, NOW))
        for made in (plan(), plan(0.0, 9.0), plan(5.0, 4.0))
        for state in ("READY", "LOADING", "UNAVAILABLE", "")
        for rejection in ("", "no")
    ]
    statuses += [
        ("devicepools.yaml", pool_status(pool(), view(plan(), fleet=fleet), "", NOW)) for fleet in ((), (CPU,))
    ]
    for name, status in statuses:
        (definition,) = documents(BASE / name)
        schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        stored, errors = admitted({"spec": {"kind": "cpu"}, "status": status}, schema)
        assert (stored["status"], errors) == (status, [])
        assert all(each["message"] for each in status["conditions"])
