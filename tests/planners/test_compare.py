from __future__ import annotations

import msgspec
import pytest

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.planners import Problem, load_planner
from cotenant.planners.compare import Comparison, compare
from cotenant.planning import plan as plan_problem
from tests.planners.problems import EVERY_5, linear


def problem(count: int | None = None, *, rate: float = 400.0, price: float | None = None) -> Problem:
    """Two models; a device carries some 300 requests/s of one."""
    return Problem(
        models=(Model(name="a", slo=0.2), Model(name="b", slo=0.2)),
        rates={"a": rate, "b": rate / 10},
        fleet=(Kind(name="k", cuts=EVERY_5, count=count, price=price),),
        profiles={(name, "k"): linear(name, "k", 0.002, 0.003) for name in "ab"},
    )


def named(plan: Plan, planner: str, **changes: object) -> Plan:
    return msgspec.structs.replace(plan, planner=planner, **changes)


def compared(given: Problem, *plans: Plan, **errors: str) -> Comparison:
    return compare(given, plans, errors)


def test_compare_ranks_the_best_first_and_states_the_difference() -> None:
    given = problem()
    few = plan_problem(given, "elastic", validate=False)
    many = plan_problem(problem(rate=800.0), "elastic", validate=False)
    # Half of what the larger plan carries: as good for these rates, on more devices.
    devices = tuple(
        msgspec.structs.replace(
            device,
            partitions=tuple(
                msgspec.structs.replace(
                    cut, placements=tuple(msgspec.structs.replace(p, rate=p.rate / 2) for p in cut.placements)
                )
                for cut in device.partitions
            ),
        )
        for device in many.devices
    )
    wasteful = named(many, "wasteful", devices=devices, scale=1.0)
    found = compared(given, wasteful, named(few, "thrifty", bound=few.devices_used - 0.7), tiny="too large for me")
    assert [row.planner for row in found.rows] == ["thrifty", "wasteful", "tiny"]
    more = (many.devices_used / few.devices_used - 1) * 100
    assert found.summary == (
        f"thrifty needs {few.devices_used} devices (proven optimal);"
        f" wasteful needs {many.devices_used} (+{more:.3g} %)."
    )
    first, second, third = found.rows
    assert (first.gap, first.violations) == (0.0, ())
    assert second.gap == pytest.approx(more / 100)
    assert (third.error, third.devices, third.worst) == ("too large for me", 0, None)


def test_compare_with_an_unreached_bound_gives_the_gap() -> None:
    given = problem(price=2.0)
    plan = plan_problem(given, "elastic", validate=False)
    cost = plan.cost_per_hour
    assert cost is not None
    found = compared(given, named(plan, "p", bound=cost * 0.8))
    assert found.rows[0].gap == pytest.approx(0.25)
    assert found.summary == (f"p needs {cost:g} per hour (within 25 % of the proven bound, {cost * 0.8:g}).")


def test_compare_without_a_complete_plan_ranks_by_unserved_rate() -> None:
    given = problem(1, rate=4000.0)
    some = plan_problem(given, "elastic", validate=False)
    none = named(some, "nobody", devices=(), unserved=dict(given.rates), scale=0.0)
    found = compared(given, none, some)
    left = sum(some.unserved.values())
    assert [row.planner for row in found.rows] == ["elastic", "nobody"]
    assert found.summary.startswith(
        "No planner serves everything with these devices: elastic leaves least unserved,"
        f" {left:.4g} of 4400 requests/s ("
    )
    assert found.rows[0].gap is None


def test_compare_names_planners_within_the_tolerance_together() -> None:
    given = msgspec.structs.replace(problem(2), objective="rate")
    plan = plan_problem(given, "elastic", validate=False)
    less = plan_problem(
        msgspec.structs.replace(given, fleet=(Kind(name="k", cuts=EVERY_5, count=1),)), "elastic", validate=False
    )
    bound = plan.scale * 1.02
    found = compared(given, less, named(plan, "one", bound=bound), named(plan, "two"))
    assert found.rows[-1].planner == "elastic"
    part = (1 - less.scale / plan.scale) * 100
    assert found.summary == (
        f"one and two serve {plan.scale:.4g} x the rates (within 1.96 % of the proven bound, {bound:.4g} x);"
        f" elastic serves {less.scale:.4g} x (-{part:.3g} %)."
    )
    assert found.rows[0].gap == pytest.approx(1 - 1 / 1.02)


def test_compare_ranks_a_plan_with_violations_last_and_lists_them() -> None:
    given = problem()
    plan = plan_problem(given, "elastic", validate=False)
    liar = named(plan, "liar", devices=plan.devices[:1])
    found = compared(given, liar, plan)
    assert [row.planner for row in found.rows] == ["elastic", "liar"]
    assert any("requests/s are served or reported as unserved" in line for line in found.rows[1].violations)
    assert "liar" not in found.summary
    assert compared(given, liar).summary == "No planner has a sound plan for this problem."
    assert compared(given, tiny="no").summary == "No planner has a sound plan for this problem."


def test_compare_ranks_plans_that_violate_slos_behind_those_that_meet_them() -> None:
    """Here one as the paper's algorithm leaves it, without the headroom for random arrivals that `plan` adds."""
    given = problem(1, rate=240.0)
    hopeful, careful = load_planner("elastic-plus")(given), plan_problem(given, "squishy", validate=False)
    found = compared(given, hopeful)
    assert not hopeful.unserved and not found.rows[0].meets_slos
    assert "SLO violated under Poisson arrivals, predicted: " in found.summary and found.summary.endswith(" % < 99 %.")
    both = compared(given, hopeful, careful)
    assert both.summary == "squishy needs 1 device; elastic-plus needs 1, and violates SLOs."
