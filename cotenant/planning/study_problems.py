"""Make the problems on which `cotenant compare --all` compares planners: from published measurements, and synthetic.

Each is asked for by name, ``<profiles>/<setting>``, and seed, which draws the rates.

- `steady`: targets of twice the latency of a full batch on a whole device, as in gpulet's evaluation; the fewest
  devices.
- `tight`: half of these targets.
- `rate`: the targets of `steady` on two devices; the largest multiple of the rates.
- `mixed`: targets of one, two and three times the latency of a full batch; two kinds of devices with prices; the least
  cost.

Rates add up to the load of four devices: what part of a device each model fills is drawn at random, and its rate is
that part of what it sustains on a whole one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.core.mig import instance_shares
from cotenant.core.model import Kind, Model
from cotenant.core.profile import Point, Profile, Profiles
from cotenant.errors import ConfigError
from cotenant.planners import Problem
from cotenant.planners.capacity import max_throughput_batch
from cotenant.predictors import Interference, NoInterference, linear
from cotenant.published import a100, has_gpu, v100

LOAD = 4.0  # devices that the rates would fill, if each model filled whole ones
MIXING = 2.0  # of the Dirichlet distribution of loads: each model's is within a few times any other's
RATE_DEVICES = 2
MIG = "mig-a100-80gb"
CUTS = (200, 400, 500, 600, 800, 1000)  # the shares that gpulet's and both of the profiles have
FINE_CUTS = tuple(range(50, 1001, 50))
# An hour of a device: Amazon's p3.2xlarge (V100), and the eighth of a p4de.24xlarge (A100-80GB), in us-east-1.
PRICES = {v100.KIND: 3.06, a100.KIND: 5.12}
SYNTHETIC_PRICES = {"fast": 2.0, "slow": 1.0}


class Measurements(msgspec.Struct, frozen=True):
    """Hold profiles of one kind of device, and the interference there."""

    kind: Kind
    profiles: Profiles
    interference: Interference


Read = Callable[[Path | None], Measurements]


def study_problem_names() -> list[str]:
    """Return the names of all problems."""
    return [f"{name}/{setting}" for name, settings in _SETTINGS.items() for setting in settings]


def study_problem(name: str, seed: int, folder: Path | None = None) -> Problem:
    """Return a problem. folder: of published measurements. Raises ConfigError for an unknown name, and where the
    measurements are not there."""
    if name not in study_problem_names():
        raise ConfigError(f"no problem {name!r}; available: {', '.join(study_problem_names())}")
    profiles, _, setting = name.partition("/")
    rng = np.random.default_rng(seed)
    if setting == "mixed":
        return _mixed(profiles, rng, folder)
    measured = _MEASURED[profiles](folder)
    factor = 1.0 if setting == "tight" else 2.0
    models = [_model(profile, factor) for profile in measured.profiles.values()]
    kind = msgspec.structs.replace(measured.kind, count=RATE_DEVICES if setting == "rate" else None)
    return Problem(
        models=tuple(models),
        rates=_rates(models, measured.profiles, kind.name, rng),
        fleet=(kind,),
        profiles=measured.profiles,
        objective="rate" if setting == "rate" else "devices",
        interference=measured.interference,
        arrivals="even",
    )


def _mixed(profiles: str, rng: np.random.Generator, folder: Path | None) -> Problem:
    """Return a problem with two kinds of devices, for models that are profiled on both."""
    if profiles == "synthetic":
        kinds = tuple(
            Kind(name=kind, count=None, cuts=FINE_CUTS, price=price) for kind, price in SYNTHETIC_PRICES.items()
        )
        known = dict(_synthetic_profiles("fast", 1.0)) | dict(_synthetic_profiles("slow", 1.8))
        first, names = "fast", [f"m{i}" for i in range(6)]
    else:
        both = (_v100(folder), _a100(folder))
        kinds = tuple(msgspec.structs.replace(each.kind, price=PRICES[each.kind.name]) for each in both)
        first, names = v100.KIND, []
        known = {}
        for measured in both:
            for (model, kind), profile in measured.profiles.items():
                if all((model, other.kind.name) in other.profiles for other in both):
                    for number in (1, 2, 3):
                        known[f"{model}-{number}", kind] = Profile(f"{model}-{number}", kind, profile.points)
        names = sorted({model for model, _ in known})
    models = [_model(known[name, first], 1.0 + i % 3) for i, name in enumerate(names)]
    return Problem(
        models=tuple(models),
        rates=_rates(models, known, first, rng),
        fleet=kinds,
        profiles={(name, kind.name): known[name, kind.name] for name in names for kind in kinds},
        interference=NoInterference(),
        arrivals="even",
    )


def _model(profile: Profile, factor: float) -> Model:
    """Return a model whose target is a multiple of the latency of its largest batch on a whole device."""
    return Model(name=profile.model, slo=float(f"{factor * profile.latency(profile.max_batch, 1000):.3g}"))


def _rates(models: Sequence[Model], profiles: Profiles, kind: str, rng: np.random.Generator) -> dict[str, float]:
    parts = rng.dirichlet([MIXING] * len(models)) * LOAD
    return {
        model.name: float(part * max_throughput_batch(profiles[model.name, kind].curve(1000), model.slo)[1])
        for model, part in zip(models, parts.tolist(), strict=True)
    }


@functools.cache
def _v100(folder: Path | None) -> Measurements:
    profiles = v100.profiles(folder)
    kind = Kind(name=v100.KIND, count=None, cuts=CUTS)
    return Measurements(kind, profiles, linear.fit(v100.pairs(folder), profiles))


@functools.cache
def _a100(folder: Path | None) -> Measurements:
    profiles = a100.profiles(folder)
    kind = Kind(name=a100.KIND, count=None, cuts=CUTS)
    return Measurements(kind, profiles, linear.fit(a100.pairs(folder), profiles))


@functools.cache
def _has_gpu(folder: Path | None) -> Measurements:
    kind = Kind(name=has_gpu.KIND, count=None, cuts=FINE_CUTS)
    return Measurements(kind, has_gpu.profiles(folder), NoInterference())


@functools.cache
def _mig(folder: Path | None) -> Measurements:
    """The A100's latencies under MPS, on MIG instances of nearly the same shares; the smallest was not measured."""
    profiles = a100.profiles(folder)
    cuts = tuple(share for share in instance_shares(MIG) if share >= CUTS[0])
    return Measurements(Kind(name=a100.KIND, count=None, cuts=cuts, geometry=MIG), profiles, NoInterference())


