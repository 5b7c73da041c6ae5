from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
import pytest

from cotenant.core.profile import Point, Profile
from cotenant.errors import PlanError
from cotenant.predictors import ConstantMargin, Load
from cotenant.predictors.fitting import extrapolated_models
from cotenant.predictors.gaussian_process import MIN_SAMPLES, GaussianProcess, fit
from cotenant.predictors.gp_regression import Terms, covariances
from cotenant.predictors.residuals import names
from cotenant.predictors.samples import Sample

BATCHES, SHARES = (1, 4, 16), (200, 500, 800)
BUSY = {"a": 0.5, "b": 1.0, "c": 2.0, "d": 3.0}


def profile(model: str, *, used: bool = True) -> Profile:
    busy = BUSY[model]
    points = [
        Point(
            share=share,
            batch=batch,
            latency=1e-3 * (1 + busy * batch * 200 / share),
            memory=1,
            features={"l2_util_pct": busy * (5 + batch), "dram_util_pct": 30.0} if used else {},
        )
        for batch in BATCHES
        for share in SHARES
    ]
    return Profile(model, "k", points)


PROFILES = {(name, "k"): profile(name) for name in BUSY}


def truth(victim: Load, colocated: Sequence[Load]) -> float:
    """A victim that waits for the device more suffers more, from neighbours that use more."""
    waits = BUSY[victim.model] * victim.batch / (BUSY[victim.model] * victim.batch + victim.share / 200)
    return math.exp(sum(0.002 * (1 + 2 * waits) * BUSY[it.model] * (5 + it.batch) for it in colocated))


def pairs(names: str = "abcd", noise: float = 0.0) -> list[Sample]:
    rng = np.random.default_rng(5)
    runs = [
        (Load(one, "k", batch, share), (Load(other, "k", rows, 1000 - share),))
        for one in names
        for other in BUSY
        for batch in BATCHES
        for rows in BATCHES
        for share in SHARES
    ]
    return [
        Sample(victim, beside, 0.01, 0.01 * truth(victim, beside) * math.exp(noise * rng.standard_normal()))
        for victim, beside in runs
    ]


@pytest.fixture(scope="module")
def split() -> tuple[GaussianProcess, list[Sample]]:
    """Fitted to part of noisy samples, and the rest."""
    samples = pairs(noise=0.03)
    order = np.random.default_rng(3).permutation(len(samples))
    known, rest = [samples[i] for i in order[:260]], [samples[i] for i in order[260:]]
    return fit(known, PROFILES), rest


def median(ours: GaussianProcess, victim: Load, colocated: Sequence[Load]) -> float:
    return ours.quantiles(victim, colocated, (0.5,))[0]


def test_what_was_held_back_is_predicted(split: tuple[GaussianProcess, list[Sample]]) -> None:
    ours, rest = split
    off = [abs(median(ours, it.victim, it.colocated) / truth(it.victim, it.colocated) - 1) for it in rest]
    assert np.quantile(off, 0.9) < 0.03  # the noise of one sample


def test_quantiles_cover_what_they_say(split: tuple[GaussianProcess, list[Sample]]) -> None:
    ours, rest = split
    wanted = (0.25, 0.5, 0.9)
    found = np.array([ours.quantiles(it.victim, it.colocated, wanted) for it in rest])
    assert (np.diff(found, axis=1) >= 0).all()
    covered = (found >= np.array([[it.slowdown] for it in rest])).mean(axis=0)
    assert covered == pytest.approx(wanted, abs=0.08)  # of 172 samples


def test_planners_get_the_quantile_that_was_asked_for(split: tuple[GaussianProcess, list[Sample]]) -> None:
    ours, rest = split
    victim, beside = rest[0].victim, rest[0].colocated
    assert ours.slowdown(victim, beside) == ours.quantiles(victim, beside, (0.9,))[0]
    assert ours.with_quantile(0.5).slowdown(victim, beside) == median(ours, victim, beside)


def test_nobody_is_slowed_by_nobody_nor_sped_up(split: tuple[GaussianProcess, list[Sample]]) -> None:
    ours, rest = split
    assert ours.slowdown(rest[0].victim, ()) == 1.0
    assert min(ours.quantiles(it.victim, it.colocated, (0.01,))[0] for it in rest) == 1.0


def test_neighbours_add_up(split: tuple[GaussianProcess, list[Sample]]) -> None:
    """The sum of what was only seen one by one."""
    ours, _ = split
    victim = Load("b", "k", 4, 200)
    beside = [Load(name, "k", 4, 800) for name in "acd"]
    assert median(ours, victim, beside) == pytest.approx(truth(victim, beside), rel=0.05)


