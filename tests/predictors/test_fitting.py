from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from cotenant.core.profile import Point, Profile
from cotenant.errors import ConfigError, PlanError
from cotenant.predictors import (
    ConstantMargin,
    ExtrapolationAware,
    Load,
    NoInterference,
    OnlineLearner,
    ProfileAware,
    QuantilePredictor,
)
from cotenant.predictors.fitting import (
    PREDICTORS,
    QUANTILES,
    fit,
    from_json,
    to_json,
    with_observations,
    with_profiles,
)
from cotenant.predictors.linear import DRAM, L2
from cotenant.predictors.samples import Sample

SLOW = ("kernels-forest", "kernels-automl")  # to fit
QUICK = tuple(name for name in PREDICTORS if name not in SLOW)
BATCHES, SHARES = (1, 4, 16), (200, 500, 800)


def profile(model: str, busy: float) -> Profile:
    points = [
        Point(
            share=share,
            batch=batch,
            latency=1e-3 * (1 + batch / busy) * (0.2 + 800 / share),
            memory=1,
            features={L2: busy * batch * share / 1000, DRAM: busy * (5 + batch)},
        )
        for batch in BATCHES
        for share in SHARES
    ]
    return Profile(model, "k", points)


PROFILES = {(name, "k"): profile(name, busy) for name, busy in (("a", 1.0), ("b", 2.5), ("c", 4.0))}


def pairs() -> list[Sample]:
    """All pairs; slowdowns grow with the co-located load's utilisation, batch and share."""
    return [
        Sample(
            victim := Load(one, "k", batch, share),
            (Load(other, "k", rows, 1000 - share),),
            alone := PROFILES[victim.model, "k"].latency(batch, share),
            alone * (1.02 + 4e-6 * PROFILES[other, "k"].features(rows, 1000 - share)[L2] * (1000 - share)),
        )
        for one in "abc"
        for other in "abc"
        if one != other
        for batch in BATCHES
        for rows in BATCHES
        for share in SHARES
    ]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_predictor_read_from_json_predicts_the_same(name: str) -> None:
    samples = pairs()
    fitted = fit(name, samples, PROFILES)
    written = to_json(name, fitted)
    again, found = from_json(written, "fitted.json")
    assert (again, msgspec.json.decode(written)["model"]) == (name, name)
    for sample in samples[::7]:
        expected = fitted.slowdown(sample.victim, sample.colocated)
        assert expected >= 1
        assert found.slowdown(sample.victim, sample.colocated) == pytest.approx(expected)


@pytest.mark.parametrize("name", QUICK)
def test_with_profiles_of_more_models_keeps_predictions(name: str) -> None:
    """Adding models leaves predictions for the others unchanged."""
    fitted = fit(name, pairs(), PROFILES)
    more = with_profiles(fitted, {**PROFILES, ("d", "k"): profile("d", 3.0)})
    load, beside = Load("a", "k", 4, 200), (Load("b", "k", 4, 800),)
    assert more.slowdown(load, beside) == pytest.approx(fitted.slowdown(load, beside))


def test_with_observations_moves_online_learners_only() -> None:
    load, beside = Load("a", "k", 4, 200), (Load("b", "k", 4, 800),)
    for fitted in (fit("gaussian-process", pairs(), PROFILES), fit("linear", pairs(), PROFILES), ConstantMargin(1.2)):
        before = fitted.slowdown(load, beside)
        seen = [Sample(load, beside, 0.01, 0.01 * 1.5 * before)] * 9
        after = with_observations(fitted, seen).slowdown(load, beside)
        assert after > 1.3 * before if isinstance(fitted, OnlineLearner) else after == before
        assert fitted.slowdown(load, beside) == before


@pytest.mark.parametrize("name", QUICK)
def test_predictor_by_name_offers_the_protocols_stated_for_it(name: str) -> None:
    fitted = fit(name, pairs(), PROFILES)
    assert fitted.interferes
    assert isinstance(fitted, ProfileAware) == (name != "svd")
    assert isinstance(fitted, QuantilePredictor) == (name in QUANTILES)
    assert isinstance(fitted, OnlineLearner) == isinstance(fitted, ExtrapolationAware) == (name == "gaussian-process")


