from __future__ import annotations

import pytest

from cotenant.app.problem import work_of
from cotenant.cli.demo_rates import DEMO_WORK, plan_demo
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


def test_demo_on_a_busy_machine_says_what_cannot_be_kept_and_asks_for_less() -> None:
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