def test_samples_may_have_several_neighbours() -> None:
    samples = pairs("ab")[::2]
    both = [
        Sample(it.victim, beside, it.alone, it.alone * truth(it.victim, beside))
        for it, other in zip(samples, samples[5:], strict=False)
        if (beside := (*it.colocated, *other.colocated))
    ]
    ours = fit(both, PROFILES)
    off = [abs(median(ours, it.victim, it.colocated) / it.slowdown - 1) for it in both]
    assert np.quantile(off, 0.9) < 0.02
    one = [abs(median(ours, it.victim, it.colocated) / it.slowdown - 1) for it in samples]
    assert np.quantile(one, 0.9) < 0.05


def test_a_model_that_is_new_is_foreseen_by_its_traits() -> None:
    ours = fit(pairs("abc"), PROFILES)
    victim, beside = Load("d", "k", 4, 500), (Load("b", "k", 4, 500),)
    assert median(ours, victim, beside) == pytest.approx(truth(victim, beside), rel=0.1)


def test_a_model_that_is_new_makes_the_answer_wide() -> None:
    """Where models differ in what no trait tells."""
    quirk = {"a": 1.0, "b": 1.3, "c": 1.1}
    samples = [Sample(it.victim, it.colocated, 0.01, it.together * quirk[it.victim.model]) for it in pairs("abc")]
    ours = fit(samples, PROFILES)

    def width(model: str) -> float:
        low, high = ours.quantiles(Load(model, "k", 4, 500), (Load("b", "k", 4, 500),), (0.1, 0.9))
        return math.log(high / low)

    assert width("d") > 5 * width("c")


def test_on_another_kind_of_device_a_model_is_new() -> None:
    """What its name says of it was seen on the one that was measured."""
    samples = pairs("abc")
    on = {(name, "z"): Profile(name, "z", PROFILES[name, "k"].points) for name in "abcd"}
    ours = fit([Sample(it.victim, it.colocated, 0.01, it.together) for it in samples], PROFILES).with_profiles(on)

    def width(kind: str) -> float:
        low, high = ours.quantiles(Load("c", kind, 4, 500), (Load("b", kind, 4, 500),), (0.1, 0.9))
        return math.log(high / low)

    assert width("z") > 2 * width("k")


def test_features_may_be_missing() -> None:
    """With latencies alone, a model is known by its name."""
    bare = {(name, "k"): profile(name, used=False) for name in BUSY}
    samples = pairs()
    ours = fit(samples, bare)
    off = [abs(median(ours, it.victim, it.colocated) / it.slowdown - 1) for it in samples[::5]]
    assert np.quantile(off, 0.9) < 0.02
    some = {**PROFILES, ("d", "k"): bare["d", "k"]}
    assert fit(samples, some).slowdown(samples[-1].victim, samples[-1].colocated) > 1


def test_what_is_observed_corrects_and_leaves_the_old_value_alone(split: tuple[GaussianProcess, list[Sample]]) -> None:
    ours, rest = split
    it, other = rest[0], next(other for other in rest if other.victim.model != rest[0].victim.model)
    before = median(ours, it.victim, it.colocated)
    slower = Sample(it.victim, it.colocated, 0.01, 0.01 * 1.5 * before)
    learning = ours
    for _ in range(30):
        learning = learning.observe(slower)
    assert median(learning, it.victim, it.colocated) == pytest.approx(1.5 * before, rel=0.03)
    assert median(ours, it.victim, it.colocated) == before
    assert median(learning, other.victim, other.colocated) == median(ours, other.victim, other.colocated)
    back = learning
    for _ in range(200):
        back = back.observe(Sample(it.victim, it.colocated, 0.01, 0.01 * before))
    assert median(back, it.victim, it.colocated) == pytest.approx(before, rel=0.03)


def test_one_observation_does_not_outweigh_what_was_measured(split: tuple[GaussianProcess, list[Sample]]) -> None:
    """It may be noise; of a model that was never seen it is the best there is."""
    it, new = split[1][0], Load("d", "k", 4, 500)
    for ours, victim, least, most in ((split[0], it.victim, 0.4, 0.7), (fit(pairs("abc"), PROFILES), new, 0.7, 1.0)):
        before = median(ours, victim, it.colocated)
        once = ours.observe(Sample(victim, it.colocated, 0.01, 0.01 * 1.5 * before))
        moved = math.log(median(once, victim, it.colocated) / before) / math.log(1.5)
        assert least < moved <= most


