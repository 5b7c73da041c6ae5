"""Fit predictors by name, and read and write them as readable JSON.

A predictor is a module with `fit(samples, profiles)`, which returns an `Interference`: a struct of plain numbers.
Optional capabilities are the protocols `ProfileAware`, `OnlineLearner`, `ExtrapolationAware` and `QuantilePredictor`.
Classes that are no structs have `to_json` and `from_json`.
"""

from __future__ import annotations

import importlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_type_hints

import msgspec

from cotenant.core.profile import Profiles
from cotenant.errors import ConfigError, PlanError
from cotenant.predictors import ExtrapolationAware, Interference, Load, OnlineLearner, ProfileAware
from cotenant.predictors.samples import Sample

# Name → its fit function.
PREDICTORS = {
    "linear": "cotenant.predictors.linear:fit",
    "kernels": "cotenant.predictors.kernels:fit",
    "kernels-ridge": "cotenant.predictors.kernels:fit_ridge",
    "kernels-forest": "cotenant.predictors.kernels:fit_forest",
    "kernels-network": "cotenant.predictors.kernels:fit_network",
    "kernels-automl": "cotenant.predictors.kernels:fit_automl",
    "svd": "cotenant.predictors.svd:fit",
    "analytic": "cotenant.predictors.analytic:fit",
    "igniter": "cotenant.predictors.igniter:fit",
    "gaussian-process": "cotenant.predictors.gaussian_process:fit",
}

# Names whose predictors are `QuantilePredictor`s.
QUANTILES = ("gaussian-process",)

SENTINELS = (0.1, 0.4)  # seconds: some data sets write 100 or 400 (ms) for pairs that could not run together
MIN_SUSPECT_SAMPLES = 3  # fraction of samples with equal times that are not measurements
MIN_EQUAL_FRACTION = 0.1  # the same, if their batches
MIN_ALONE_RATIO = 2.0  # differ by this factor alone
MAX_PROFILE_RATIO = 10.0  # from the profile's latency, as a factor: no model alone is so far from it on the same device
MAX_SUSPECT_SHARE = 10  # ‰: if no share is larger, they were meant as fractions


def fit(name: str, samples: Sequence[Sample], profiles: Profiles) -> Interference:
    """Fit a predictor by name. Raises PlanError for an unknown name, and for unusable samples."""
    function = _fit_of(name)
    check(samples, profiles)
    fitted: Interference = function(samples, profiles)
    return fitted


def check(samples: Sequence[Sample], profiles: Profiles) -> None:
    """Raise PlanError for samples that no predictor should be fitted to."""
    if not samples:
        raise PlanError(
            "no samples of models with profiles to fit a predictor to; measure pairs with `cotenant profile --pairs`"
        )
    if len(kinds := sorted({sample.victim.kind for sample in samples})) > 1:
        raise PlanError(f"samples of several kinds of devices, {', '.join(kinds)}: give each a file of its own")
    loads = list(dict.fromkeys(load for sample in samples for load in (sample.victim, *sample.colocated)))
    for load in loads:
        profile = profiles.get((load.model, load.kind))
        if profile is None:
            raise PlanError(
                f"model {load.model!r} of the samples has no profile on {load.kind!r}; add it to the profiles, or"
                " remove its samples"
            )
        if load.batch > profile.max_batch:
            raise PlanError(
                f"a sample has {load.model!r} in a batch of {load.batch}, and its profile ends at {profile.max_batch};"
                " profile larger ones, or remove such samples"
            )
    if all(load.share <= MAX_SUSPECT_SHARE for load in loads):
        raise PlanError("no share of the samples is above 1 %; shares are in percent, 25 and not 0.25")
    _check_times(samples, profiles)
    colocated = {load.model for sample in samples for load in sample.colocated}
    if len(colocated) < 2:
        raise PlanError(
            f"all samples have the same co-located model, {', '.join(colocated) or 'none'}: the effect of others cannot"
            " be learnt from them; measure pairs with at least two"
        )


