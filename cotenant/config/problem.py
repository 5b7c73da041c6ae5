"""Read a problem: the input of a planner (docs/reference.md, "Problem")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cotenant.config.application import ApplicationEntry, read_application
from cotenant.config.devices import parse_price
from cotenant.config.interference import read_interference
from cotenant.config.toml import (
    check_exclusive,
    check_one_of,
    decode_toml,
    nearest_hint,
    parse_count,
    parse_cuts,
    parse_name,
    parse_priority,
    parse_rate,
    parse_target,
    read_text,
)
from cotenant.core import mig, units
from cotenant.core.application import Application
from cotenant.core.background_job import BackgroundJob
from cotenant.core.identity import DeviceId, own_kind
from cotenant.core.model import Kind, Model
from cotenant.core.profile import Profile, Profiles, read_profiles
from cotenant.errors import ConfigError, PlanError
from cotenant.planners import Arrivals, Objective, Problem
from cotenant.planners.policy import Policy

MAX_PROCESSORS = 4096


class _ModelEntry(msgspec.Struct, forbid_unknown_fields=True):
    """Read a model. slo: may be missing where applications use the model; their SLOs apply then."""

    name: str
    slo: str | int | float | None = None
    rate: float | None = None
    attainment: str | float = 0.99
    max_batch: int | None = None
    max_queue_delay: str | int | float = "0ms"
    priority: int = 1


class _DeviceEntry(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    count: int | None = None
    memory: str | int | float | None = None
    price: float | None = None
    cuts: tuple[float, ...] | None = None
    geometry: str | None = None
    max_partitions: int | None = None
    processors: float | None = None
    network: str | int | float | None = None


class _JobEntry(msgspec.Struct, forbid_unknown_fields=True):
    """Read a best-effort job. name: the model's where absent."""

    model: str
    name: str | None = None
    batch: int = 1
    priority: int = 1
    memory: str | int | float | None = None
    steps: int | None = None
    deadline: str | int | float | None = None


class _ProblemFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    profiles: list[str]
    models: list[_ModelEntry] = []
    applications: list[ApplicationEntry] = []
    devices: list[_DeviceEntry]
    objective: str = "devices"
    interference: Any = "none"
    arrivals: str = "poisson"
    skip_zero_latency: bool = False
    policy: str | None = None
    jobs: list[_JobEntry] = []


def read_problem(path: Path | str) -> Problem:
    """Read a problem from a TOML file (docs/reference.md, "Problem"). Raises ConfigError."""
    path = Path(path)
    file = decode_toml(read_text(path), _ProblemFile, path)
    profiles: dict[tuple[str, str], Profile] = {}
    for name in file.profiles:
        known = read_profiles_file(path.parent / name, skip_zero_latency=file.skip_zero_latency)
        for key, profile in known.items():
            if key in profiles:
                raise ConfigError(f"{path}: profiles: {key[0]!r} on {key[1]!r} is in {name!r} and in an earlier file")
            profiles[key] = profile
    applications = tuple(
        read_application(entry, f"{path}: applications[{i}]") for i, entry in enumerate(file.applications)
    )
    models = tuple(_model(entry, applications, f"{path}: models[{i}]") for i, entry in enumerate(file.models))
    models += _implied(models, applications)
    if not models:
        raise ConfigError(f"{path}: no models; list [[models]], or [[applications]] of them")
    fleet = tuple(_kind(entry, f"{path}: devices[{i}]") for i, entry in enumerate(file.devices))
    for entry, kind in zip(file.devices, fleet, strict=True):
        profiles |= _on_node(entry, kind, profiles, f"{path}: devices of {kind.name}")
    kinds = {kind.name for kind in fleet}
    for i, model in enumerate(models):
        if not any((model.name, kind) in profiles for kind in kinds):
            place = f"models[{i}].name" if i < len(file.models) else _place(model.name, applications)
            raise ConfigError(
                f"{path}: {place}: {model.name!r} has no profile on {check_exclusive(kinds)}; measure one with"
                f" `cotenant profile`, or correct {_mistaken(model.name, kinds, profiles)}"
            )
    for i, kind in enumerate(fleet):
        _useful(kind, [model.name for model in models], profiles, f"{path}: devices[{i}]")
    jobs = tuple(_job(entry, kinds, profiles, f"{path}: jobs[{i}]") for i, entry in enumerate(file.jobs))
    rates = {
        entry.name: parse_rate(entry.rate or 0.0, f"{path}: models[{i}].rate")
        for i, entry in enumerate(file.models)
        if entry.slo is not None
    }
    rates |= {
        application.name: parse_rate(application.rate, f"{path}: applications[{i}].rate")
        for i, application in enumerate(file.applications)
    }
    try:
        return Problem(
            models=models,
            rates=rates,
            fleet=fleet,
            profiles=profiles,
            objective=check_one_of(file.objective, Objective, f"{path}: objective"),
            interference=read_interference(file.interference, f"{path}: interference", path.parent).predictor(profiles),
            applications=applications,
            arrivals=check_one_of(file.arrivals, Arrivals, f"{path}: arrivals"),
            policy=None if file.policy is None else read_policy(path.parent / file.policy),
            jobs=jobs,
        )
    except PlanError as error:
        raise ConfigError(f"{path}: {error}") from None