def test_margin_interferes_only_above_1() -> None:
    assert [ConstantMargin(factor).interferes for factor in (1.0, 1.2)] == [False, True]
    assert not NoInterference().interferes


@pytest.mark.parametrize("name", QUICK)
def test_profiles_of_another_kind_change_no_prediction(name: str) -> None:
    """Models differ between kinds of devices: predictions for another kind are errors or less certain."""
    busier = {(model, "z"): Profile(model, "z", profile(model, 9.0).points) for model in "abc"}
    one, other = fit(name, pairs(), PROFILES), fit(name, pairs(), {**PROFILES, **busier})
    load, beside = Load("a", "k", 4, 200), (Load("b", "k", 4, 800),)
    expected = one.slowdown(load, beside)
    assert other.slowdown(load, beside) == pytest.approx(expected)
    assert with_profiles(one, busier).slowdown(load, beside) == pytest.approx(expected)
    if name in ("linear", "analytic", "igniter", "svd"):
        with pytest.raises(PlanError, match="'a' on 'z'"):
            other.slowdown(Load("a", "z", 4, 200), (Load("b", "z", 4, 800),))


def scaled(sample: Sample, factor: float) -> Sample:
    return replace(sample, alone=factor * sample.alone, together=factor * sample.together)


def shrunk(sample: Sample) -> Sample:
    """Return the samples with shares as fractions, misread as percent."""
    victim, *colocated = (replace(it, share=max(1, it.share // 100)) for it in (sample.victim, *sample.colocated))
    return replace(sample, victim=victim, colocated=tuple(colocated))


def test_check_of_unusable_samples_raises_plan_error() -> None:
    samples = pairs()
    only = [sample for sample in samples if sample.colocated[0].model == "b"]
    failed = [Sample(it.victim, it.colocated, 0.01, 0.4) for it in samples[:3]]
    for given, words in (
        ([], "no samples"),
        (only, "same co-located model, b"),
        (samples + failed, "3 samples took exactly 400 ms together"),
        ([*samples[::2], *(replace(it, together=0.5) for it in samples[1::2])], "took exactly 500 ms together"),
        (samples + samples[:3], "3 samples are exact duplicates; .* Keep one of each"),
        ([replace(it, together=it.alone) for it in samples], "together_ms equals alone_ms in all samples"),
        ([scaled(it, 1e-3) for it in samples], "take 0.001 times as long alone as their profiles say; .* milliseconds"),
        ([replace(it, victim=replace(it.victim, batch=99)) for it in samples], "'a' in a batch of 99, .* ends at 16"),
        ([shrunk(it) for it in samples], "no share of the samples is above 1 %; shares are in percent, 25 and not"),
        ([*samples, Sample(Load("x", "k", 1, 200), (Load("a", "k", 1, 200),), 1, 1)], "'x' of the samples has no"),
        ([*samples, Sample(Load("x", "z", 1, 200), (Load("a", "z", 1, 200),), 1, 1)], "several kinds of devices, k, z"),
    ):
        with pytest.raises(PlanError, match=words):
            fit("linear", given, PROFILES)
    with pytest.raises(PlanError, match="no predictor 'magic'; available: linear"):
        fit("magic", samples, PROFILES)


REJECTED = r"^fitted\.json: is not a fitted predictor: .*; make one with `cotenant fit`$"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": "magic"}', '{"model": "linear", "coefficients": 3}'])
def test_from_json_of_other_files_raises_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=REJECTED):
        from_json(text.encode(), "fitted.json")


def test_from_json_of_truncated_files_raises_config_error() -> None:
    linear = msgspec.json.decode(to_json("linear", fit("linear", pairs(), PROFILES)))
    del linear["utilisation"]["a"]["model"]
    ours = msgspec.json.decode(to_json("gaussian-process", fit("gaussian-process", pairs(), PROFILES)))
    for file in (linear, {**ours, "loads": ours["loads"][:1]}, {**ours, "samples": []}):
        with pytest.raises(ConfigError, match=REJECTED):
            from_json(msgspec.json.encode(file), "fitted.json")