def _check_times(samples: Sequence[Sample], profiles: Profiles) -> None:
    """Raise PlanError for times that are not measurements, or not in milliseconds."""
    by_time: defaultdict[float, list[float]] = defaultdict(list)
    for sample in samples:
        by_time[round(sample.together, 9)].append(sample.alone)
    for time, alone in by_time.items():
        is_suspect = len(alone) >= max(MIN_SUSPECT_SAMPLES, MIN_EQUAL_FRACTION * len(samples)) and max(
            alone
        ) > MIN_ALONE_RATIO * min(alone)
        if is_suspect or (time in SENTINELS and len(alone) >= MIN_SUSPECT_SAMPLES):
            raise PlanError(
                f"{len(alone)} samples took exactly {time * 1e3:g} ms together; some data sets write such a number for"
                " runs that did not fit: remove them, they are not measurements"
            )
    if (duplicates := len(samples) - len(set(samples))) >= MIN_SUSPECT_SAMPLES:
        raise PlanError(
            f"{duplicates} samples are exact duplicates; was the file joined from parts that overlap? Keep one of each"
        )
    if all(sample.together == sample.alone for sample in samples):
        raise PlanError("together_ms equals alone_ms in all samples; nothing was measured under co-location")
    profiled = [
        profiles[each.victim.model, each.victim.kind].latency(each.victim.batch, each.victim.share) for each in samples
    ]
    median_ratio = statistics.median(sample.alone / latency for sample, latency in zip(samples, profiled, strict=True))
    if (
        median_ratio and not 1 / MAX_PROFILE_RATIO < median_ratio < MAX_PROFILE_RATIO
    ):  # 0 where most were not profiled on such shares
        raise PlanError(
            f"models of the samples take {median_ratio:.3g} times as long alone as their profiles say; are both of the"
            " same device, with all times in milliseconds?"
        )


def to_json(name: str, fitted: Interference) -> bytes:
    """Encode as readable JSON: `{"model": name, …}`."""
    fields = msgspec.to_builtins(fitted, str_keys=True, enc_hook=lambda each: each.to_json())
    return msgspec.json.format(msgspec.json.encode({"model": name, **fields}), indent=1)


def from_json(text: bytes, place: str) -> tuple[str, Interference]:
    """Decode the name and the predictor. Raises ConfigError for what `to_json` did not write."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
        name = str(fields.pop("model", None))
        predictor_type = get_type_hints(_fit_of(name))["return"]
        fitted: Interference = msgspec.convert(
            fields, predictor_type, strict=False, str_keys=True, dec_hook=lambda kind, value: kind.from_json(value)
        )
    except (
        msgspec.DecodeError,
        PlanError,
        LookupError,
        ValueError,
    ) as error:  # numbers that do not fit each other, too
        raise ConfigError(f"{place}: is not a fitted predictor: {error}; make one with `cotenant fit`") from None
    return name, fitted


def with_profiles(fitted: Interference, profiles: Profiles) -> Interference:
    """Return the predictor for the models of these profiles, where it learns models from profiles."""
    return fitted.with_profiles(profiles) if isinstance(fitted, ProfileAware) else fitted


def with_observations(fitted: Interference, samples: Sequence[Sample]) -> Interference:
    """Return the predictor corrected by samples measured since it was fitted, where it learns online."""
    for sample in samples:
        if isinstance(fitted, OnlineLearner):
            fitted = fitted.observe(sample)
    return fitted


def extrapolated_models(fitted: Interference, loads: Iterable[Load]) -> dict[str, str]:
    """Return model → why its slowdowns are extrapolated, where the predictor knows how far it reaches."""
    return fitted.extrapolated_models(loads) if isinstance(fitted, ExtrapolationAware) else {}


def _fit_of(name: str) -> Callable[[Sequence[Sample], Profiles], Any]:
    if name not in PREDICTORS:
        raise PlanError(f"no predictor {name!r}; available: {', '.join(PREDICTORS)}")
    module, _, function = PREDICTORS[name].partition(":")
    fit_function: Callable[[Sequence[Sample], Profiles], Any] = getattr(importlib.import_module(module), function)
    return fit_function
