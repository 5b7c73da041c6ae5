"""Forecast applications end to end: every request of every stage must finish in time for the stages after it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from cotenant.core.identity import LaneId
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.applications import without_applications
from cotenant.planners.forecast.models import forecast_models, profile_of
from cotenant.planners.forecast.results import Forecast, ModelForecast

MIN_STAGE_BUDGET = 0.05  # as a fraction of the application's target


def forecast_applications(model_forecasts: Forecast, plan: Plan, problem: Problem) -> dict[str, ModelForecast]:
    """Forecast each application with a rate, by name, from the forecasts of its models.

    Approximations: requests of a stage meet their time limits independently. A stage starts when those before it have
    taken their p99, or their budget if that is less, so unused budget passes on. Of the requests that a stage sends
    together, the middle one stands for all. A quantile of latency is the longest path with each stage at that quantile.
    """
    scale = (plan.scale or 1.0) if problem.objective == "rate" else 1.0
    delay = _group_delays(plan, problem, model_forecasts.utilisation)
    model_problem = without_applications(problem, plan.split)
    time_limits = {model.name: math.inf for model in model_problem.models}
    applications = [application for application in problem.applications if problem.rates.get(application.name)]
    for application in applications:
        split = plan.split[application.name]
        later_seconds = application.remainder(split)
        stage_seconds = {
            stage.name: min(model_forecasts.models[stage.model].p99 + delay[stage.model], split[stage.name])
            for stage in application.stages
        }
        finish_times = application.finish_times(stage_seconds)
        for stage in application.stages:
            start = finish_times[stage.name] - stage_seconds[stage.name]
            time_limit = application.slo - later_seconds[stage.name] - start - delay[stage.model] / 2
            time_limits[stage.model] = min(
                time_limits[stage.model], max(time_limit, MIN_STAGE_BUDGET * application.slo)
            )
    models = tuple(
        msgspec.structs.replace(model, slo=time_limits[model.name]) if time_limits[model.name] < math.inf else model
        for model in model_problem.models
    )
    limited = forecast_models(plan, msgspec.structs.replace(model_problem, models=models)).models
    of_model, forecasts = model_forecasts.models, {}
    for application in applications:
        attainment = application.success({name: limited[name].attainment for name in application.models()})
        stages = {stage.name: stage.model for stage in application.stages}
        forecasts[application.name] = ModelForecast(
            rate=problem.rates[application.name] * scale * attainment,
            attainment=attainment,
            p50=application.length({stage: of_model[model].p50 + delay[model] for stage, model in stages.items()}),
            p99=application.length({stage: of_model[model].p99 + delay[model] for stage, model in stages.items()}),
        )
    return forecasts


def _group_delays(plan: Plan, problem: Problem, utilisation: Mapping[str, float]) -> dict[str, float]:
    """Return for each model how much later, in seconds, the last of a group of requests finishes than a single one.

    The first of the group runs immediately; the rest wait for it and for other models of the partition.
    """
    delay = dict.fromkeys((model.name for model in problem.models), 0.0)
    applications = [application for application in problem.applications if problem.rates.get(application.name)]
    for device in plan.devices:
        for slot, partition in enumerate(device.partitions):
            busy = utilisation[LaneId(device.id, slot)]
            for placement in partition.placements:
                name, rows_per_round = placement.model, placement.batch * placement.procs
                others_in_group = (
                    math.ceil(max((application.burst(name) for application in applications), default=0.0)) - 1
                )
                if others_in_group > 0:
                    profile = profile_of(problem, device, partition, placement)
                    rows = min(others_in_group, placement.batch)
                    full_batch_seconds = profile.latency(placement.batch, partition.share, placement.procs)
                    batch_seconds = (
                        profile.latency(rows, partition.share, placement.procs) * placement.latency / full_batch_seconds
                    )
                    colocated_seconds = busy * (placement.duty - placement.latency)
                    delay[name] = max(
                        delay[name], math.ceil(others_in_group / rows_per_round) * (batch_seconds + colocated_seconds)
                    )
    return delay
