from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from cotenant.app.problem import work_of
from cotenant.cli.demo_rates import DEMO_WORK, DemoPlan, plan_demo, plan_demo_once
from cotenant.config import read_settings
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.check import check
from tests.planners.problems import embedded


def test_demo_on_a_quiet_machine_asks_for_a_part_of_it_and_misses_nothing() -> None:
    problem = embedded()
    chosen = plan_demo(problem, "geometry", {})
    assert work_of(chosen.problem, chosen.problem.rates) == pytest.approx(DEMO_WORK)
    assert (chosen.fraction, chosen.missed) == (1.0, ())
    assert not chosen.plan.unserved and check(chosen.plan, chosen.problem) == []
    ratios = {chosen.problem.rates[name] / rate for name, rate in problem.rates.items()}
    assert max(ratios) == pytest.approx(min(ratios))


def test_demo_on_a_busy_machine_says_what_cannot_be_kept_and_asks_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.cli.demo_rates.TIME_LIMIT", 0.2)
    problem = embedded()
    chosen = plan_demo(problem, "geometry", dict.fromkeys(problem.rates, 3.0))
    assert chosen.fraction < 1 and chosen.missed
    assert all(line.split(":")[0] in problem.rates for line in chosen.missed)
    assert work_of(problem, chosen.problem.rates) == pytest.approx(DEMO_WORK * chosen.fraction)


def test_demo_names_models_whose_target_no_share_keeps() -> None:
    problem = embedded()
    chosen = plan_demo(problem, "geometry", {"digits": 100.0})
    assert any(line.startswith("digits: no share is left that serves ") for line in chosen.missed), chosen.missed
    assert chosen.plan.rate("digits") == 0 and chosen.plan.rate("bert") > 0


def test_plan_for_a_busy_machine_is_found_again_at_about_the_same_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    problem, planned = embedded(), []

    def plan(problem: Problem, planner: str, slowdowns: Mapping[str, float]) -> DemoPlan:
        planned.append(slowdowns["digits"])
        return DemoPlan(problem=problem, plan=Plan(planner=planner))

    monkeypatch.setattr("cotenant.cli.demo_rates.plan_demo", plan)
    for measured in (1.49, 1.46, 1.43, 1.52, 1.72):
        plan_demo_once(problem, read_settings(), {"digits": measured})
    assert planned == [1.551, 1.477, 1.796]
