"""Describe what a server serves: the models of a repository, and the plan that says where they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import msgspec

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Plan
from cotenant.core.profile import Profile, Profiles
from cotenant.core.tensor import ModelInfo
from cotenant.planners import Problem
from cotenant.predictors.samples import Sample
from cotenant.runtime.applications import application_specs
from cotenant.runtime.events import ApplicationSpec, LaneSpec
from cotenant.worker.ensemble import Ensemble
from cotenant.worker.repository import Config, Entry, worker_model
from cotenant.worker.wire import WorkerModel

NOT_LOADED = "not loaded"  # why a model of the repository is not served that nobody asked for


class RequestPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Say what requests get that do not say it themselves, by a model's configuration.

    timeout: seconds; None for the model's target. levels: of priorities; 0 for any number. level: for a request without
    a priority, or above the levels; both count from 1.
    """

    timeout: float | None = None
    levels: int = 0
    level: int = 1

    def priority(self, wanted: int) -> int:
        """Return the priority of a request, from 0 for the most urgent. wanted: as it says; below 0 if it does not."""
        if wanted < 0 or 0 < self.levels <= wanted:
            return self.level - 1
        return wanted


def request_policy(config: Config) -> RequestPolicy | None:
    """Return what a configuration says of requests, None where that is nothing."""
    batching = config.dynamic_batching
    if batching is None:
        return None
    timeout = batching.default_queue_policy.default_timeout_microseconds / 1e6
    level = max(batching.default_priority_level, 1)
    policy = RequestPolicy(timeout=timeout or None, levels=batching.priority_levels, level=level)
    return None if policy == RequestPolicy() else policy


