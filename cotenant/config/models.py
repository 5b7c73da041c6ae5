"""Read the settings of one model, as files and resources of Kubernetes spell them."""

from __future__ import annotations

import msgspec

from cotenant.config.toml import parse_priority, parse_rate, parse_target
from cotenant.core import units
from cotenant.errors import ConfigError


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Configure one model. None: the server chooses.

    slo, max_queue_delay: seconds. rate: requests/s to expect. priority: as of a `Model`.
    """

    name: str
    slo: float | None = None
    attainment: float = 0.99
    rate: float | None = None
    max_batch: int | None = None
    max_queue_delay: float | None = None
    priority: int = 1


class ModelEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    slo: str | int | float | None = None
    rate: float | None = None
    attainment: str | float = 0.99
    max_batch: int | None = None
    max_queue_delay: str | int | float | None = None
    priority: int = 1


def read_model(entry: ModelEntry, place: str) -> ModelSettings:
    """Check the settings of a model. Raises ConfigError."""
    if entry.max_batch is not None and entry.max_batch < 1:
        raise ConfigError(f"{place}.max_batch: {entry.max_batch} must be at least 1")
    return ModelSettings(
        name=entry.name,
        slo=None if entry.slo is None else parse_target(entry.slo, f"{place}.slo"),
        attainment=units.parse_fraction(entry.attainment, f"{place}.attainment"),
        rate=None if entry.rate is None else parse_rate(entry.rate, f"{place}.rate"),
        max_batch=entry.max_batch,
        max_queue_delay=None
        if entry.max_queue_delay is None
        else units.parse_seconds(str(entry.max_queue_delay), f"{place}.max_queue_delay"),
        priority=parse_priority(entry.priority, f"{place}.priority"),
    )