@functools.cache
def _synthetic(folder: Path | None) -> Measurements:
    kind = Kind(name="fast", count=None, cuts=FINE_CUTS)
    return Measurements(kind, _synthetic_profiles("fast", 1.0), NoInterference())


def _synthetic_profiles(kind: str, slower: float) -> Mapping[tuple[str, str], Profile]:
    """Return eight models whose latency is a part for every batch, one for each row, and one that does not scale with
    the share, in ms: from small ones that a few percent of a device suffice to large ones that need all of it."""

    def points(index: int) -> list[Point]:
        fixed, row, unscaled = 0.5 * 1.5**index, 0.05 * 1.7**index, 0.3 * 1.3**index
        return [
            Point(
                share=share,
                batch=batch,
                latency=slower * ((fixed + row * batch) * 1000 / share + unscaled) / 1e3,
                memory=(200 + 150 * index + 20 * batch) << 20,
                features={"sm_util_pct": min(100.0, 10.0 * (index + 1)), "dram_util_pct": 80.0 - 8 * index},
            )
            for share in (50, 100, 200, 400, 700, 1000)
            for batch in (1, 2, 4, 8, 16, 32)
        ]

    return {(f"m{index}", kind): Profile(f"m{index}", kind, points(index)) for index in range(8)}


# Batches of one take as long as full ones in HAS-GPU's data, so that no plan meets tight targets there, and each model
# needs most of a device. The largest rate of ten models takes geometry minutes.
_SETTINGS = {
    "v100": ("steady", "tight", "rate"),
    "a100": ("steady", "tight"),
    "has-gpu": ("steady",),
    "mig": ("steady", "tight"),
    "synthetic": ("steady", "tight", "rate", "mixed"),
    "v100+a100": ("mixed",),
}
_MEASURED: Mapping[str, Read] = {
    "v100": _v100,
    "a100": _a100,
    "has-gpu": _has_gpu,
    "mig": _mig,
    "synthetic": _synthetic,
}
