from __future__ import annotations

import pytest

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Profile
from cotenant.planners import Problem, capacity
from cotenant.planners.capacity import batched_partitions
from cotenant.planners.squishy import plan
from tests.planners.problems import profile


def whole(name: str, batches: dict[int, float]) -> Profile:
    return profile(name, "k", {(1000, batch): ms / 1e3 for batch, ms in batches.items()})


# Nexus (SOSP 2019), Table 2: what batches of 4, 8 and 16 take, in ms. Targets 200, 250 and 250 ms.
NEXUS = {
    ("a", "k"): whole("a", {4: 50.0, 8: 75.0, 16: 100.0}),
    ("b", "k"): whole("b", {4: 50.0, 8: 90.0, 16: 125.0}),
    ("c", "k"): whole("c", {4: 60.0, 8: 95.0, 16: 125.0}),
}
MODELS = (Model(name="a", slo=0.2), Model(name="b", slo=0.25), Model(name="c", slo=0.25))


def problem(rates: dict[str, float], count: int | None = None) -> Problem:
    return Problem(models=MODELS, rates=rates, fleet=(Kind(name="k", count=count),), profiles=NEXUS)


def groups(plan: Plan) -> list[list[str]]:
    return sorted(sorted(p.model for cut in device.partitions for p in cut.placements) for device in plan.devices)


def test_squishy_of_saturating_model_gives_it_whole_devices() -> None:
    """Nexus, section 4.1: at 500 requests/s, each GPU carries 160 of A in batches of 16 within 2 · 100 ms."""
    made = plan(problem({"a": 480.0}))
    assert groups(made) == [["a"]] * 3
    assert {p.batch for _, _, p in made.placements()} == {16}
    assert [p.rate for _, _, p in made.placements()] == [pytest.approx(160.0)] * 3


def test_squishy_residues_share_a_device_at_the_shorter_duty_cycle() -> None:
    """Nexus, Figure 2: A at 64 requests/s gathers 8 in 125 ms and takes 75; B at 32 then runs 4 in the 50 ms left.
    C at 32 needs 60 ms, for which there is no room beside A."""
    assert groups(plan(problem({"a": 64.0, "b": 32.0, "c": 0.0}))) == [["a", "b"]]
    assert groups(plan(problem({"a": 64.0, "b": 0.0, "c": 32.0}))) == [["a"], ["c"]]
    assert len(plan(problem({"a": 64.0, "b": 32.0, "c": 32.0})).devices) == 2


def test_squishy_residues_merge_the_fullest_first() -> None:
    """C fills 39 % of its duty cycle, A 33 % and B 27 %: C and A are 119 ms in A's 150, and B has no room there. The
    emptiest first, it were B and A."""
    assert groups(plan(problem({"a": 4.0, "b": 16.0, "c": 28.0}))) == [["a", "c"], ["b"]]


def test_squishy_residue_that_fits_several_devices_joins_the_one_that_it_fills_most() -> None:
    assert groups(plan(problem({"a": 4.0, "b": 28.0, "c": 52.0}))) == [["a", "c"], ["b"]]


def test_squishy_residues_longer_together_than_the_shorter_duty_cycle_stay_apart() -> None:
    """A at 10 requests/s runs 1 in 50 ms each 100 ms. With C at 20 a round of 110 ms would hold both targets, but
    Nexus lengthens no duty cycle: 50 + 60 ms exceed A's. B's 50 ms fill it exactly."""
    assert groups(plan(problem({"a": 10.0, "c": 20.0}))) == [["a"], ["c"]]
    assert groups(plan(problem({"a": 10.0, "b": 20.0}))) == [["a", "b"]]


def test_squishy_with_too_few_devices_leaves_rate_unserved() -> None:
    made = plan(problem({"a": 500.0}, count=2))
    assert made.unserved == {"a": pytest.approx(180.0)}
    assert made.scale == pytest.approx(320 / 500)


def test_squishy_of_very_low_rate_serves_single_requests() -> None:
    assert plan(problem({"a": 0.1})).unserved == {}


def test_squishy_uses_whole_devices_only() -> None:
    made = plan(problem({"a": 100.0, "b": 100.0, "c": 100.0}))
    assert {cut.share for device in made.devices for cut in device.partitions} == {1000}


def test_squishy_of_large_fleet_plans_identical_devices_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(*given: object, **options: object) -> object:
        asked.append(given)
        return batched_partitions(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(capacity, "batched_partitions", counted)
    made = plan(problem({"a": 160.0 * 1000 + 64.0}))
    assert (made.devices_used, made.unserved) == (1001, {})
    assert [device.id.index for device in made.devices] == list(range(1001))
    assert len(asked) < 10
    assert plan(problem({"a": 160.0 * 1000 + 64.0}, count=7)).devices_used == 7
