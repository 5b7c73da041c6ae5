"""What applications mean for a plan. Planners know models alone, so a problem with applications becomes one without:
each stage gets a part of its application's target (a *split*), each model the tightest of the targets of its uses and
the sum of their rates. How to split is for `planners.split` to choose.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.core.application import Application
from cotenant.core.model import Model
from cotenant.core.plan import Plan
from cotenant.errors import PlanError
from cotenant.planners import Problem

# Application → stage → seconds of its target; along every way through the stages at most the target.
Split = dict[str, dict[str, float]]

SLO_TOLERANCE = 1e-6  # relative: by which the budgets along a path may exceed its target


def without_applications(problem: Problem, split: Split) -> Problem:
    """The problem without applications: what planners, and the tests of the papers, speak of.

    A model has the tightest target of its uses. Its requests must succeed often enough that those of which one request
    of the application consists all do, if they fail independently: with n of them, by the n-th root of the promise.
    A model that is asked for in no way keeps its target and a rate of 0.
    """
    if not problem.applications:
        return problem
    models = {model.name: model for model in problem.models}
    # Without a rate, even of 0, nobody from outside was promised anything.
    targets = {model.name: model.slo for model in problem.models if model.name in problem.rates}
    for application in problem.applications:
        budgets = budgets_of(application, split)
        every = application.attainment ** (1 / max(1.0, sum(application.visits.values())))
        for stage in application.stages:
            model = models[stage.model]
            slo = min(targets.get(stage.model, math.inf), budgets[stage.name])
            targets[stage.model] = slo
            models[stage.model] = msgspec.structs.replace(model, slo=slo, attainment=max(model.attainment, every))
    return msgspec.structs.replace(
        problem, models=tuple(models.values()), rates=rates_of_models(problem), applications=()
    )


def rates_of_models(problem: Problem) -> dict[str, float]:
    """Requests/s of each model, however they come about."""
    if not problem.applications:
        return problem.rates
    return {
        model.name: problem.rates.get(model.name, 0.0)
        + sum(problem.rates.get(it.name, 0.0) * it.uses(model.name) for it in problem.applications)
        for model in problem.models
    }


def budgets_of(application: Application, split: Split) -> dict[str, float]:
    """Seconds by stage. Raises PlanError where the split has none, or of other stages."""
    budgets = split.get(application.name, {})
    if budgets.keys() != {stage.name for stage in application.stages}:
        raise PlanError(
            f"the plan does not say how the target of application {application.name!r} is split over its stages"
            f" {', '.join(stage.name for stage in application.stages)}; plan again"
        )
    return budgets


def slo_of(problem: Problem, name: str) -> Model | Application:
    """Whatever has that name, a target, and the fraction that must meet it. Raises PlanError where nothing has."""
    found = next((application for application in problem.applications if application.name == name), None)
    return problem.model(name) if found is None else found


def overlong_paths(plan: Plan, problem: Problem) -> list[tuple[str, float, float]]:
    """Applications whose target the plan does not split: name, the longest way through the stages (0: it says nothing
    of them), and the target, in seconds."""
    found = []
    for application in problem.applications:
        seconds = plan.split.get(application.name, {})
        whole = seconds.keys() == application.visits.keys() and min(seconds.values()) > 0
        length = application.length(seconds) if whole else 0.0
        if not 0 < length <= application.slo * (1 + SLO_TOLERANCE):
            found.append((application.name, length, application.slo))
    return found


def carried_rates(plan: Plan, problem: Problem) -> dict[str, float]:
    """Requests/s that the plan serves of each model and application, of those that come from outside.

    What a model lacks is missing in all its uses alike, and an application has what the model has that lacks most;
    nothing without a split.
    """
    placed = plan.rates()
    part = {name: placed.get(name, 0.0) / rate if rate else 1.0 for name, rate in rates_of_models(problem).items()}
    part |= {
        application.name: min(part[it] for it in application.models()) if application.name in plan.split else 0.0
        for application in problem.applications
    }
    return {name: rate * part[name] for name, rate in problem.rates.items()}
