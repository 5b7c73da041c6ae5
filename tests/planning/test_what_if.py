import msgspec
import pytest

from cotenant.core.model import Kind
from cotenant.errors import ConfigError, PlanError
from cotenant.planning.what_if import (
    Scenario,
    ScenarioTask,
    apply_changes,
    planned_rates,
    read_change,
    run_scenario,
)
from cotenant.workload import Workload
from tests.sim.test_run import PLAN, PROBLEM

CHEAP = Kind(name="t4", count=2, price=0.5)
TWO = msgspec.structs.replace(PROBLEM, fleet=(Kind(name="cpu", count=3, price=1.0), CHEAP))
QUESTION = Scenario(planner="geometry", problem=PROBLEM, workload=Workload.poisson(PROBLEM.rates))


def asked(text: str, question: Scenario = QUESTION) -> Scenario:
    return apply_changes(question, read_change(text), PLAN)


def counts(question: Scenario) -> dict[str, int | None]:
    return {kind.name: kind.count for kind in question.problem.fleet}


def test_what_if_other_rates_are_planned_and_offered() -> None:
    twice = asked("rate=2")
    assert twice.problem.rates == {"a": 600.0, "b": 400.0}
    assert {name: source.rate for name, source in twice.workload.sources.items()} == twice.problem.rates
    one = asked("rate=b:0.5")
    assert one.problem.rates == {"a": 300.0, "b": 100.0}
    assert {name: source.rate for name, source in one.workload.sources.items()} == one.problem.rates


def test_what_if_device_changes_count_from_those_in_use_or_none() -> None:
    two = msgspec.structs.replace(QUESTION, problem=TWO)
    assert counts(asked("devices=4")) == {"cpu": 4}
    assert counts(asked("devices=+2")) == {"cpu": 3}  # the plan uses one
    assert counts(asked("devices=-1")) == {"cpu": 0}
    assert counts(asked("devices=t4:1", two)) == {"cpu": 3, "t4": 1}
    with pytest.raises(ConfigError, match=r"^devices=1: say of which kind, such as devices=cpu:1$"):
        asked("devices=1", two)
    with pytest.raises(ConfigError, match=r"^devices=-2: only 1 of kind 'cpu' are used$"):
        asked("devices=-2")
    with pytest.raises(ConfigError, match=r"^devices=h100:1: no kind 'h100'; available: cpu$"):
        asked("devices=h100:1")


def test_what_if_another_kind_replaces_a_kind() -> None:
    two = msgspec.structs.replace(QUESTION, problem=TWO)
    (kind,) = asked("kind=cpu:t4", two).problem.fleet
    assert (kind.name, kind.count, kind.price) == ("t4", 5, 0.5)
    with pytest.raises(ConfigError, match=r"no devices of kind 't4' in this problem, which has cpu; list it under"):
        asked("kind=cpu:t4")


def test_what_if_other_targets_and_planners_apply() -> None:
    assert [model.slo for model in asked("slo=b:50ms").problem.models] == [0.08, 0.05]
    assert [model.slo for model in asked("slo=1s").problem.models] == [1.0, 1.0]
    assert asked("planner=elastic").planner == "elastic"
    both = asked("rate=2,slo=a:10ms")
    assert both.problem.rates["a"] == 600.0
    assert both.problem.model("a").slo == 0.01


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate", "--what-if rate: write what changes and how, such as rate=2, "),
        (
            "rates=2",
            "--what-if rates=2: 'rates' cannot be changed; available: rate, devices, kind, slo, planner, as in",
        ),
        ("rate=many", "rate=many: 'many' is not a multiple of a rate; write a number such as 2 or 0.5"),
        ("rate=-1", "rate=-1: '-1' is not a multiple of a rate"),
        ("rate=inf", "rate=inf: 'inf' is not a multiple of a rate"),
        ("devices=some", "devices=some: 'some' is not a number of devices; write 3, or -1 and +2 for fewer and more"),
        ("kind=t4", "--what-if kind=t4: write kind=OLD:NEW, such as kind=v100:t4"),
        ("slo=a:50", "--what-if slo=a:50: '50' has no unit of time"),
        ("slo=z:50ms", "slo=z:50ms: no model 'z'; available: a, b"),
        ("rate=z:2", "rate=z:2: no model 'z'; available: a, b"),
    ],
)
def test_what_if_invalid_change_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        asked(text)
    assert str(error.value).startswith(message)


def test_what_if_unknown_planner_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"^unknown planner 'best'; available: "):
        asked("planner=best")


@pytest.mark.slow
def test_run_scenario_without_a_plan_plans_and_simulates() -> None:
    given = run_scenario(ScenarioTask(label="now", question=QUESTION, plan=PLAN, seconds=5.0, seed=0))
    assert given.plan == PLAN
    assert given.kinds == {"cpu": 1}
    assert not given.broken
    assert 0.1 < given.utilisation < 1
    more = run_scenario(ScenarioTask(label="more", question=asked("rate=20"), seconds=2.0, seed=0))
    assert more.plan.planner == "geometry"
    assert {row.model for row in more.broken} >= {"a"}  # one device, and requests that find no place on it
    assert more.broken[0].attainment == min(row.attainment or 0.0 for row in more.broken)


def test_planned_rates_of_objective_rate_are_scaled() -> None:
    assert planned_rates(PROBLEM, PLAN) == PROBLEM.rates
    rate = msgspec.structs.replace(PROBLEM, objective="rate")
    assert planned_rates(rate, msgspec.structs.replace(PLAN, scale=2.0)) == {"a": 600.0, "b": 400.0}
    assert planned_rates(rate, msgspec.structs.replace(PLAN, scale=0.0)) == {"a": 300.0, "b": 200.0}
