from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from cotenant.core.profile import Point, Profile
from cotenant.errors import PlanError
from cotenant.predictors import Load, analytic
from cotenant.predictors.analytic import Alone, Analytic, Delay, task_latency
from cotenant.predictors.fitting import from_json, to_json
from cotenant.predictors.samples import Sample

MODEL = Alone(
    transfer=1e-4,
    kernels=50,
    scheduling=1e-6,
    l2_slope=0.4,
    l2_constant=0.05,
    points=tuple((batch, share, 2.0 * batch / share) for batch in (1, 4, 16) for share in (100, 300, 1000)),
)
QUIET = msgspec.structs.replace(MODEL, kernels=10, l2_slope=0.1)
TRUTH = Analytic("gpu", Delay(5e-6, -8e-6), {"a": 0.6, "b": 0.3}, {"a": MODEL, "b": QUIET})


def test_analytic_slowdown_of_known_parameters_equals_formula() -> None:
    """InSS, section 4.1: transfer, scheduling with its delay, and run time with the L2 utilisation of others."""
    victim = Load("a", "gpu", 4, 300)
    alone = 4e-4 + 50 * 1e-6 + 8 / 300
    assert TRUTH.latency(victim, []) == pytest.approx(alone)
    beside = [Load("b", "gpu", 1, 500), Load("a", "gpu", 1, 200)]
    slowed = 4e-4 + 50 * (1e-6 + 3 * 5e-6 - 8e-6) + 8 / 300 * (1 + 0.6 * (0.1 * 0.5 + 0.05 + 0.4 * 0.2 + 0.05))
    assert TRUTH.latency(victim, beside) == pytest.approx(slowed)
    assert TRUTH.slowdown(victim, beside) == pytest.approx(slowed / alone)
    assert TRUTH.slowdown(victim, []) == 1.0


def test_analytic_slowdown_is_never_below_the_least_which_the_mildest_load_causes() -> None:
    victim = Load("a", "gpu", 4, 300)
    beside = [Load("a", "gpu", 1, 700), Load("b", "gpu", 1, 500), Load("b", "gpu", 1, 200)]
    assert TRUTH.least_slowdowns([victim], beside, 700) == [TRUTH.slowdown(victim, beside[2:])]
    for some in (beside[:1], beside[1:], beside[2:], beside):
        assert TRUTH.least_slowdowns([victim], beside, 700)[0] <= TRUTH.slowdown(victim, some)
    # Where a fit has more loads slow less, nothing is known of the least.
    odd = msgspec.structs.replace(TRUTH, cache={"a": -0.6, "b": 0.3})
    assert odd.least_slowdowns([victim], beside, 700) == [1.0]


def test_analytic_run_time_between_points_is_interpolated() -> None:
    """Exact where the time is proportional to batch / share; close at the points of a curve."""
    assert MODEL.running(7, 450) == pytest.approx(2.0 * 7 / 450)
    bent = msgspec.structs.replace(
        MODEL,
        points=tuple((b, s, 1e-3 + 1e-3 * b * 1000 / s) for b in (1, 2, 4, 8, 16) for s in (200, 400, 600, 800, 1000)),
    )
    for batch, share in ((4, 400), (6, 500), (12, 700)):
        assert bent.running(batch, share) == pytest.approx(1e-3 + 1e-3 * batch * 1000 / share, rel=0.02)


def profile(model: str, of: Alone) -> Profile:
    return Profile(
        model,
        "gpu",
        [
            Point(
                share=share,
                batch=batch,
                latency=of.overhead(batch) + seconds,
                memory=0,
                features={
                    "input_bytes": 0.9e6,
                    "output_bytes": 0.1e6,
                    "kernels": of.kernels,
                    "scheduling_us": 1.0,
                    "l2_util_pct": 100 * of.l2(share),
                },
            )
            for batch, share, seconds in of.points
        ],
    )


PROFILES = {("a", "gpu"): profile("a", MODEL), ("b", "gpu"): profile("b", QUIET)}


def samples(*, most: int = 3) -> list[Sample]:
    rng = np.random.default_rng(1)
    found = []
    for i in range(40):
        victim, *beside = (
            Load("ab"[rng.integers(2)], "gpu", int(rng.choice([1, 4, 16])), int(rng.choice([100, 300])))
            for _ in range(2 + i % (most - 1))
        )
        found.append(Sample(victim, tuple(beside), 1.0, TRUTH.slowdown(victim, beside)))
    return found


