"""A problem: what a planner is asked (DESIGN.md, Files)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cotenant.config.interference import read_interference
from cotenant.config.toml import cuts_of, decode, either, one_of, target_of, text_of
from cotenant.core import mig, units
from cotenant.core.model import Kind, Model
from cotenant.core.profile import Profile, Profiles, read_profiles
from cotenant.errors import ConfigError, PlanError
from cotenant.planners import Objective, Problem


class _ModelEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    slo: str | int | float
    rate: float
    attainment: str | float = 0.99
    max_batch: int | None = None
    linger: str | int | float = "0ms"


class _DeviceEntry(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    count: int | None = None
    memory: str | int | float | None = None
    price: float | None = None
    cuts: tuple[float, ...] | None = None
    geometry: str | None = None
    max_partitions: int | None = None


class _ProblemFile(msgspec.Struct, forbid_unknown_fields=True):
    profiles: list[str]
    models: list[_ModelEntry]
    devices: list[_DeviceEntry]
    objective: str = "devices"
    interference: Any = "alone"


def read_problem(path: Path) -> Problem:
    """What a planner is asked, from a TOML file (DESIGN.md, Files)."""
    file = decode(text_of(path), _ProblemFile, path)
    profiles: dict[tuple[str, str], Profile] = {}
    for name in file.profiles:
        for key, profile in read_profiles_file(path.parent / name).items():
            if key in profiles:
                raise ConfigError(f"{path}: profiles: {key[0]!r} on {key[1]!r} stands in {name!r} and in one before it")
            profiles[key] = profile
    kinds = {entry.kind for entry in file.devices}
    for i, entry in enumerate(file.models):
        if not any((entry.name, kind) in profiles for kind in kinds):
            raise ConfigError(
                f"{path}: models[{i}].name: {entry.name!r} has no profile on {either(kinds)}; measure one with"
                f" `cotenant profile`, or correct the name"
            )
    fleet = tuple(_kind(entry, f"{path}: devices[{i}]") for i, entry in enumerate(file.devices))
    for i, kind in enumerate(fleet):
        _useful(kind, [entry.name for entry in file.models], profiles, f"{path}: devices[{i}]")
    try:
        return Problem(
            models=tuple(_model(entry, f"{path}: models[{i}]") for i, entry in enumerate(file.models)),
            rates={entry.name: entry.rate for entry in file.models},
            fleet=fleet,
            profiles=profiles,
            objective=one_of(file.objective, Objective, f"{path}: objective"),
            interference=read_interference(file.interference, f"{path}: interference", path.parent).predictor(profiles),
        )
    except PlanError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_profiles_file(path: Path) -> dict[tuple[str, str], Profile]:
    """Profiles by (model, kind), from a CSV file."""
    return read_profiles(text_of(path).splitlines(keepends=True), str(path))


def _model(entry: _ModelEntry, place: str) -> Model:
    return Model(
        name=entry.name,
        slo=target_of(entry.slo, f"{place}.slo"),
        attainment=units.fraction(entry.attainment, f"{place}.attainment"),
        max_batch=entry.max_batch,
        linger=units.seconds(str(entry.linger), f"{place}.linger"),
    )


def _kind(entry: _DeviceEntry, place: str) -> Kind:
    if entry.price is not None and not 0 <= entry.price < float("inf"):
        raise ConfigError(f"{place}.price: {entry.price:g} must be finite and at least 0")
    kind = Kind(name=entry.kind, count=entry.count, price=entry.price, max_partitions=entry.max_partitions)
    if entry.geometry is not None:
        if entry.cuts is not None:
            raise ConfigError(f"{place}: a geometry says which cuts are legal; write one of `geometry` and `cuts`")
        if entry.geometry not in mig.GEOMETRIES:
            known = either(mig.GEOMETRIES)
            raise ConfigError(f"{place}.geometry: {entry.geometry!r} is not known; take {known}")
        whole = max(instance.memory for instance in mig.GEOMETRIES[entry.geometry])
        cuts = mig.cuts(entry.geometry)
        kind = msgspec.structs.replace(kind, geometry=entry.geometry, cuts=cuts, memory=whole)
    elif entry.cuts is not None:
        kind = msgspec.structs.replace(kind, cuts=cuts_of(entry.cuts, f"{place}.cuts"))
    if entry.memory is None:
        return kind
    return msgspec.structs.replace(kind, memory=units.memory(str(entry.memory), f"{place}.memory"))


def _useful(kind: Kind, models: list[str], profiles: Profiles, place: str) -> None:
    """Raises ConfigError for devices that none of the models can ever run on."""
    known = {model: profiles[model, kind.name] for model in models if (model, kind.name) in profiles}
    if models and not known:
        raise ConfigError(
            f"{place}.kind: no model has a profile on {kind.name!r}; measure one with `cotenant profile`, correct the"
            f" name, or leave these devices out"
        )
    least, name = min(((profile.memory(1), model) for model, profile in known.items()), default=(0, ""))
    if least > kind.memory:
        raise ConfigError(
            f"{place}.memory: {units.show_memory(kind.memory)} hold no model; the smallest, {name!r}, needs"
            f" {units.show_memory(least)}"
        )
