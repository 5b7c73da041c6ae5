"""Tell under which conditions the runs of a characterisation were made: runs of different ones are not to be mixed."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from cotenant.errors import ConfigError


class ModelConditions(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what the runs of a model depend on. slo: seconds. digest: of its file and configuration."""

    slo: float
    digest: str


class Conditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold what runs depend on. batch: samples. seconds: of a run. devices: by kind, what distinguishes them."""

    batch: int
    seconds: float
    loadgen: bool
    devices: dict[str, str] = {}
    models: dict[str, ModelConditions] = {}

    def including(self, before: Conditions | None) -> Conditions:
        """Return these, with the devices and models of earlier runs that are not among them."""
        if before is None:
            return self
        return msgspec.structs.replace(self, devices=before.devices | self.devices, models=before.models | self.models)


def differences(before: Conditions, now: Conditions, served: Collection[str]) -> Iterator[str]:
    """Yield in what conditions differ, in words, for what both have. served: models that have run the server scenario,
    the only one that depends on the SLO."""
    if before.batch != now.batch:
        yield f"--batch {before.batch}, not {now.batch}"
    if before.seconds != now.seconds:
        yield f"--duration {before.seconds:g}s, not {now.seconds:g}s"
    if before.loadgen != now.loadgen:
        yield f"queries {'by' if before.loadgen else 'without'} --loadgen"
    for kind in before.devices.keys() & now.devices.keys():
        if before.devices[kind] != now.devices[kind]:
            yield f"another {kind}: {before.devices[kind]}"
    for name in sorted(before.models.keys() & now.models.keys()):
        earlier, later = before.models[name], now.models[name]
        if earlier.digest != later.digest:
            yield f"another file or configuration of model {name!r}"
        if name in served and earlier.slo != later.slo:
            yield f"an SLO of {earlier.slo:g} s for model {name!r}, not {later.slo:g} s"


def read_conditions(content: bytes, place: str) -> Conditions:
    """Read conditions from JSON. Raises ConfigError with the place."""
    try:
        return msgspec.json.decode(content, type=Conditions)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: these are no conditions of `cotenant characterise`: {error}") from None


def write_conditions(conditions: Conditions) -> str:
    """Return the JSON that `read_conditions` reads."""
    return msgspec.json.format(msgspec.json.encode(conditions, order="deterministic"), indent=2).decode() + "\n"
