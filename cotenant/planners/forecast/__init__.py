"""The referee, second half: what a plan will do under Poisson arrivals.

A partition that runs what waits, up to its largest batch, is a queue with bulk service, and a Markov chain when looked
at where a model's turn comes (turns.py); what the other models of the partition do in between is a mean field
(others.py). Where several lanes hold a model, requests go where they are done first, and what callers see is the
mixture (models.py, answer.py). An application needs all its stages (applications.py).

Plans are compared by the hundred, so the chains of a whole plan are one computation (lanes.py), and small: a
distribution of counts is a dozen points (counts.py), and of long queues not every length is a state. Both are made so
that means are exact; what lies between two states goes to both.
"""

from __future__ import annotations

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.applications import without_applications
from cotenant.planners.forecast.answer import Forecast, ModelForecast
from cotenant.planners.forecast.applications import forecast_applications
from cotenant.planners.forecast.models import forecast_models

__all__ = ["Forecast", "ModelForecast", "attains", "forecast"]


def forecast(plan: Plan, problem: Problem) -> Forecast:
    """What a plan will do at the rates of the problem; under the objective "rate", at the multiple that it serves.

    Raises PlanError for a placement that was not profiled.
    """
    found = forecast_models(plan, without_applications(problem, plan.split))
    if not problem.applications:
        return found
    return msgspec.structs.replace(found, applications=forecast_applications(found, plan, problem))


def attains(plan: Plan, problem: Problem) -> bool:
    """Whether every model with a rate will meet its promise, target and fraction."""
    problem = without_applications(problem, plan.split)
    expected = forecast_models(plan, problem).models
    return all(expected[name].attainment >= problem.model(name).attainment for name in expected)
