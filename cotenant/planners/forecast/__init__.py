"""Forecast SLO attainment and latency of a plan under Poisson arrivals.

A partition that runs what waits, up to its largest batch, is a bulk-service queue: a Markov chain embedded where a
model's turn comes (bulk_queue.py), in which the other models of the partition are a mean field (mean_field.py). Where
several lanes hold a model, requests go to the one that finishes first, and callers see the mixture (models.py,
results.py). An application needs all its stages (applications.py). Best-effort jobs slow the batches beside them, and
get what partitions leave idle (jobs.py).

Plans are compared by the hundred, so the chains of a whole plan are one vectorised computation (lanes.py), kept small:
a distribution of counts is a dozen nodes (poisson_quadrature.py), and of long queues not every length is a state. Both
preserve means; what falls between two states is split between them.
"""

from __future__ import annotations

import msgspec

from cotenant.core.cpu_shares import check_lending
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.applications import without_applications
from cotenant.planners.forecast.applications import forecast_applications
from cotenant.planners.forecast.jobs import JobForecast, forecast_jobs
from cotenant.planners.forecast.lending import lent_slowdowns
from cotenant.planners.forecast.models import forecast_models
from cotenant.planners.forecast.results import Forecast, ModelForecast
from cotenant.planners.job_interference import slowdowns_by_jobs

__all__ = ["Forecast", "JobForecast", "ModelForecast", "attains", "forecast", "forecast_jobs"]


def forecast(plan: Plan, problem: Problem, *, lend: bool = False) -> Forecast:
    """Forecast a plan at the rates of the problem; with objective "rate", at the multiple that the plan serves, or at
    the rates themselves where it serves no multiple of all of them.

    Beside best-effort jobs batches take as much longer as is predicted for what jobs get on average.
    lend: with what lending idle share of processors gives on average (`lending`); a plan counts on its shares alone.
    Raises PlanError for a placement that was not profiled, and ConfigError for lending where no device has processors.
    """
    models_only = without_applications(problem, plan.split)
    model_forecasts = forecast_models(plan, models_only)
    by_jobs = slowdowns_by_jobs(plan, models_only, model_forecasts.utilisation)
    if by_jobs:
        model_forecasts = forecast_models(plan, models_only, by_jobs)
    if lend:
        check_lending(problem.fleet)
        lent = lent_slowdowns(plan, models_only, model_forecasts.utilisation)
        factors = {key: factor * by_jobs.get(key, 1.0) for key, factor in lent.items()}
        model_forecasts = forecast_models(plan, models_only, by_jobs | factors)
    if not problem.applications:
        return model_forecasts
    return msgspec.structs.replace(model_forecasts, applications=forecast_applications(model_forecasts, plan, problem))


def attains(plan: Plan, problem: Problem) -> bool:
    """Return whether every model with a rate is predicted to reach its SLO attainment."""
    problem = without_applications(problem, plan.split)
    forecasts = forecast_models(plan, problem).models
    return all(forecasts[name].attainment >= problem.model(name).attainment for name in forecasts)
