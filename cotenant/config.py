"""Files that people write, as the values the rest works with: units are read here, and every default stands here.

An error gives the file, the key and what to write instead.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from cotenant.core import mig, units
from cotenant.core.model import Kind, Model
from cotenant.core.profile import Profile, Profiles, read_profiles
from cotenant.errors import ConfigError, PlanError
from cotenant.planners import PLANNERS, Objective, Problem
from cotenant.predictors import Alone, Interference, Margin

Hold = Literal["bucket", "quota"]
BackendName = Literal["cpu", "fake"]


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is told of one model. None: the server chooses.

    slo, linger: seconds. rate: requests/s to expect.
    """

    name: str
    slo: float | None = None
    attainment: float = 0.99
    rate: float | None = None
    max_batch: int | None = None
    linger: float | None = None


class Address(msgspec.Struct, frozen=True):
    """port: 0 for any that is free."""

    host: str
    port: int


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A server. The defaults are those of `read_settings(None)`.

    profiles: a CSV file; None: what was measured on this machine. grace: seconds that a stop waits for requests in
    flight. log: where the event log goes, if anywhere. reserve: the fraction of processor time kept for the server.
    cuts: legal shares of the device `cpu`, in ‰. objective: None: the largest multiple of the rates, where one is not
    given; else the fewest devices.
    """

    repository: Path
    profiles: Path | None
    planner: str
    objective: Objective | None
    interference: Interference
    backend: BackendName
    http: Address
    grpc: Address
    metrics: Address
    hold: Hold
    reserve: float
    cuts: tuple[int, ...]
    grace: float
    log: Path | None
    models: tuple[ModelSettings, ...]


# The files as they are written.


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


class _ServedEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    slo: str | int | float | None = None
    rate: float | None = None
    attainment: str | float = 0.99
    max_batch: int | None = None
    linger: str | int | float | None = None


class _HttpEntry(msgspec.Struct, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8000


class _GrpcEntry(msgspec.Struct, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8001


class _MetricsEntry(msgspec.Struct, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8002


class _CpuEntry(msgspec.Struct, forbid_unknown_fields=True):
    hold: str = "bucket"
    reserve: str | int | float = "15%"
    cuts: tuple[float, ...] = tuple(range(5, 101, 5))


class _SettingsFile(msgspec.Struct, forbid_unknown_fields=True):
    repository: str = "models"
    profiles: str | None = None
    planner: str = "geometry"
    objective: str | None = None
    # Processors share caches, memory bandwidth and, where there are fewer cores than threads, cores.
    interference: Any = msgspec.field(default_factory=lambda: {"model": "margin", "factor": 1.2})
    backend: str = "cpu"
    grace: str | int | float = "10s"
    log: str | None = None
    http: _HttpEntry = msgspec.field(default_factory=_HttpEntry)
    grpc: _GrpcEntry = msgspec.field(default_factory=_GrpcEntry)
    metrics: _MetricsEntry = msgspec.field(default_factory=_MetricsEntry)
    cpu: _CpuEntry = msgspec.field(default_factory=_CpuEntry)
    models: list[_ServedEntry] = []


def read_problem(path: Path) -> Problem:
    """What a planner is asked, from a TOML file (DESIGN.md, Files)."""
    file = _decode(_text(path), _ProblemFile, path)
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
                f"{path}: models[{i}].name: {entry.name!r} has no profile on {_or(kinds)}; measure one with"
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
            objective=_one_of(file.objective, Objective, f"{path}: objective"),
            interference=_interference(file.interference, f"{path}: interference"),
        )
    except PlanError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_profiles_file(path: Path) -> dict[tuple[str, str], Profile]:
    """Profiles by (model, kind), from a CSV file."""
    return read_profiles(_text(path).splitlines(keepends=True), str(path))


def read_settings(path: Path | None = None) -> Settings:
    """A server's settings from a TOML file, or the defaults. Paths in it are relative to it."""
    file = _SettingsFile() if path is None else _decode(_text(path), _SettingsFile, path)
    place = "settings" if path is None else str(path)
    base = Path() if path is None else path.parent
    if file.planner not in PLANNERS:
        raise ConfigError(f"{place}: planner: {file.planner!r} is not known; take {_or(PLANNERS)}")
    models = tuple(_served(entry, f"{place}: models[{i}]") for i, entry in enumerate(file.models))
    for i, model in enumerate(models):
        if model.name in {other.name for other in models[:i]}:
            raise ConfigError(f"{place}: models[{i}].name: {model.name!r} stands twice; keep one entry")
    return Settings(
        repository=base / file.repository,
        profiles=None if file.profiles is None else base / file.profiles,
        planner=file.planner,
        objective=None if file.objective is None else _one_of(file.objective, Objective, f"{place}: objective"),
        interference=_interference(file.interference, f"{place}: interference"),
        backend=_one_of(file.backend, BackendName, f"{place}: backend"),
        http=_address(file.http, f"{place}: http"),
        grpc=_address(file.grpc, f"{place}: grpc"),
        metrics=_address(file.metrics, f"{place}: metrics"),
        hold=_one_of(file.cpu.hold, Hold, f"{place}: cpu.hold"),
        reserve=_reserve(file.cpu.reserve, f"{place}: cpu.reserve"),
        cuts=_cuts(file.cpu.cuts, f"{place}: cpu.cuts"),
        grace=units.seconds(str(file.grace), f"{place}: grace"),
        log=None if file.log is None else base / file.log,
        models=models,
    )


