"""Who plays gpulet's nine models: a cast for each set of profiles.

`synthetic-0.2` and `synthetic-0.8` have the paper's own models, targets and rates, memory and utilisation measured by
its authors, and latencies that are made up, as theirs were never published. `a100` and `v100` are measured; there the
roles go to other models, with targets by the paper's rule, twice the latency of a batch of 32 on the whole device.

Scenarios ask for 0, 1 or 2 units of rate. The paper's unit is 100 requests/s, with which planners of today, or faster
devices, serve every scenario. The largest unit of a cast is such that our SBP schedules as many scenarios as the
paper's did (29.3 %, Figure 5): one number is fitted, all others follow. The paper's gpulet schedules nearly all, so
smaller units stand beside it.
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
from experiments.data import a100, glet, v100
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
# Where names agree models play themselves, GoogLeNet's successor plays it, the rest in no order; resnet152 is left out.
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
# Only four models were measured: each plays twice, at two and at four times its latency; alexnet, at three, thrice.
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
# Requests/s. With the last SBP schedules the paper's 29.3 % of scenarios; the others are half and three quarters of it,
# but for the paper's own.
UNITS = {
    "synthetic-0.2": (paper.RATES[1],),
    "synthetic-0.8": (paper.RATES[1], 230, 306),
    "a100": (280, 420, 560),
    "v100": (164, 246, 328),
}

# The published program gives out 90 % of a device's memory, less 1,230 MB for the process of each partition.
GIVEN_OUT = 0.9
CONTEXT_MB = 1_230
MEMORY_MB = {glet.KIND: 11_000, a100.KIND: 80_000, v100.KIND: 16_000}


class Cast(msgspec.Struct, frozen=True, kw_only=True):
    """Models by the role they play, on one kind of device.

    targets: seconds; profiles: (role, kind) → Profile. coefficients: of the linear model of interference, fitted to the
    pairs that were measured on this kind; proportional: the same where utilisation is taken to go with the share.
    inputs: the paper's model whose inputs a role takes, where it is one of the paper's.
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
        """Requests/s at level 1, each a load of its own."""
        return UNITS[self.name]

    @property
    def memory(self) -> int:
        """Bytes that a device has for models."""
        usable = GIVEN_OUT * MEMORY_MB[self.kind] - paper.MAX_PARTITIONS * CONTEXT_MB
        return round(usable * glet.MEGABYTE)

    def problem(self, devices: int = paper.DEVICES, *, interference: bool = True) -> Problem:
        """Without rates. The paper's cuts, at most two to a device."""
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
        """The same on twice as many devices, each one half, which nothing slows: Figure 5's fixed 1:1 cut."""
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

    def playing(self, roles: Mapping[str, str], targets: Mapping[str, float] | None = None) -> Cast:
        """Other models by the same profiles. roles: new name → role; targets in seconds, by new name."""
        return msgspec.structs.replace(
            self,
            targets={new: (targets or {}).get(new, self.targets[role]) for new, role in roles.items()},
            profiles={(new, self.kind): _renamed(self.profiles[role, self.kind], new) for new, role in roles.items()},
            inputs={new: self.inputs[role] for new, role in roles.items() if role in self.inputs},
        )


def cast(name: str) -> Cast:
    """Raises ConfigError for a name that there is not, and where data is absent."""
    if name not in CASTS:
        raise ConfigError(f"no profiles {name!r}; there are {', '.join(CASTS)}")
    return CASTS[name]()


def _renamed(profile: Profile, model: str) -> Profile:
    return Profile(model, profile.kind, profile.points)


def whole(profile: Profile, batch: int) -> tuple[float, float]:
    """(L2, DRAM) in use on the whole device, as fractions: what the largest share that was measured would come to."""
    point = max((p for p in profile.points if p.batch == batch and L2 in p.features), key=lambda p: p.share)
    scale = WHOLE / point.share / 100
    return point.features[L2] * scale, point.features[DRAM] * scale


def _proportional(profile: Profile) -> Utilisation:
    """None on no share, all of it on the whole, linear between."""
    measured: dict[tuple[int, int], tuple[float, float]] = {}
    for batch in {point.batch for point in profile.points}:
        l2, dram = whole(profile, batch)
        measured |= {(batch, 0): (0.0, 0.0), (batch, WHOLE): (l2, dram)}
    return Utilisation(profile.model, measured)


def _twice(profile: Profile, factor: float = 2.0) -> float:
    """Seconds, up to whole ms: the published program knows no others."""
    return math.ceil(factor * profile.latency(paper.LARGEST_BATCH, WHOLE) * 1e3) / 1e3


@functools.cache
def _synthetic(tenths: int) -> Cast:
    profiles = glet.synthetic(tenths)
    return Cast(
        name=f"synthetic-{tenths / 10:g}",
        kind=glet.KIND,
        targets={role: ms / 1e3 for role, ms in paper.TARGETS_MS.items()},
        profiles={(role, glet.KIND): _renamed(profiles[model, glet.KIND], role) for role, model in GLET.items()},
        coefficients=glet.coefficients(),
        proportional=glet.coefficients(),
        inputs={role: role for role in GLET},
    )


@functools.cache
def _a100() -> Cast:
    profiles = a100.profiles()
    return Cast(
        name="a100",
        kind=a100.KIND,
        targets={role: _twice(profiles[name, a100.KIND]) for role, name in A100.items()},
        profiles={(role, a100.KIND): _renamed(profiles[name, a100.KIND], role) for role, name in A100.items()},
        coefficients=least_squares(a100.pairs(), {name: Utilisation.of(each) for (name, _), each in profiles.items()}),
        proportional=least_squares(a100.pairs(), {name: _proportional(each) for (name, _), each in profiles.items()}),
    )


@functools.cache
def _v100() -> Cast:
    profiles = v100.profiles()
    return Cast(
        name="v100",
        kind=v100.KIND,
        targets={role: _twice(profiles[name, v100.KIND], factor) for role, (name, factor) in V100.items()},
        profiles={(role, v100.KIND): _renamed(profiles[name, v100.KIND], role) for role, (name, _) in V100.items()},
        coefficients=least_squares(v100.pairs(), {name: Utilisation.of(each) for (name, _), each in profiles.items()}),
        proportional=least_squares(v100.pairs(), {name: _proportional(each) for (name, _), each in profiles.items()}),
    )


CASTS: dict[str, Callable[[], Cast]] = {
    "synthetic-0.2": functools.partial(_synthetic, 2),
    "synthetic-0.8": functools.partial(_synthetic, 8),
    "a100": _a100,
    "v100": _v100,
}
