"""Define sets of profiled models that play the roles of gpulet's nine models.

`synthetic-0.2` and `synthetic-0.8` have the paper's own models, SLOs and rates, memory and utilisation measured by its
authors, and made-up latencies, since theirs were never published. `a100` and `v100` are measured; other models take the
roles there, with SLOs by the paper's rule: twice the latency of a batch of 32 on the whole device.

Scenarios request 0, 1 or 2 units of rate. The paper's unit is 100 requests/s, at which our planners, or faster devices,
serve every scenario. The largest unit of a set is such that our SBP schedules as many scenarios as the paper's (29.3 %,
Figure 5): this is the only fitted number. As the paper's gpulet schedules nearly all scenarios, smaller units are
included as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import msgspec

from cotenant.core.model import Kind, Model
from cotenant.core.profile import Profile, Profiles
from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError
from cotenant.planners import Problem
from cotenant.predictors import NoInterference
from cotenant.predictors.linear import DRAM, L2, Coefficients, Linear, Utilisation, least_squares
from cotenant.published import a100, v100
from experiments.data import glet
from experiments.gpulet import paper

GLET = {
    "le": "lenet1",
    "goo": "googlenet",
    "res": "resnet50",
    "ssd": "ssd-mobilenetv1",
    "vgg": "vgg16",
    "nas": "mnasnet1_0",
    "mob": "mobilenet_v2",
    "den": "densenet161",
    "be": "bert",
}
# Models of the same name play themselves, Inception plays GoogLeNet, the others are in no order; resnet152 is omitted.
A100 = {
    "le": "densenet121",
    "goo": "inception",
    "res": "resnet50",
    "ssd": "resnet101",
    "vgg": "vgg16",
    "nas": "densenet169",
    "mob": "mobilenet",
    "den": "densenet201",
    "be": "vgg19",
}
# Only four models were measured: each plays two roles, with SLOs of two and four times its latency; alexnet a third.
V100 = {
    "le": ("alexnet", 2.0),
    "goo": ("resnet50", 4.0),
    "res": ("resnet50", 2.0),
    "ssd": ("ssd", 2.0),
    "vgg": ("vgg19", 2.0),
    "nas": ("alexnet", 4.0),
    "mob": ("alexnet", 3.0),
    "den": ("ssd", 4.0),
    "be": ("vgg19", 4.0),
}
# Requests/s. With the last unit, SBP schedules the paper's 29.3 % of scenarios; the others are half and three quarters
# of it, except for the paper's own unit.
UNITS = {
    "synthetic-0.2": (paper.RATES[1],),
    "synthetic-0.8": (paper.RATES[1], 230, 306),
    "a100": (280, 420, 560),
    "v100": (164, 246, 328),
}

# The published program uses 90 % of a device's memory, minus 1,230 MB for the process of each partition.
USABLE_MEMORY = 0.9
CONTEXT_MB = 1_230
MEMORY_MB = {glet.KIND: 11_000, a100.KIND: 80_000, v100.KIND: 16_000}


class ModelSet(msgspec.Struct, frozen=True, kw_only=True):
    """Hold models by role, profiled on one kind of device.

    targets: SLOs in seconds; profiles: by (role, kind); coefficients: of the linear interference model, fitted to pairs
    measured on this kind; proportional: the same, assuming utilisation proportional to the share; inputs: for a role,
    the paper's model whose input size it takes, if it is one of the paper's.
    """

    name: str
    kind: str
    targets: dict[str, float]
    profiles: Profiles
    coefficients: Coefficients
    proportional: Coefficients
    inputs: dict[str, str] = {}

    @property
    def interference(self) -> Linear:
        used = {role: Utilisation.of(profile) for (role, _), profile in self.profiles.items()}
        return Linear(self.coefficients, used)

    @property
    def units(self) -> tuple[int, ...]:
        """Return the rates at level 1, in requests/s; each is a load of its own."""
        return UNITS[self.name]

    @property
    def memory(self) -> int:
        """Return the bytes of a device that are available to models."""
        usable = USABLE_MEMORY * MEMORY_MB[self.kind] - paper.MAX_PARTITIONS * CONTEXT_MB
        return round(usable * glet.MEGABYTE)

    def problem(self, devices: int = paper.DEVICES, *, interference: bool = True) -> Problem:
        """Return the problem without rates, with the paper's cuts and at most two partitions per device."""
        return Problem(
            models=tuple(
                Model(name=role, slo=target, max_batch=paper.LARGEST_BATCH) for role, target in self.targets.items()
            ),
            rates={},
            fleet=(
                Kind(
                    name=self.kind,
                    count=devices,
                    memory=self.memory,
                    cuts=tuple(percent * 10 for percent in paper.CUTS_PERCENT),
                    max_partitions=paper.MAX_PARTITIONS,
                ),
            ),
            profiles=self.profiles,
            interference=self.interference if interference else NoInterference(),
        )

    def halves(self, devices: int = paper.DEVICES) -> Problem:
        """Return the problem on twice as many devices, each one half without interference (Figure 5, fixed 1:1)."""
        half = Kind(name=self.kind, count=2 * devices, memory=self.memory // 2)
        profiles = {
            key: Profile(
                profile.model,
                profile.kind,
                [msgspec.structs.replace(point, share=WHOLE) for point in profile.points if point.share == WHOLE // 2],
            )
            for key, profile in self.profiles.items()
        }
        return msgspec.structs.replace(self.problem(), fleet=(half,), profiles=profiles, interference=NoInterference())

    def with_roles(self, roles: Mapping[str, str], targets: Mapping[str, float] | None = None) -> ModelSet:
        """Return other models with the same profiles. roles: new name → role; targets: seconds by new name."""
        return msgspec.structs.replace(
            self,
            targets={new: (targets or {}).get(new, self.targets[role]) for new, role in roles.items()},
            profiles={(new, self.kind): _renamed(self.profiles[role, self.kind], new) for new, role in roles.items()},
            inputs={new: self.inputs[role] for new, role in roles.items() if role in self.inputs},
        )


def model_set(name: str) -> ModelSet:
    """Return the set of that name. Raises ConfigError for an unknown name or missing data."""
    if name not in MODEL_SETS:
        raise ConfigError(f"no profiles {name!r}; available: {', '.join(MODEL_SETS)}")
    return MODEL_SETS[name]()


def _renamed(profile: Profile, model: str) -> Profile:
    return Profile(model, profile.kind, profile.points)


def full_device_utilisation(profile: Profile, batch: int) -> tuple[float, float]:
    """Return (L2, DRAM) utilisation on the whole device, as fractions extrapolated from the largest measured share."""
    point = max((p for p in profile.points if p.batch == batch and L2 in p.features), key=lambda p: p.share)
    scale = WHOLE / point.share / 100
    return point.features[L2] * scale, point.features[DRAM] * scale


def _proportional(profile: Profile) -> Utilisation:
    """Return utilisation linear in the share, from zero to that on the whole device."""
    measured: dict[tuple[int, int], tuple[float, float]] = {}
    for batch in {point.batch for point in profile.points}:
        l2, dram = full_device_utilisation(profile, batch)
        measured |= {(batch, 0): (0.0, 0.0), (batch, WHOLE): (l2, dram)}
    return Utilisation(profile.model, measured)


def _target(profile: Profile, factor: float = 2.0) -> float:
    """Return `factor` times the latency of batch 32, in seconds.

    It is rounded up to whole ms, as the published program needs.
    """
    return math.ceil(factor * profile.latency(paper.LARGEST_BATCH, WHOLE) * 1e3) / 1e3


@functools.cache
def _synthetic(tenths: int) -> ModelSet:
    profiles = glet.synthetic(tenths)
    return ModelSet(
        name=f"synthetic-{tenths / 10:g}",
        kind=glet.KIND,
        targets={role: ms / 1e3 for role, ms in paper.TARGETS_MS.items()},
        profiles={(role, glet.KIND): _renamed(profiles[model, glet.KIND], role) for role, model in GLET.items()},
        coefficients=glet.coefficients(),
        proportional=glet.coefficients(),
        inputs={role: role for role in GLET},
    )


@functools.cache
def _a100() -> ModelSet:
    profiles = a100.profiles()
    return ModelSet(
        name="a100",
        kind=a100.KIND,
        targets={role: _target(profiles[name, a100.KIND]) for role, name in A100.items()},
        profiles={(role, a100.KIND): _renamed(profiles[name, a100.KIND], role) for role, name in A100.items()},
        coefficients=least_squares(a100.pairs(), {name: Utilisation.of(each) for (name, _), each in profiles.items()}),
        proportional=least_squares(a100.pairs(), {name: _proportional(each) for (name, _), each in profiles.items()}),
    )


@functools.cache
def _v100() -> ModelSet:
    profiles = v100.profiles()
    return ModelSet(
        name="v100",
        kind=v100.KIND,
        targets={role: _target(profiles[name, v100.KIND], factor) for role, (name, factor) in V100.items()},
        profiles={(role, v100.KIND): _renamed(profiles[name, v100.KIND], role) for role, (name, _) in V100.items()},
        coefficients=least_squares(v100.pairs(), {name: Utilisation.of(each) for (name, _), each in profiles.items()}),
        proportional=least_squares(v100.pairs(), {name: _proportional(each) for (name, _), each in profiles.items()}),
    )


MODEL_SETS: dict[str, Callable[[], ModelSet]] = {
    "synthetic-0.2": functools.partial(_synthetic, 2),
    "synthetic-0.8": functools.partial(_synthetic, 8),
    "a100": _a100,
    "v100": _v100,
}