def test_analytic_fit_to_generated_samples_recovers_parameters() -> None:
    fitted = analytic.fit(samples(), PROFILES)
    assert msgspec.structs.astuple(fitted.delay) == pytest.approx((5e-6, -8e-6))
    assert fitted.cache == pytest.approx({"a": 0.6, "b": 0.3})
    assert fitted.alone["a"].transfer == pytest.approx(1e-4)
    assert (fitted.alone["a"].l2_slope, fitted.alone["a"].l2_constant) == pytest.approx((0.4, 0.05))
    assert from_json(to_json("analytic", fitted), "it.json") == ("analytic", fitted)


def test_analytic_fit_to_pairs_only_has_proportional_delay() -> None:
    fitted = analytic.fit(samples(most=2), PROFILES)
    assert fitted.delay.of(2) == pytest.approx(2e-6)
    assert fitted.delay.of(3) == pytest.approx(4e-6)
    assert fitted.delay.of(1) == 0.0


def test_analytic_without_overhead_columns_counts_all_as_run_time() -> None:
    plain = {
        key: Profile(
            *key,
            [
                msgspec.structs.replace(point, features={"l2_util_pct": point.features["l2_util_pct"]})
                for point in each.points
            ],
        )
        for key, each in PROFILES.items()
    }
    fitted = analytic.fit(samples(), plain)
    assert fitted.alone["a"].overhead(8) == 0.0
    assert fitted.delay == Delay(0.0, 0.0)
    assert fitted.cache["a"] > 0.6  # what was delay now looks like cache


def test_analytic_fit_to_unusable_samples_raises_plan_error() -> None:
    with pytest.raises(PlanError, match="3 samples are fewer than the 4 coefficients"):
        analytic.fit(samples()[:3], PROFILES)
    bare = {("a", "gpu"): Profile("a", "gpu", [Point(share=500, batch=1, latency=0.1, memory=0)])}
    with pytest.raises(PlanError, match="add the column l2_util_pct to its profile"):
        analytic.fit(samples(), bare)
    wrong = Point(share=500, batch=1, latency=1e-5, memory=0, features={"input_bytes": 1e6, "l2_util_pct": 10.0})
    with pytest.raises(PlanError, match="model 'a', batch 1 at 50 %: transfer and scheduling would take longer"):
        analytic.measured(Profile("a", "gpu", [wrong]))
    with pytest.raises(PlanError, match="no samples to fit an analytic model to"):
        analytic.fit([], PROFILES)


def test_analytic_of_unsampled_victim_uses_mean_cache_coefficient() -> None:
    stranger, beside = Load("c", "gpu", 4, 300), [Load("b", "gpu", 4, 300)]
    with pytest.raises(PlanError, match="model 'c' has an unknown L2 utilisation"):
        TRUTH.slowdown(stranger, beside)
    wider = TRUTH.with_profiles(
        {("c", "gpu"): profile("c", MODEL), ("b", "cpu"): Profile("b", "cpu", profile("b", MODEL).points)}
    )
    expected = msgspec.structs.replace(TRUTH, cache={"a": 0.45}).slowdown(Load("a", "gpu", 4, 300), beside)
    assert wider.slowdown(stranger, beside) == pytest.approx(expected)
    assert wider.alone["b"] == TRUTH.alone["b"]  # of another kind


def test_task_latency_adds_queueing_or_batch_filling() -> None:
    """InSS, equation 2."""
    assert task_latency(9, 4, rate=100, executing=0.01, latency=0.02) == pytest.approx(0.01 + 3 * 0.02)
    assert task_latency(4, 4, rate=100, executing=0.0, latency=0.02) == pytest.approx(0.02)
    assert task_latency(1, 4, rate=100, executing=0.01, latency=0.02) == pytest.approx(0.03 + 0.02)
    assert task_latency(3, 4, rate=100, executing=0.05, latency=0.02) == pytest.approx(0.05 + 0.02)
    assert math.isfinite(task_latency(1, 1, rate=0.0, executing=0.0, latency=0.02))
