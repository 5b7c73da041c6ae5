"""What a server serves: the models that a repository offers, and the plan that says where they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec

from cotenant.core.model import Model
from cotenant.core.plan import Plan
from cotenant.core.tensor import ModelInfo
from cotenant.core.units import show_share
from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.predictors.samples import Sample
from cotenant.runtime.applications import application_specs
from cotenant.runtime.events import ApplicationSpec
from cotenant.worker.ensemble import Ensemble
from cotenant.worker.repository import Entry


class ServableModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the repository that can be served, or an ensemble of models."""

    entry: Entry
    info: ModelInfo
    model: Model
    ensemble: Ensemble | None = None


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What a server serves: the models of a repository, a plan, and the problem that it solves. Ensembles are its
    applications, as long as the plan splits their targets.

    broken: models of the repository that cannot be served, with the reason.
    """

    offered: dict[str, ServableModel]
    problem: Problem
    plan: Plan
    broken: dict[str, str] = {}


# From the names of the models to serve to a site: profiles what was not profiled yet, and plans. It is also told what
# neighbours were seen to cost.
Prepare = Callable[[Collection[str], Sequence[Sample]], Awaitable[Deployment]]


def with_planned_batches(site: Deployment) -> Deployment:
    """The site, with models that take as many rows as the largest batch that the plan has for them. Raises PlanError
    for a plan of several workers on a partition: how they would share it is known to no backend yet."""
    batches: dict[str, int] = {}
    for device, partition, placement in site.plan.placements():
        if placement.procs > 1:
            raise PlanError(
                f"the plan has {placement.procs} workers of {placement.model!r} on {show_share(partition.share)} of"
                f" {device.name}, and a server runs one; take rows with procs above 1 out of the profiles, plan again"
            )
        batches[placement.model] = max(placement.batch, batches.get(placement.model, 0))
    offered = {}
    for name, given in site.offered.items():
        models = {name} if given.ensemble is None else given.ensemble.models
        rows = min([given.info.max_batch_size, *(batches[model] for model in models if model in batches)])
        offered[name] = msgspec.structs.replace(given, info=msgspec.structs.replace(given.info, max_batch_size=rows))
    return msgspec.structs.replace(site, offered=offered)


def applications_of(site: Deployment) -> tuple[ApplicationSpec, ...]:
    """The ensembles that are served; their stages are numbered like their steps."""
    served = [
        offered.ensemble.application(offered.model.slo)
        for name, offered in site.offered.items()
        if offered.ensemble is not None and name in site.plan.split
    ]
    return application_specs(served, site.plan.split)


def serves(site: Deployment, name: str) -> bool:
    """Whether the plan has room for a model, or for all models of an ensemble."""
    offered = site.offered.get(name)
    models = {name} if offered is None or offered.ensemble is None else offered.ensemble.models
    return all(site.plan.rate(model) for model in models)