class ServableModel(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a model of the repository that can be served, or an ensemble of models. policy: None: requests have the
    model's target, and are most urgent, where they do not say otherwise."""

    entry: Entry
    info: ModelInfo
    model: Model
    ensemble: Ensemble | None = None
    policy: RequestPolicy | None = None

    @property
    def caches(self) -> bool:
        """Whether its configuration asks for a response cache. Answers of an ensemble are not kept: its files do not
        tell when a model of its steps has changed."""
        return self.ensemble is None and self.entry.config.response_cache.enable


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Combine the models of a repository, a plan, and the problem that it solves. Ensembles are applications if the
    plan splits their targets.

    broken: models of the repository that cannot be served, with the reason; none of them is offered. slowdowns: how
    many times as long as profiled batches take, as the plan has them; 1 for a model that is missing. configs: of
    requests to load a model, which stand for those of the repository until the model is loaded again without one.
    available: the kinds of devices that it was made for, before settings limit them.
    """

    offered: dict[str, ServableModel]
    problem: Problem
    plan: Plan
    broken: dict[str, str] = {}
    slowdowns: dict[str, float] = {}
    configs: dict[str, Config] = {}
    available: tuple[Kind, ...] = ()

    def __post_init__(self) -> None:
        both = self.offered.keys() & self.broken.keys()
        assert not both, f"models both offered and broken: {', '.join(sorted(both))}"


def nothing_yet() -> Deployment:
    """Return the deployment of a server that starts: it offers nothing."""
    return Deployment(offered={}, problem=Problem(models=(), rates={}, fleet=(), profiles={}), plan=Plan(planner=""))


class KeptModels(msgspec.Struct, frozen=True):
    """Hold models that stay as they are served, whatever has become of their files, with their profiles, and what is
    known of the load of these and others: rates (requests/s) and slowdowns that the plan in force counts with."""

    models: dict[str, ServableModel] = {}
    profiles: Profiles = {}
    rates: dict[str, float] = {}
    slowdowns: dict[str, float] = {}

    @property
    def slowdown_of_all(self) -> float:
        """The least slowdown of any of them: what slows all models, as other programs do, slows others, too."""
        return min((self.slowdowns.get(name, 1.0) for name in self.models), default=1.0)


# Prepares a deployment from the names of the models to serve, the observed interference samples, configurations in
# place of those of the repository, and what stays as it is: profiles models without a profile, and plans.
Prepare = Callable[[Collection[str], Sequence[Sample], Mapping[str, Config], KeptModels], Awaitable[Deployment]]


def placed_models(deployment: Deployment) -> set[str]:
    """Return the models that have a place in the plan."""
    return {*deployment.plan.rates(), *deployment.plan.split}


def loaded_models(deployment: Deployment, name: str = "") -> set[str]:
    """Return the models that are served, with those that have no place just now; of all that are once a model of this
    name is loaded, if one is given. An ensemble is none of them while a model of its steps is unloaded."""
    known = placed_models(deployment) | (deployment.problem.rates.keys() & deployment.offered.keys())
    if name:
        known |= {name} | _step_models(deployment, name)
    return {each for each in known if _step_models(deployment, each) <= known}


def is_loaded(deployment: Deployment, name: str) -> bool:
    """Return whether a model is served, or would be if there were a place for it."""
    return name in deployment.problem.rates or name in loaded_models(deployment)  # the first takes no time, and will do


def _step_models(deployment: Deployment, name: str) -> frozenset[str]:
    """Return the models of an ensemble; none of a plain model."""
    offered = deployment.offered.get(name)
    return frozenset() if offered is None or offered.ensemble is None else frozenset(offered.ensemble.models)


def kept_models(deployment: Deployment, names: Collection[str]) -> KeptModels:
    """Return models of a deployment as they are served."""
    problem = deployment.problem
    rates = {name: rate for name, rate in problem.rates.items() if name in names and name not in problem.assumed}
    slowdowns = {name: slowdown for name, slowdown in deployment.slowdowns.items() if name in names}
    profiles = {key: profile for key, profile in deployment.problem.profiles.items() if key[0] in names}
    return KeptModels({name: deployment.offered[name] for name in names}, profiles, rates, slowdowns)


def with_models_of(before: Deployment, deployment: Deployment) -> Deployment:
    """Return a deployment of some models with the others as they were before: those that it says nothing of, or only
    that they are not loaded. An ensemble that waits for a model which was unloaded still does."""
    offered = {
        name: known for name, known in before.offered.items() if deployment.broken.get(name, NOT_LOADED) == NOT_LOADED
    } | deployment.offered
    told = {name: why for name, why in deployment.broken.items() if why != NOT_LOADED or name not in before.broken}
    broken = {name: why for name, why in (before.broken | told).items() if name not in offered}
    waiting = {
        name: parts
        for name, parts in before.plan.split.items()
        if name in offered and name not in deployment.problem.rates
    }
    plan = msgspec.structs.replace(deployment.plan, split=waiting | deployment.plan.split)
    return msgspec.structs.replace(deployment, offered=offered, broken=broken, plan=plan)


def with_profile(deployment: Deployment, profile: Profile) -> Deployment:
    """Return a deployment with another profile of a model that its problem has."""
    key, problem = (profile.model, profile.kind), deployment.problem
    if key not in problem.profiles:
        return deployment
    changed = msgspec.structs.replace(problem, profiles={**problem.profiles, key: profile})
    return msgspec.structs.replace(deployment, problem=changed)


def without_model(deployment: Deployment, name: str) -> Deployment:
    """Return the deployment without a model in its plan and problem, and unchanged for all others."""
    devices = []
    for device in deployment.plan.devices:
        partitions = [
            Partition(share=partition.share, placements=kept)
            for partition in device.partitions
            if (kept := tuple(placement for placement in partition.placements if placement.model != name))
        ]
        if partitions:
            devices.append(Device(id=device.id, partitions=tuple(partitions)))
    split = {whole: parts for whole, parts in deployment.plan.split.items() if whole != name}
    plan = msgspec.structs.replace(deployment.plan, devices=tuple(devices), split=split)
    return msgspec.structs.replace(deployment, plan=plan, problem=_without(deployment.problem, name))


def dependents(deployment: Deployment, name: str) -> list[str]:
    """Return the models of an ensemble that no other ensemble which is served needs; none of a plain model."""

    others = [_step_models(deployment, other) for other in deployment.plan.split if other != name]
    return sorted(_step_models(deployment, name).difference(*others))


def _without(problem: Problem, name: str) -> Problem:
    """Return the problem without a model and the applications that need it: a plan made later must not serve it."""
    applications = tuple(
        application
        for application in problem.applications
        if application.name != name and all(stage.model != name for stage in application.stages)
    )
    models = tuple(model for model in problem.models if model.name != name)
    known = {model.name for model in models} | {application.name for application in applications}
    rates = {each: rate for each, rate in problem.rates.items() if each in known}
    return msgspec.structs.replace(problem, models=models, applications=applications, rates=rates)


def applications_of(deployment: Deployment) -> tuple[ApplicationSpec, ...]:
    """Return the ensembles that are served; their stages are numbered like their steps."""
    served = [
        offered.ensemble.application(offered.model.slo)
        for name, offered in deployment.offered.items()
        if offered.ensemble is not None and name in deployment.plan.split
    ]
    return application_specs(served, deployment.plan.split)


def worker_models(deployment: Deployment, lane: LaneSpec) -> list[WorkerModel]:
    """Return the models for the worker of a lane to load, with the planned batches and latencies."""
    return [
        msgspec.structs.replace(
            worker_model(deployment.offered[held.model].entry, deployment.offered[held.model].info),
            max_batch=len(held.latencies),
            latencies=held.latencies,
        )
        for held in lane.models
    ]


def serves(deployment: Deployment, name: str) -> bool:
    """Return whether the plan places a model, or all models of an ensemble."""
    offered = deployment.offered.get(name)
    models = {name} if offered is None or offered.ensemble is None else offered.ensemble.models
    return all(deployment.plan.rate(model) for model in models)
