"""Applications from end to end: all requests of all stages must end early enough for what comes after them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.applications import without_applications
from cotenant.planners.forecast.answer import Forecast, ModelForecast
from cotenant.planners.forecast.models import forecast_models, profile_of

MIN_STAGE_BUDGET = 0.05  # of the application's target


def forecast_applications(found: Forecast, plan: Plan, problem: Problem) -> dict[str, ModelForecast]:
    """By name. Each request of a stage is taken to keep its time independently of the others. A stage begins when those
    before it end, taken to be as slow as one in a hundred, or as they may be; so what they leave of their time is
    counted. Of requests that are made together the one in the middle stands for all. Of latencies the longest way
    through the stages is told, where all are as slow as that."""
    scale = plan.scale if problem.objective == "rate" else 1.0
    late = _behind(plan, problem, found.utilisation)
    asked = without_applications(problem, plan.split)
    rooms = {model.name: math.inf for model in asked.models}
    applications = [it for it in problem.applications if problem.rates.get(it.name)]
    for application in applications:
        split = plan.split[application.name]
        rest = application.remainder(split)
        took = {it.name: min(found.models[it.model].p99 + late[it.model], split[it.name]) for it in application.stages}
        ends = application.finish_times(took)
        for stage in application.stages:
            room = application.slo - rest[stage.name] - (ends[stage.name] - took[stage.name]) - late[stage.model] / 2
            rooms[stage.model] = min(rooms[stage.model], max(room, MIN_STAGE_BUDGET * application.slo))
    models = tuple(
        msgspec.structs.replace(model, slo=rooms[model.name]) if rooms[model.name] < math.inf else model
        for model in asked.models
    )
    last = forecast_models(plan, msgspec.structs.replace(asked, models=models)).models
    wholes = {}
    for application in applications:
        attainment = application.success({name: last[name].attainment for name in application.models()})
        stages = {stage.name: stage.model for stage in application.stages}
        wholes[application.name] = ModelForecast(
            rate=problem.rates[application.name] * scale * attainment,
            attainment=attainment,
            p50=application.length({stage: found.models[model].p50 + late[model] for stage, model in stages.items()}),
            p99=application.length({stage: found.models[model].p99 + late[model] for stage, model in stages.items()}),
        )
    return wholes


def _behind(plan: Plan, problem: Problem, utilisation: Mapping[str, float]) -> dict[str, float]:
    """How much longer than one that comes alone the last of requests takes that are made together, in seconds: the
    first runs at once, and the rest wait for it, and for others that are at work on the same partition."""
    late = dict.fromkeys((model.name for model in problem.models), 0.0)
    applications = [it for it in problem.applications if problem.rates.get(it.name)]
    for device in plan.devices:
        for slot, partition in enumerate(device.partitions):
            busy = utilisation[f"{device.name}/{slot}"]
            for placement in partition.placements:
                name, most = placement.model, placement.batch * placement.procs
                behind = math.ceil(max((it.burst(name) for it in applications), default=0.0)) - 1
                if behind > 0:
                    profile = profile_of(problem, device, partition, placement)
                    rows = min(behind, placement.batch)
                    alone = profile.latency(placement.batch, partition.share, placement.procs)
                    takes = profile.latency(rows, partition.share, placement.procs) * placement.latency / alone
                    others = busy * (placement.duty - placement.latency)
                    late[name] = max(late[name], math.ceil(behind / most) * (takes + others))
    return late
