"""Read the key `interference` of a problem or of settings: which predictor estimates slowdowns.

The key is read at once; the predictor is built once profiles are known, since it learns from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cotenant.config.toml import check_exclusive, read_text
from cotenant.core.profile import Profiles
from cotenant.errors import ConfigError, PlanError
from cotenant.predictors import ConstantMargin, Interference, NoInterference, QuantilePredictor
from cotenant.predictors.fitting import PREDICTORS, QUANTILES, fit, from_json, with_profiles
from cotenant.predictors.samples import Sample, read_samples

EXAMPLE = '{ model = "gaussian-process", fit = "pairs.csv" }'


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    factor: float | None = None
    fit: str | None = None
    quantile: float | None = None


class PredictorChoice(msgspec.Struct, frozen=True):
    """Choose a predictor.

    model: a name of PREDICTORS, or `alone`, or `margin` with its factor. fit: samples of pairs (CSV) to fit it to, or
    what `cotenant fit` made of them (JSON). quantile: of the predicted distribution of slowdowns, for planners. place:
    of the key, for messages.
    """

    model: str
    place: str
    factor: float = 1.0
    fit: Path | None = None
    quantile: float | None = None

    def predictor(self, profiles: Profiles) -> Interference:
        """Build the predictor. Raises ConfigError for an unreadable file, and for samples that cannot be fitted to."""
        if self.model == "none":
            return NoInterference()
        if self.model == "margin":
            return ConstantMargin(self.factor)
        assert self.fit is not None
        try:
            fitted = self._fitted(self.fit, profiles)
        except PlanError as error:
            raise ConfigError(f"{self.place}: {self.fit}: {error}") from None
        if self.quantile is None:
            return fitted
        assert isinstance(fitted, QuantilePredictor)
        return fitted.with_quantile(self.quantile)

    def _fitted(self, path: Path, profiles: Profiles) -> Interference:
        if path.suffix != ".json":
            samples = read_samples_file(path)
            # Samples may name models without a profile here, which nothing can be learnt from.
            return fit(self.model, [sample for sample in samples if _known(sample, profiles)], profiles)
        name, fitted = from_json(read_text(path).encode(), str(path))
        if name != self.model:
            raise PlanError(f"is a fitted {name!r}, not {self.model!r}; correct one of the two")
        return with_profiles(fitted, profiles)


def read_samples_file(path: Path | str) -> list[Sample]:
    """Read samples of co-located runs from a CSV file. Raises ConfigError."""
    path = Path(path)
    return read_samples(read_text(path).splitlines(keepends=True), str(path))


def read_interference(value: Any, place: str, folder: Path) -> PredictorChoice:
    """Read the key's value. folder: what `fit` is relative to. Raises ConfigError."""
    if value == "none":
        return PredictorChoice("none", place)
    known = check_exclusive(("margin", *PREDICTORS))
    if not isinstance(value, dict):
        raise ConfigError(
            f"{place}: {value!r} is unknown; use 'none' or {{ model = \"margin\", factor = 1.2 }} or {EXAMPLE}"
        )
    try:
        entry = msgspec.convert(value, _Entry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}; write it as {EXAMPLE}") from None
    if entry.model == "margin":
        if value.keys() != {"model", "factor"} or not 1 <= (entry.factor or 0) < float("inf"):
            raise ConfigError(f'{place}: a margin needs a factor of at least 1: {{ model = "margin", factor = 1.2 }}')
        return PredictorChoice("margin", place, factor=float(entry.factor or 1))
    if entry.model not in PREDICTORS:
        raise ConfigError(f"{place}.model: {entry.model!r} is unknown; use {known}")
    if entry.factor is not None:
        raise ConfigError(f"{place}: {entry.model!r} takes no factor, unlike a margin; leave it out")
    if entry.fit is None:
        example = EXAMPLE.replace("gaussian-process", entry.model)
        raise ConfigError(f"{place}: {entry.model!r} has to be fitted to samples of pairs: {example}")
    if entry.quantile is not None and entry.model not in QUANTILES:
        raise ConfigError(
            f"{place}: {entry.model!r} knows no quantiles; leave it out, or use {check_exclusive(QUANTILES)}"
        )
    if entry.quantile is not None and not 0 < entry.quantile < 1:
        raise ConfigError(f"{place}.quantile: {entry.quantile:g} must be between 0 and 1, such as 0.9")
    return PredictorChoice(entry.model, place, fit=folder / entry.fit, quantile=entry.quantile)


def _known(sample: Sample, profiles: Profiles) -> bool:
    return all((load.model, load.kind) in profiles for load in (sample.victim, *sample.colocated))