def _implied(models: Sequence[Model], applications: Sequence[Application]) -> tuple[Model, ...]:
    """Return the models that only stages name."""
    known = {model.name for model in models}
    used = dict.fromkeys(stage.model for application in applications for stage in application.stages)
    return tuple(Model(name=name, slo=_loosest(name, applications)) for name in used if name not in known)


def _loosest(model: str, applications: Sequence[Application]) -> float:
    """Return the target of a model that only applications use: the shortest of theirs."""
    return min((application.slo for application in applications if model in application.models()), default=math.inf)


def _mistaken(model: str, kinds: set[str], profiles: Profiles) -> str:
    """Say which name is probably wrong, and what was probably meant."""
    known = sorted({kind for name, kind in profiles if name == model})
    if known:
        return f"the kind of the devices: it has one on {check_exclusive(known)}"
    others = sorted({name for name, kind in profiles if kind in kinds})
    return f"the name: {nearest_hint(model, others)}" if others else "the names"


def _place(model: str, applications: Sequence[Application]) -> str:
    return next(
        f"applications[{i}]: stage {stage.name!r}"
        for i, application in enumerate(applications)
        for stage in application.stages
        if stage.model == model
    )


def read_policy(path: Path | str) -> Policy:
    """Read what `cotenant train` wrote. Raises ConfigError."""
    path = Path(path)
    try:
        return Policy.from_json(read_text(path).encode(), str(path))
    except PlanError as error:
        raise ConfigError(str(error)) from None


def read_profiles_file(path: Path | str, *, skip_zero_latency: bool = False) -> dict[tuple[str, str], Profile]:
    """Read profiles by (model, kind) from a CSV file. Raises ConfigError.

    skip_zero_latency: leave rows out whose latency is 0.
    """
    path = Path(path)
    lines = read_text(path).splitlines(keepends=True)
    return read_profiles(lines, str(path), skip_zero_latency=skip_zero_latency)


def _model(entry: _ModelEntry, applications: Sequence[Application], place: str) -> Model:
    loosest = _loosest(entry.name, applications)
    if entry.rate is None and loosest == math.inf:
        raise ConfigError(
            f"{place}: {entry.name!r} has no rate; give it one, in requests/s, or use it in an application"
        )
    if entry.slo is None and (entry.rate is not None or loosest == math.inf):
        raise ConfigError(f'{place}: {entry.name!r} has no slo; give it a target, such as "50ms"')
    if entry.max_batch is not None and entry.max_batch < 1:
        raise ConfigError(f"{place}.max_batch: {entry.max_batch} must be at least 1")
    return Model(
        name=parse_name(entry.name, f"{place}.name"),
        slo=loosest if entry.slo is None else parse_target(entry.slo, f"{place}.slo"),
        attainment=units.parse_fraction(entry.attainment, f"{place}.attainment"),
        max_batch=entry.max_batch,
        max_queue_delay=units.parse_seconds(str(entry.max_queue_delay), f"{place}.max_queue_delay"),
        priority=parse_priority(entry.priority, f"{place}.priority"),
    )


