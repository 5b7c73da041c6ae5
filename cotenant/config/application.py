"""Read `[[applications]]` of a problem: graphs of models with one target (core/application.py)."""

from __future__ import annotations

import msgspec

from cotenant.config.toml import parse_name, parse_priority, parse_target
from cotenant.core import units
from cotenant.core.application import Application, Choice, Fanout, Fixed, Poisson, Stage
from cotenant.errors import ConfigError, PlanError


class FanoutEntry(msgspec.Struct, forbid_unknown_fields=True):
    """Read `{ poisson = 1.5 }`, or `{ counts = [0, 1, 4], chances = [0.2, 0.5, 0.3] }`."""

    poisson: float | None = None
    counts: tuple[int, ...] | None = None
    chances: tuple[float, ...] | None = None


class StageEntry(msgspec.Struct, forbid_unknown_fields=True):
    """Read a stage. name: defaults to the model's."""

    model: str
    name: str | None = None
    after: tuple[str, ...] = ()
    fanout: int | FanoutEntry = 1


class ApplicationEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    slo: str | int | float
    rate: float
    attainment: str | float = 0.99
    priority: int = 1
    stages: list[StageEntry] = []


def read_application(entry: ApplicationEntry, place: str) -> Application:
    """Read one application. Raises ConfigError where its stages form no valid graph."""
    stages = tuple(
        Stage(
            name=stage.name or stage.model,
            model=stage.model,
            after=stage.after,
            fanout=_fanout(stage.fanout, f"{place}.stages[{i}].fanout"),
        )
        for i, stage in enumerate(entry.stages)
    )
    try:
        return Application(
            name=parse_name(entry.name, f"{place}.name"),
            slo=parse_target(entry.slo, f"{place}.slo"),
            attainment=units.parse_fraction(entry.attainment, f"{place}.attainment"),
            priority=parse_priority(entry.priority, f"{place}.priority"),
            stages=stages,
        )
    except PlanError as error:
        raise ConfigError(f"{place}: {error}") from None


def _fanout(entry: int | FanoutEntry, place: str) -> Fanout:
    match entry:
        case int():
            return Fixed(entry)
        case FanoutEntry(float() as mean, None, None):
            return Poisson(mean)
        case FanoutEntry(None, tuple() as counts, tuple() as chances):
            return Choice(counts, chances)
    raise ConfigError(
        f"{place}: write a number, or {{ poisson = 1.5 }}, or {{ counts = [0, 1, 4], chances = [0.2, 0.5, 0.3] }}"
    )
