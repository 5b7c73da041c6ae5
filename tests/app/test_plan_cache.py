"""Plans are kept by all that they depend on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import cotenant.cli.demo_rates
from cotenant.app.plan_cache import KEPT, load_plan, plan_folder, plan_key, store_plan
from cotenant.cli.demo_rates import plan_demo, plan_demo_once
from cotenant.config import read_settings
from cotenant.core.profile import slowed_profiles
from cotenant.planners import Problem
from cotenant.planners.front_end import FrontEnd
from tests.planners.problems import embedded

ELASTIC = msgspec.structs.replace(read_settings(), planner="elastic")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_plan_is_what_was_stored_under_its_key_and_the_oldest_go() -> None:
    assert load_plan("a") is None
    for number in range(KEPT + 3):
        store_plan(f"{number}", b"%d" % number)
    assert load_plan(f"{KEPT + 2}") == b"%d" % (KEPT + 2)
    assert len(list(plan_folder().iterdir())) == KEPT


def test_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "cotenant").write_text("a file in the way")
    store_plan("a", b"x")
    assert load_plan("a") is None


def changed(problem: Problem) -> dict[str, Problem]:
    """The problem with one thing that a plan depends on different."""
    first, *others = problem.models
    kind = problem.fleet[0]
    replace = msgspec.structs.replace
    return {
        "target": replace(problem, models=(replace(first, slo=first.slo * 2), *others)),
        "rate": replace(problem, rates=problem.rates | {first.name: 1.25}),
        "device": replace(problem, fleet=(replace(kind, cuts=kind.cuts[1:]),)),
        "profile": replace(problem, profiles=slowed_profiles(problem.profiles, {first.name: 1.001})),
        "objective": replace(problem, objective="rate"),
        "front end": replace(problem, front_end=FrontEnd(seconds=2e-4)),
        "priority": replace(problem, models=(replace(first, priority=2), *others)),
    }


@pytest.mark.parametrize("what", sorted(changed(embedded())))
def test_key_changes_with_whatever_a_plan_depends_on(what: str) -> None:
    problem = embedded()
    assert plan_key(problem) == plan_key(embedded())
    assert plan_key(changed(problem)[what]) != plan_key(problem)


def test_key_changes_with_circumstances() -> None:
    problem = embedded()
    assert len({plan_key(problem), plan_key(problem, "geometry"), plan_key(problem, {"digits": 1.5})}) == 3


def test_demo_plans_the_same_problem_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = embedded()
    made = plan_demo_once(problem, ELASTIC, {})
    assert made.plan.devices == plan_demo(problem, "elastic", {}).plan.devices
    monkeypatch.setattr(cotenant.cli.demo_rates, "plan_problem", lambda *_, **__: pytest.fail("planned again"))
    again = plan_demo_once(embedded(), ELASTIC, {})
    assert (again.plan, again.fraction, again.missed) == (made.plan, made.fraction, made.missed)
    assert (again.problem.rates, again.problem.models) == (made.problem.rates, made.problem.models)


def test_kept_plan_that_cannot_be_read_is_made_again() -> None:
    problem = embedded()
    made = plan_demo_once(problem, ELASTIC, {})
    (file,) = plan_folder().iterdir()
    for broken in (b"", b"{}", b'{"plan": {}, "fraction": 1.0, "missed": []}'):
        file.write_bytes(broken)
        assert plan_demo_once(problem, ELASTIC, {}).plan.devices == made.plan.devices