def test_few_samples_that_are_like_a_pair_tell_nearly_as_much_of_it_as_all(
    split: tuple[GaussianProcess, list[Sample]],
) -> None:
    """And never more."""
    ours, rest = split
    process, posterior = ours._process, ours._posterior
    for it in rest:
        (number, traits), (other, beside) = (
            (ours._names[load.model], ours._features_of[load]) for load in (it.victim, it.colocated[0])
        )
        one, two = posterior.victim(traits, number), posterior.neighbour(beside, other)
        mean, variance = posterior.term(one, two)
        own = Terms(np.concatenate([traits, beside])[None], np.array([number]), np.array([other]), np.array([0]))
        across = covariances(process.prior, own, process.terms)[0]
        assert mean == pytest.approx(process.prior.mean + across @ process.alpha, abs=1e-9)
        exact = covariances(process.prior, own, own)[0, 0] - across @ process.precision @ across
        noise = ours._uncertainties[it.victim.model].noise
        assert 1 - 1e-6 <= math.sqrt((variance + noise) / (exact + noise)) < 1.3


def test_what_is_foreseen_beside_several_is_what_is_beside_each(split: tuple[GaussianProcess, list[Sample]]) -> None:
    """Means and doubts add up; noise, and what is left of the victim's samples, count once."""
    ours, rest = split
    victim, beside = rest[0].victim, [it.colocated[0] for it in rest[:3]]
    means, unsure = zip(*(ours._pair_moments(victim, load) for load in beside), strict=True)
    mean, deviation, doubt = ours._predict(victim, beside)
    assert mean == pytest.approx(sum(means) + ours._residual_modes[victim].of(names(beside)))
    assert deviation**2 == pytest.approx(sum(unsure) ** 2 + doubt.noise)


def test_another_process_gets_the_answers_and_little_else(split: tuple[GaussianProcess, list[Sample]]) -> None:
    ours, rest = split[0].with_quantile(0.9), split[1]
    answers = [ours.slowdown(it.victim, it.colocated) for it in rest]
    sent = copy.copy(ours)  # made of what would be sent
    assert not sent._victims and not sent._neighbours and ours._victims and ours._neighbours
    assert sent.__dict__["_answers"] == ours.__dict__["_answers"]
    assert [sent.with_quantile(0.9).slowdown(it.victim, it.colocated) for it in rest] == answers


def test_where_runs_fall_into_two_groups_the_median_is_in_one() -> None:
    """Whom a load is beside says which, in most runs."""
    rng = np.random.default_rng(0)
    slow = {model: model in "ab" for model in BUSY}
    samples = [
        Sample(it.victim, it.colocated, it.alone, it.together * (1.25 if slow[beside] != (rng.random() < 0.1) else 1))
        for it in pairs("ab", noise=0.01)
        for beside in (it.colocated[0].model,)
    ]
    order = rng.permutation(len(samples))
    ours, rest = fit([samples[i] for i in order[:150]], PROFILES), [samples[i] for i in order[150:]]
    off = [median(ours, it.victim, it.colocated) / truth(it.victim, it.colocated) for it in rest]
    near = [min(abs(it - 1), abs(it / 1.25 - 1)) < 0.05 for it in off]
    right = [(it > 1.12) == slow[sample.colocated[0].model] for it, sample in zip(off, rest, strict=True)]
    assert np.mean(near) > 0.9 and np.mean(right) > 0.9


def test_an_outlier_moves_little() -> None:
    samples = pairs("ab", noise=0.005)
    i = len(samples) // 2
    it = samples[i]
    wild = [*samples[:i], Sample(it.victim, it.colocated, it.alone, 3 * it.together), *samples[i + 1 :]]
    assert median(fit(wild, PROFILES), it.victim, it.colocated) == pytest.approx(it.slowdown, rel=0.1)


def test_a_model_that_nothing_is_known_of_is_named(split: tuple[GaussianProcess, list[Sample]]) -> None:
    with pytest.raises(PlanError, match="'x' on 'k' has neither samples nor a profile"):
        split[0].slowdown(Load("x", "k", 1, 200), (Load("a", "k", 1, 200),))


def test_it_says_whom_it_only_guesses() -> None:
    ours = fit(pairs("abc"), PROFILES)
    loads = [Load("a", "k", 32, 200), Load("a", "k", 33, 200), Load("d", "k", 4, 500), Load("b", "z", 1, 500)]
    assert ours.extrapolated_models(loads) == {
        "a": "samples have it with batches of at most 16",
        "d": "it is the victim in no sample",
        "b": "all samples are of 'k'",
    }
    assert extrapolated_models(ours, loads[:1]) == {}
    assert extrapolated_models(ConstantMargin(1.2), loads) == {}


def test_too_few_samples() -> None:
    with pytest.raises(PlanError, match=f"{MIN_SAMPLES - 1} samples for a predictor that needs {MIN_SAMPLES}"):
        fit(pairs()[: MIN_SAMPLES - 1], PROFILES)
