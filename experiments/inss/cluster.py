"""Define the stand-in for InSS' testbed: its models' roles, targets and rates on four V100s.

InSS published no profile. Four models were measured on a V100, and each plays one or more of InSS' eight: the same one
where there is one, else the one nearest in size. Targets are InSS' (section 6.1). Its published program draws rates
from ranges of requests/s; here they are the same multiples of what a model sustains with batches of 1 on a whole GPU,
which that program states for its GPUs. Ranges of the two models of figures 21 to 23 that it lacks are those of others.
Latency under co-location is InSS' own model, fitted to all pairs measured on the V100.
"""

from __future__ import annotations

import functools

import msgspec

from cotenant.core.model import Kind, Model
from cotenant.core.profile import Profile
from cotenant.planners import Problem
from cotenant.planners.inss.cluster import Cluster
from cotenant.predictors import analytic
from cotenant.predictors.analytic import Analytic
from cotenant.published import v100
from experiments.data import igniter

DEVICES = 4
CUTS = tuple(range(100, 1001, 100))


class Role(msgspec.Struct, frozen=True):
    """Describe a model of InSS. plays: the model measured on a V100; slo: seconds; low, high, start: requests/s over
    what batches of 1 on a whole GPU sustain, start of the evaluation."""

    plays: str
    slo: float
    low: float
    high: float
    start: float


ROLES = {
    "alexnet": Role("alexnet", 0.025, 100 / 788.64, 500 / 788.64, 200 / 788.64),
    "resnet50": Role("resnet50", 0.080, 100 / 215.87, 400 / 215.87, 150 / 215.87),
    "vgg16": Role("vgg19", 0.150, 50 / 146.90, 200 / 146.90, 80 / 146.90),
    "mnasnet": Role("alexnet", 0.050, 100 / 443.53, 400 / 443.53, 200 / 443.53),
    "mobilenet": Role("alexnet", 0.060, 100 / 306.51, 450 / 306.51, 250 / 306.51),
    "efficientnet": Role("resnet50", 0.040, 100 / 217.32, 400 / 217.32, 250 / 217.32),
    "resnet18": Role("resnet50", 0.060, 100 / 306.51, 450 / 306.51, 250 / 306.51),
    "vgg19": Role("vgg19", 0.200, 50 / 146.90, 200 / 146.90, 80 / 146.90),
}
SIX = tuple(ROLES)[:6]  # figures 13 to 20
EIGHT = tuple(ROLES)  # figures 21 to 23


@functools.cache
def interference() -> Analytic:
    """Return InSS' latency model by role, fitted to all pairs of the V100."""
    profiles = igniter.profiles()
    fitted = analytic.fit(v100.pairs(), profiles)
    return msgspec.structs.replace(
        fitted,
        cache={name: fitted.cache[role.plays] for name, role in ROLES.items()},
        alone={name: fitted.alone[role.plays] for name, role in ROLES.items()},
    )


@functools.cache
def problem(models: tuple[str, ...] = SIX, devices: int = DEVICES) -> Problem:
    """Return the problem at the rates at which InSS' evaluation starts."""
    measured = v100.profiles()
    bare = Problem(
        models=tuple(Model(name=name, slo=ROLES[name].slo, max_batch=32) for name in models),
        rates={},
        fleet=(Kind(name=v100.KIND, count=devices, cuts=CUTS),),
        profiles={
            (name, v100.KIND): Profile(name, v100.KIND, measured[ROLES[name].plays, v100.KIND].points)
            for name in models
        },
        interference=interference(),
        arrivals="even",
    )
    return msgspec.structs.replace(bare, rates=dict(zip(models, scaled(bare, "start"), strict=True)))


def scaled(problem: Problem, which: str) -> list[float]:
    """Return requests/s of each model. which: "low", "high" or "start"."""
    reference = Cluster.of(problem).reference_rates.tolist()
    return [getattr(ROLES[model.name], which) * most for model, most in zip(problem.models, reference, strict=True)]
