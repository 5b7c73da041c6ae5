from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cotenant.control.adaptation import Solve, SolveStep
from cotenant.core.application import Application, Stage
from cotenant.live.deployment import NOT_LOADED, with_models_of, without_model
from cotenant.planning.replan import Replanner
from tests.live.deployment import repository, sample_deployment


def test_model_that_became_unusable_is_broken_alone(tmp_path: Path) -> None:
    before = sample_deployment(repository(tmp_path))
    offered = {"identity": before.offered["identity"]}
    loaded = msgspec.structs.replace(before, offered=offered, broken={"lookup": "no model any more"})
    merged = with_models_of(before, loaded)
    assert merged.offered.keys() == {"identity"}
    assert merged.broken == {"lookup": "no model any more", "broken": "not a model"}
    with pytest.raises(AssertionError, match="both offered and broken: lookup"):
        msgspec.structs.replace(before, broken=loaded.broken)


def test_model_that_became_usable_is_offered_alone(tmp_path: Path) -> None:
    before = sample_deployment(repository(tmp_path))
    broken = msgspec.structs.replace(before, offered={"identity": before.offered["identity"]}, broken={"lookup": "?"})
    merged = with_models_of(broken, before)
    assert list(merged.offered) == ["identity", "lookup"]
    assert merged.broken == {"broken": "not a model"}


def test_model_that_is_broken_keeps_its_reason_when_another_is_loaded(tmp_path: Path) -> None:
    before = sample_deployment(repository(tmp_path))
    loaded = msgspec.structs.replace(before, broken=dict.fromkeys(("broken", "new"), NOT_LOADED))
    assert with_models_of(before, loaded).broken == {"broken": "not a model", "new": NOT_LOADED}


def test_unloaded_model_stays_out_of_plans_that_are_made_later(tmp_path: Path) -> None:
    before = sample_deployment(repository(tmp_path))
    unloaded = without_model(before, "lookup")
    assert before.plan.rate("lookup") and not unloaded.plan.rate("lookup")
    solve = Solve(
        number=1,
        rates={"identity": 5.0, "lookup": 5.0},
        current=unloaded.plan,
        devices=tuple(device.id for device in before.plan.devices),
        step=SolveStep.REPLAN,
    )
    anew = Replanner(unloaded.problem)(solve)
    assert anew.plan is not None, anew.error
    assert anew.plan.rate("identity") >= 5.0 and not anew.plan.rate("lookup")


def test_unloaded_stage_takes_its_application_out_of_the_problem(tmp_path: Path) -> None:
    before = sample_deployment(repository(tmp_path))
    both = Application(
        name="both", slo=1.0, stages=(Stage(name="1", model="identity"), Stage(name="2", model="lookup", after=("1",)))
    )
    problem = msgspec.structs.replace(before.problem, applications=(both,), rates={**before.problem.rates, "both": 1.0})
    unloaded = without_model(msgspec.structs.replace(before, problem=problem), "lookup").problem
    assert unloaded.applications == () and unloaded.rates.keys() == {"identity"}