def _job(entry: _JobEntry, kinds: set[str], profiles: Profiles, place: str) -> BackgroundJob:
    known = [profile for (model, kind), profile in profiles.items() if model == entry.model and kind in kinds]
    if not known:
        raise ConfigError(
            f"{place}.model: {entry.model!r} has no profile on {check_exclusive(kinds)}; profile its steps as a model,"
            f" or correct {_mistaken(entry.model, kinds, profiles)}"
        )
    largest = max(profile.max_batch for profile in known)
    if entry.batch > largest:
        raise ConfigError(f"{place}.batch: {entry.batch} is more than was profiled of {entry.model!r}, up to {largest}")
    memory, deadline = entry.memory, entry.deadline
    try:
        return BackgroundJob(
            name=parse_name(entry.model if entry.name is None else entry.name, f"{place}.name"),
            model=entry.model,
            batch=entry.batch,
            priority=entry.priority,
            memory=None if memory is None else units.parse_memory(str(memory), f"{place}.memory"),
            steps=entry.steps,
            deadline=None if deadline is None else units.parse_seconds(str(deadline), f"{place}.deadline"),
        )
    except PlanError as error:
        raise ConfigError(f"{place}: {error}") from None


def _kind(entry: _DeviceEntry, place: str) -> Kind:
    parse_name(entry.kind, f"{place}.kind")
    try:
        DeviceId(entry.kind)
    except ConfigError:
        raise ConfigError(f"{place}.kind: {entry.kind!r} is neither KIND nor NODE/KIND; rename it") from None
    if entry.network is not None and entry.kind == own_kind(entry.kind):
        raise ConfigError(f"{place}.network: {entry.kind!r} is not a kind of a node, such as 'node-a/{entry.kind}'")
    if entry.max_partitions is not None and entry.max_partitions < 1:
        raise ConfigError(f"{place}.max_partitions: {entry.max_partitions} must be at least 1")
    if entry.processors is not None and not 0 < entry.processors <= MAX_PROCESSORS:
        raise ConfigError(f"{place}.processors: {entry.processors:g} must be above 0 and at most {MAX_PROCESSORS}")
    count = parse_count(entry.count, f"{place}.count")
    kind = Kind(
        name=entry.kind,
        count=count,
        price=parse_price(entry.price, f"{place}.price"),
        max_partitions=entry.max_partitions,
        processors=entry.processors or 0.0,
    )
    if entry.geometry is not None:
        if entry.cuts is not None:
            raise ConfigError(f"{place}: a geometry defines the legal cuts; write one of `geometry` and `cuts`")
        if entry.geometry not in mig.GEOMETRIES:
            known = check_exclusive(mig.GEOMETRIES)
            raise ConfigError(f"{place}.geometry: {entry.geometry!r} is unknown; use {known}")
        whole = max(instance.memory for instance in mig.GEOMETRIES[entry.geometry])
        cuts = mig.instance_shares(entry.geometry)
        kind = msgspec.structs.replace(kind, geometry=entry.geometry, cuts=cuts, memory=whole)
    elif entry.cuts is not None:
        kind = msgspec.structs.replace(kind, cuts=parse_cuts(entry.cuts, f"{place}.cuts"))
    if entry.memory is None:
        return kind
    return msgspec.structs.replace(kind, memory=units.parse_memory(str(entry.memory), f"{place}.memory"))


def _on_node(entry: _DeviceEntry, kind: Kind, profiles: Profiles, place: str) -> dict[tuple[str, str], Profile]:
    """Return what models take on a kind of a node: what they take on that kind anywhere, and the network more."""
    own = own_kind(kind.name)
    if own == kind.name:
        return {}
    network = 0.0 if entry.network is None else units.parse_seconds(str(entry.network), f"{place}.network")
    return {
        (model, kind.name): profile.on(kind.name, network)
        for (model, of), profile in profiles.items()
        if of == own and (model, kind.name) not in profiles
    }


def _useful(kind: Kind, models: list[str], profiles: Profiles, place: str) -> None:
    """Raise ConfigError for devices that no model can run on."""
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
