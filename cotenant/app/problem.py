"""Derive the problem that a server's planner solves: targets and rates of its models, from settings and profiles."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from cotenant.config import ModelSettings, Settings
from cotenant.core.identity import own_kind
from cotenant.core.model import Kind, Model
from cotenant.core.profile import Profile, Profiles
from cotenant.core.tensor import ModelInfo
from cotenant.errors import ConfigError, ModelError
from cotenant.live.deployment import ServableModel
from cotenant.planners import Problem
from cotenant.planners.applications import rates_of_models
from cotenant.planners.front_end import NOISE, REQUEST_LATENCY, FrontEnd
from cotenant.predictors.fitting import with_observations
from cotenant.predictors.samples import Sample
from cotenant.worker.ensemble import Ensemble
from cotenant.worker.repository import Entry, worker_model

# A model without a target gets twice the latency of a batch of DEFAULT_ROWS (or the largest profiled one) on
# DEFAULT_SHARE ‰ of a device, and at least MIN_DEFAULT_SLO seconds: below that, the noise of a busy machine would
# dominate. The papers' rule takes 32 rows on a whole device, which is long where that is a CPU.
DEFAULT_ROWS = 8
DEFAULT_SHARE = 500
MIN_DEFAULT_SLO = 0.05

# A model whose rate nobody knows is planned for ASSUMED_RATE requests/s, or for less where all of these together would
# keep the devices busy for more than MAX_ASSUMED_WORK of their time.
ASSUMED_RATE = 1.0
MAX_ASSUMED_WORK = 0.5


def model_of(
    settings: ModelSettings, entry: Entry, info: ModelInfo, profiles: Sequence[Profile], max_queue_delay: float
) -> Model:
    """Return a model as planners know it. max_queue_delay: seconds, where neither the model's settings nor its
    configuration give one. Raises ModelError where no default target can be derived from its profiles."""
    limit = info.max_batch_size or 1
    batching = entry.config.dynamic_batching
    if batching and batching.max_queue_delay_microseconds:
        max_queue_delay = batching.max_queue_delay_microseconds / 1e6
    return Model(
        name=entry.name,
        slo=_default_slo(entry.name, profiles) if settings.slo is None else settings.slo,
        attainment=settings.attainment,
        max_batch=min(limit, settings.max_batch or limit),
        max_queue_delay=max_queue_delay if settings.max_queue_delay is None else settings.max_queue_delay,
        priority=settings.priority,
    )


def ensemble_model(settings: ModelSettings, ensemble: Ensemble, served: Mapping[str, ServableModel]) -> Model:
    """Return an ensemble as a model with a target. Its default is the sum of its models' targets along the longest path
    of its steps. Raises ConfigError for settings that only models have."""
    for key in ("max_batch", "max_queue_delay"):
        if getattr(settings, key) is not None:
            raise ConfigError(
                f"model {settings.name!r} is an ensemble and has no {key}; give it to the models of its steps"
            )
    seconds = {step.name: served[step.model].model.slo for step in ensemble.steps}
    slo = ensemble.application(1.0).length(seconds) if settings.slo is None else settings.slo
    return Model(name=ensemble.info.name, slo=slo, attainment=settings.attainment, priority=settings.priority)


def build_problem(
    settings: Settings,
    fleet: Collection[Kind],
    served: Mapping[str, ServableModel],
    profiles: Profiles,
    samples: Sequence[Sample],
    request_seconds: float,
) -> Problem:
    """Return the problem of serving these models. samples: of interference, as observed while serving. request_seconds:
    of a processor, that a request takes of the front end.

    A model without a rate is planned for the same small one as any other of them; one that only ensembles use, for the
    rate of their requests for it, with the longest of their targets.
    """
    given = {model.name: model for model in settings.models}
    applications = [
        servable.ensemble.application(servable.model.slo, servable.model.attainment, servable.model.priority)
        for servable in served.values()
        if servable.ensemble is not None
    ]
    stages = {name for application in applications for name in application.models()}
    rates = {name: given[name].rate if name in given else None for name in served}
    rates |= {name: 0.0 for name in stages if rates[name] is None}
    models = []
    for name, servable in served.items():
        model = servable.model
        if name in stages and (name not in given or given[name].slo is None):
            longest = max(application.slo for application in applications if name in application.models())
            model = msgspec.structs.replace(model, slo=max(model.slo, longest))
        if servable.ensemble is None:
            models.append(model)
    known = {name: rate for name, rate in rates.items() if rate is not None}
    problem = Problem(
        models=tuple(models),
        rates={name: known.get(name, ASSUMED_RATE) for name in rates},
        fleet=tuple(fleet),
        profiles=_as_served(profiles, fleet, served),
        objective=settings.objective or "devices",
        interference=with_observations(settings.interference.predictor(profiles), samples),
        applications=tuple(applications),
        front_end=_front_end(settings, fleet, request_seconds),
    )
    if problem.objective == "rate" or len(known) == len(rates):
        return problem
    assumed = frozenset(rates.keys() - known.keys())
    most = MAX_ASSUMED_WORK / max(work_of(problem, {name: problem.rates[name] for name in assumed}), MAX_ASSUMED_WORK)
    lowered = {name: rate * most if name in assumed else rate for name, rate in problem.rates.items()}
    return msgspec.structs.replace(problem, rates=lowered, assumed=assumed)


def _as_served(profiles: Profiles, fleet: Collection[Kind], served: Mapping[str, ServableModel]) -> Profiles:
    """Return profiles with the padding of batches: a GPU runs a batch in the next size that it has captured."""
    gpus = {kind.name for kind in fleet if not kind.processors}
    sizes = {
        name: worker_model(servable.entry, servable.info).captured_sizes()
        for name, servable in served.items()
        if gpus and servable.ensemble is None
    }
    return {
        (name, kind): profile.padded_to(sizes[name]) if kind in gpus and sizes.get(name) else profile
        for (name, kind), profile in profiles.items()
    }


def work_of(problem: Problem, rates: Mapping[str, float]) -> float:
    """Return the part of the devices' time that requests take, one row at a time on the kind that is fastest for it.
    rates: requests/s by model or application."""
    devices = sum(1 if kind.count is None else kind.count for kind in problem.fleet)
    visits = rates_of_models(msgspec.structs.replace(problem, rates=dict(rates)))
    seconds = {
        name: min(
            (
                profile.latency(1, max(profile.shares))
                for (model, _), profile in problem.profiles.items()
                if model == name
            ),
            default=0.0,
        )
        for name in visits
    }
    return sum(rate * seconds[name] for name, rate in visits.items()) / max(devices, 1)


def _front_end(settings: Settings, fleet: Collection[Kind], seconds: float) -> FrontEnd:
    """Return what serving costs beside batches: the reserve is kept for the front end, and what it takes beyond that
    the models lack. On processors nobody is alone: the server runs there, too, and on those of a node its agent."""
    processors = sum(kind.processors for kind in fleet if kind.name == own_kind(kind.name))
    reserved = processors * settings.reserve / (1 - settings.reserve)
    noise = NOISE if any(kind.processors for kind in fleet) else 1.0
    return FrontEnd(seconds=seconds, latency=REQUEST_LATENCY, noise=noise, reserved=reserved, processors=processors)


def _default_slo(name: str, profiles: Sequence[Profile]) -> float:
    latencies = [latency for profile in profiles if (latency := _typical_latency(profile)) is not None]
    if not latencies:
        raise ModelError(f"model {name!r} takes too long for half a device; give it a target with `slo`")
    return max(MIN_DEFAULT_SLO, 2 * max(latencies))


def _typical_latency(profile: Profile) -> float | None:
    """Return the seconds of a default batch on half a device, or on the largest part that it can be cut into."""
    share = min(DEFAULT_SHARE, max((point.share for point in profile.points), default=DEFAULT_SHARE))
    latencies = [latency for latency in profile.curve(share)[:DEFAULT_ROWS] if latency < math.inf]
    return latencies[-1] if latencies else None