def _model(entry: _ModelEntry, place: str) -> Model:
    return Model(
        name=entry.name,
        slo=_target(entry.slo, f"{place}.slo"),
        attainment=units.fraction(entry.attainment, f"{place}.attainment"),
        max_batch=entry.max_batch,
        linger=units.seconds(str(entry.linger), f"{place}.linger"),
    )


def _served(entry: _ServedEntry, place: str) -> ModelSettings:
    if entry.max_batch is not None and entry.max_batch < 1:
        raise ConfigError(f"{place}.max_batch: {entry.max_batch} must be at least 1")
    if entry.rate is not None and not 0 <= entry.rate < float("inf"):
        raise ConfigError(f"{place}.rate: {entry.rate:g} requests/s must be finite and at least 0")
    return ModelSettings(
        name=entry.name,
        slo=None if entry.slo is None else _target(entry.slo, f"{place}.slo"),
        attainment=units.fraction(entry.attainment, f"{place}.attainment"),
        rate=entry.rate,
        max_batch=entry.max_batch,
        linger=None if entry.linger is None else units.seconds(str(entry.linger), f"{place}.linger"),
    )


def _kind(entry: _DeviceEntry, place: str) -> Kind:
    if entry.price is not None and not 0 <= entry.price < float("inf"):
        raise ConfigError(f"{place}.price: {entry.price:g} must be finite and at least 0")
    kind = Kind(name=entry.kind, count=entry.count, price=entry.price, max_partitions=entry.max_partitions)
    if entry.geometry is not None:
        if entry.cuts is not None:
            raise ConfigError(f"{place}: a geometry says which cuts are legal; write one of `geometry` and `cuts`")
        if entry.geometry not in mig.GEOMETRIES:
            known = _or(mig.GEOMETRIES)
            raise ConfigError(f"{place}.geometry: {entry.geometry!r} is not known; take {known}")
        whole = max(instance.memory for instance in mig.GEOMETRIES[entry.geometry])
        cuts = mig.cuts(entry.geometry)
        kind = msgspec.structs.replace(kind, geometry=entry.geometry, cuts=cuts, memory=whole)
    elif entry.cuts is not None:
        kind = msgspec.structs.replace(kind, cuts=_cuts(entry.cuts, f"{place}.cuts"))
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


def _target(text: str | float, place: str) -> float:
    value = units.seconds(str(text), place)
    if value <= 0:
        raise ConfigError(f"{place}: a target of {text!r} must lie above 0")
    return value


def _cuts(percents: tuple[float, ...], place: str) -> tuple[int, ...]:
    if not percents:
        raise ConfigError(f"{place}: no share is legal; write at least one, such as [100]")
    return tuple(sorted({units.share(percent, place) for percent in percents}))


def _reserve(value: str | float, place: str) -> float:
    """Like any fraction, but 0 is allowed and 1 is not."""
    if value in (0, "0", "0%"):
        return 0.0
    fraction = units.fraction(value, place)
    if fraction == 1:
        raise ConfigError(f"{place}: {value!r} leaves nothing for the models; write less than 100%")
    return fraction


def _address(entry: _HttpEntry | _GrpcEntry | _MetricsEntry, place: str) -> Address:
    if not 0 <= entry.port <= 65535:
        raise ConfigError(f"{place}.port: {entry.port} is no port; write 0 (any) to 65535")
    return Address(entry.host, entry.port)


def _interference(value: Any, place: str) -> Interference:
    if value == "alone":
        return Alone()
    if isinstance(value, dict) and value.get("model") == "margin":
        unknown = [key for key in value if key not in ("model", "factor")]
        factor = value.get("factor")
        if unknown or not isinstance(factor, int | float) or not 1 <= factor < float("inf"):
            raise ConfigError(f'{place}: a margin has a factor of at least 1: {{ model = "margin", factor = 1.2 }}')
        return Margin(float(factor))
    raise ConfigError(f"{place}: {value!r} is not known; take 'alone' or {{ model = \"margin\", factor = 1.2 }}")


def _one_of(value: str, literal: Any, place: str) -> Any:
    known = get_args(literal)
    if value not in known:
        raise ConfigError(f"{place}: {value!r} is not known; take {_or(known)}")
    return value


def _or(names: Any) -> str:
    return " or ".join(repr(name) for name in sorted(names))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8 (byte {error.start}); is it the right file?") from None


File = TypeVar("File")

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<place>.*)`)?", re.DOTALL)
_PLACED = re.compile(r"(?P<what>.*) - at `\$\.?(?P<place>.*)`", re.DOTALL)


def _decode(text: str, type_: type[File], path: Path) -> File:
    try:
        return msgspec.convert(tomllib.loads(text), type_)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explain(str(error), type_)}") from None


def _explain(message: str, type_: type[Any]) -> str:
    if unknown := _UNKNOWN.fullmatch(message):
        key, place = unknown["key"], unknown["place"] or ""
        known = _keys(type_, place)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{place + ': ' if place else ''}unknown key {key!r}; {hint}"
    placed = _PLACED.fullmatch(message)
    return f"{placed['place']}: {placed['what']}" if placed else message


def _keys(type_: type[Any], place: str) -> list[str]:
    """The keys of the table at a place such as ``models[2]``."""
    info = msgspec.inspect.type_info(type_)
    for name in filter(None, re.sub(r"\[[^]]*\]", "", place).split(".")):
        assert isinstance(info, msgspec.inspect.StructType)
        info = next(field.type for field in info.fields if field.encode_name == name)
        if isinstance(info, msgspec.inspect.ListType):
            info = info.item_type
    assert isinstance(info, msgspec.inspect.StructType)
    return [field.encode_name for field in info.fields]
