"""Reduce a problem with applications to one of models, the only one that planners solve.

Each stage gets a budget of its application's target (a *split*), each model the tightest budget of its stages and the
sum of their rates. The split is chosen in `slo_budget.py`.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.core.application import Application
from cotenant.core.model import Model
from cotenant.core.plan import Plan
from cotenant.errors import PlanError
from cotenant.planners import Problem

# Application → stage → seconds of its target; at most the target along every path.
Split = dict[str, dict[str, float]]

SLO_TOLERANCE = 1e-6  # relative tolerance of the sum of budgets along a path


def without_applications(problem: Problem, split: Split) -> Problem:
    """Return the problem of models alone, for planners and the papers' tests.

    A model gets the tightest budget of its stages. Its attainment objective is the n-th root of the application's, with
    n requests of models for one of the application, as if they missed independently. A model without requests keeps its
    target and a rate of 0.
    """
    if not problem.applications:
        return problem
    models = {model.name: model for model in problem.models}
    # A model without any rate, not even 0, has no SLO of its own.
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
    """Return the requests/s of each model, from outside and from applications."""
    if not problem.applications:
        return problem.rates
    return {
        model.name: problem.rates.get(model.name, 0.0)
        + sum(problem.rates.get(each.name, 0.0) * each.uses(model.name) for each in problem.applications)
        for model in problem.models
    }


def budgets_of(application: Application, split: Split) -> dict[str, float]:
    """Return the budget of each stage in seconds. Raises PlanError where the split has none, or other stages."""
    budgets = split.get(application.name, {})
    if budgets.keys() != {stage.name for stage in application.stages}:
        raise PlanError(
            f"the plan does not say how the target of application {application.name!r} is split over its stages"
            f" {', '.join(stage.name for stage in application.stages)}; plan again"
        )
    return budgets


def slo_of(problem: Problem, name: str) -> Model | Application:
    """Return the model or application of that name, which has the SLO. Raises PlanError for an unknown name."""
    found = next((application for application in problem.applications if application.name == name), None)
    return problem.model(name) if found is None else found


def overlong_paths(plan: Plan, problem: Problem) -> list[tuple[str, float, float]]:
    """Return applications whose budgets exceed the target on some path: name, the longest path (0: the plan has no
    budgets for it) and the target, in seconds."""
    overlong = []
    for application in problem.applications:
        seconds = plan.split.get(application.name, {})
        whole = seconds.keys() == application.visits.keys() and min(seconds.values()) > 0
        length = application.length(seconds) if whole else 0.0
        if not 0 < length <= application.slo * (1 + SLO_TOLERANCE):
            overlong.append((application.name, length, application.slo))
    return overlong


def carried_rates(plan: Plan, problem: Problem) -> dict[str, float]:
    """Return the requests/s from outside that the plan serves, by model and application.

    A model's unserved rate is shared by all its uses in proportion; an application is served like its least served
    model, and not at all without a split.
    """
    placed = plan.rates()
    part = {name: placed.get(name, 0.0) / rate if rate else 1.0 for name, rate in rates_of_models(problem).items()}
    part |= {
        application.name: min(part[each] for each in application.models()) if application.name in plan.split else 0.0
        for application in problem.applications
    }
    return {name: rate * part[name] for name, rate in problem.rates.items()}
