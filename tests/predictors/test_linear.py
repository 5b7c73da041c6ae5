from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.profile import Point, Profile
from cotenant.errors import PlanError
from cotenant.predictors import Load
from cotenant.predictors.linear import DRAM, L2, Coefficients, Linear, Utilisation, fit, least_squares
from cotenant.predictors.samples import Sample

# The published program's constants for an RTX 2080 Ti (casys-kaist/glet, INT_MODEL_CONSTANT.CSV).
PUBLISHED = Coefficients(
    l2_victim=0.11291, l2_colocated=0.71596, dram_victim=0.35487, dram_colocated=0.08820, constant=0.89537
)
USED = {
    "a": Utilisation("a", {(1, 200): (0.1, 0.2), (1, 1000): (0.5, 0.4), (9, 200): (0.3, 0.6), (9, 1000): (0.7, 0.8)}),
    "b": Utilisation("b", {(4, 500): (0.25, 0.5)}),
}
loads = st.builds(Load, st.sampled_from(("a", "b")), st.just("k"), st.integers(1, 40), st.integers(1, 1000))


def test_linear_slowdown_of_known_coefficients_equals_formula() -> None:
    """gpulet paper, section 4.4, with one co-located model."""
    found = Linear(PUBLISHED, USED).slowdown(Load("a", "k", 9, 1000), [Load("b", "k", 4, 500)])
    assert found == pytest.approx(0.11291 * 0.7 + 0.71596 * 0.25 + 0.35487 * 0.8 + 0.08820 * 0.5 + 0.89537)


def test_linear_slowdown_is_at_least_1() -> None:
    assert Linear(PUBLISHED, USED).slowdown(Load("a", "k", 9, 1000), []) == 1.0
    quiet = msgspec.structs.replace(PUBLISHED, constant=0.1)
    assert Linear(quiet, USED).slowdown(Load("a", "k", 1, 200), [Load("b", "k", 4, 500)]) == 1.0


@given(loads, st.lists(loads, min_size=1, max_size=3), loads)
def test_linear_slowdown_grows_with_colocated_loads(victim: Load, colocated: list[Load], another: Load) -> None:
    linear = Linear(PUBLISHED, USED)
    assert 1 <= linear.slowdown(victim, colocated) <= linear.slowdown(victim, [*colocated, another])


@pytest.mark.parametrize("coefficients", [PUBLISHED, msgspec.structs.replace(PUBLISHED, l2_colocated=-0.5)])
@given(victim=loads, colocated=st.lists(loads, min_size=1, max_size=4), others=st.lists(loads, max_size=3))
def test_linear_slowdown_is_never_below_the_least(
    coefficients: Coefficients, victim: Load, colocated: list[Load], others: list[Load]
) -> None:
    linear, room = Linear(coefficients, USED), sum(load.share for load in colocated)
    (least,) = linear.least_slowdowns([victim], [*colocated, *others], room)
    assert 1 <= least <= linear.slowdown(victim, colocated) * (1 + 1e-12)


def test_least_linear_slowdown_is_that_of_the_mildest_load() -> None:
    linear, victim = Linear(PUBLISHED, USED), Load("a", "k", 9, 400)
    mild, strong = Load("a", "k", 1, 200), Load("a", "k", 9, 600)
    assert linear.least_slowdowns([victim], [strong, mild], 600) == [linear.slowdown(victim, [mild])]


def test_utilisation_between_and_beyond_points_is_interpolated_or_constant() -> None:
    used = USED["a"]
    assert used.at(5, 200) == pytest.approx((0.2, 0.4))
    assert used.at(1, 600) == pytest.approx((0.3, 0.3))
    assert used.at(5, 600) == pytest.approx((0.4, 0.5))
    assert used.at(64, 100) == pytest.approx((0.3, 0.6))


def test_utilisation_of_profile_converts_percent_to_fractions() -> None:
    features = {"l2_util_pct": 30.0, "dram_util_pct": 40.0, "sm_util_pct": 90.0}
    point = Point(share=500, batch=4, latency=0.01, memory=1, features=features)
    bare = Point(share=500, batch=8, latency=0.02, memory=1)
    assert Utilisation.of(Profile("m", "k", [point, bare])).at(8, 500) == pytest.approx((0.3, 0.4))
    with pytest.raises(PlanError, match="'m'"):
        Utilisation.of(Profile("m", "k", [bare]))


def test_linear_of_unknown_model_raises_plan_error() -> None:
    with pytest.raises(PlanError, match="'c'"):
        Linear(PUBLISHED, USED).slowdown(Load("a", "k", 1, 200), [Load("c", "k", 1, 200)])


def test_linear_fit_to_generated_samples_recovers_coefficients() -> None:
    rng = np.random.default_rng(7)
    points = {(b, s): (rng.random(), rng.random()) for b in (1, 8, 32) for s in (200, 500, 800)}
    more = {(b, s): (rng.random(), rng.random()) for b in (1, 8, 32) for s in (200, 500, 800)}
    used = {"a": Utilisation("a", points), "b": Utilisation("b", more)}
    slow = msgspec.structs.replace(PUBLISHED, constant=1.0)  # no sample is clamped
    truth = Linear(slow, used)
    runs = [
        (
            Load("ab"[i % 2], "k", int(rng.integers(1, 33)), 500),
            tuple(Load("ab"[i % 3 % 2], "k", 8, 200) for _ in range(1 + i % 2)),
        )
        for i in range(60)
    ]
    found = least_squares(
        [Sample(victim, beside, 1.0, truth.slowdown(victim, beside)) for victim, beside in runs], used
    )
    assert msgspec.structs.astuple(found) == pytest.approx(msgspec.structs.astuple(slow))


def test_linear_fit_to_too_few_samples_raises_plan_error() -> None:
    sample = Sample(Load("a", "k", 1, 200), (Load("b", "k", 8, 200),), 1.0, 1.1)
    for samples in ([], [sample] * 4):
        with pytest.raises(PlanError, match="5 coefficients"):
            least_squares(samples, USED)


def test_linear_fit_reads_utilisation_from_profiles() -> None:
    def profile(model: str, l2: float) -> Profile:
        points = [
            Point(share=500, batch=batch, latency=0.01, memory=1, features={L2: l2 * batch, DRAM: 30.0 + batch})
            for batch in (1, 8)
        ]
        return Profile(model, "k", points)

    profiles = {(name, "k"): profile(name, l2) for name, l2 in (("a", 1.0), ("b", 4.0))}
    samples = [
        Sample(Load(one, "k", x, 500), (Load(other, "k", y, 500),), 1.0, 1.0 + 0.01 * x * y)
        for one, other in ("ab", "ba")
        for x in (1, 8)
        for y in (1, 8)
    ]
    fitted = fit(samples, profiles)
    assert fitted.utilisation["b"].at(8, 500) == pytest.approx((0.32, 0.38))
    with pytest.raises(PlanError, match="'c'"):
        fitted.slowdown(Load("c", "k", 1, 500), [Load("a", "k", 1, 500)])
    more = fitted.with_profiles({("c", "k"): profile("c", 2.0)})
    assert more.slowdown(Load("c", "k", 1, 500), [Load("a", "k", 1, 500)]) >= 1
