from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from cotenant.core.profile import Point, Profile
from cotenant.errors import PlanError
from cotenant.predictors import Load, igniter
from cotenant.predictors.analytic import Delay
from cotenant.predictors.fitting import from_json, to_json
from cotenant.predictors.igniter import Active, Coefficients, Igniter, LinearTerm, Measured, Throttle
from cotenant.predictors.samples import Sample

MODEL = Coefficients(
    transfer=1e-5,
    kernels=50,
    idle=0.0,
    active=Active(1e-6, 5e-4, 1e-3, float(igniter.K4[60]), 2e-3),
    l2=LinearTerm(2e-4, 0.05),
    power=LinearTerm(0.0, 0.0),
    cache=0.5,
)
OTHER = msgspec.structs.replace(MODEL, active=Active(0.0, 1e-3, 1e-3, 0.0, 1e-3), cache=0.2)
TRUTH = Igniter("gpu", {"a": MODEL, "b": OTHER}, Delay(5e-6, -8e-6))


def test_igniter_latency_of_published_coefficients_equals_formula() -> None:
    victim, beside = Load("b", "gpu", 4, 500), Load("b", "gpu", 1, 250)
    own, other = (4e-3 + 1e-3) / 0.5 + 1e-3, (1e-3 + 1e-3) / 0.25 + 1e-3
    assert TRUTH.latency(victim, []) == pytest.approx(own + 4e-5)
    slowed = own * (1 + 0.2 * (2e-4 / other + 0.05)) + 50 * (2 * 5e-6 - 8e-6)
    assert TRUTH.latency(victim, [beside]) == pytest.approx(slowed + 4e-5)
    assert TRUTH.slowdown(victim, [beside]) == pytest.approx((slowed + 4e-5) / (own + 4e-5))


def test_igniter_above_power_limit_lowers_frequency() -> None:
    hungry = msgspec.structs.replace(OTHER, power=LinearTerm(0.0, 200.0))
    hot = Igniter("gpu", {"b": hungry}, Delay(0.0, 0.0), Throttle(idle=50, most=300, slope=-0.001))
    load = Load("b", "gpu", 4, 500)
    cool = msgspec.structs.replace(hot, throttle=None)
    assert hot.latency(load, []) == cool.latency(load, [])
    transfer = 4e-5
    assert hot.latency(load, [load]) - transfer == pytest.approx((cool.latency(load, [load]) - transfer) / 0.85)
    assert math.isfinite(hot.latency(load, [load] * 20))


def profile(model: str, of: Coefficients) -> Profile:
    points = []
    for batch in (1, 4, 16, 32):
        for share in (100, 300, 500, 1000):
            active = of.active.at(batch, share / 1000)
            features = {"input_bytes": 1e5, "kernels": 50.0, "l2_util_pct": 100 * of.l2.at(batch / active)}
            points.append(Point(share=share, batch=batch, latency=active + batch * 1e-5, memory=0, features=features))
    return Profile(model, "gpu", points)


PROFILES = {("a", "gpu"): profile("a", MODEL), ("b", "gpu"): profile("b", OTHER)}


def test_igniter_fit_to_generated_samples_recovers_coefficients() -> None:
    rng = np.random.default_rng(2)
    runs = [
        [Load("ab"[rng.integers(2)], "gpu", int(rng.choice([1, 16])), 300) for _ in range(2 + i % 2)] for i in range(30)
    ]
    samples = [Sample(v, tuple(beside), 1.0, TRUTH.slowdown(v, beside)) for v, *beside in runs]
    fitted = igniter.fit(samples, PROFILES)
    assert msgspec.structs.astuple(fitted.delay) == pytest.approx((5e-6, -8e-6), rel=1e-3)
    for name in "ab":
        assert fitted.models[name].cache == pytest.approx(TRUTH.models[name].cache, rel=1e-3)
        found, made = fitted.models[name].active, TRUTH.models[name].active
        assert found.at(8, 0.4) == pytest.approx(made.at(8, 0.4))
    assert from_json(to_json("igniter", fitted), "it.json") == ("igniter", fitted)


def test_igniter_fit_to_unusable_samples_raises_plan_error() -> None:
    with pytest.raises(PlanError, match="4 points are fewer than the 5 coefficients"):
        igniter.active(Measured(np.ones(4), np.ones(4), np.ones(4)))
    few = {**PROFILES, ("c", "gpu"): Profile("c", "gpu", PROFILES["a", "gpu"].points[:4])}
    with pytest.raises(PlanError, match="model 'c': 4 points are fewer than the 5 coefficients"):
        igniter.fit([Sample(Load("a", "gpu", 1, 500), (Load("b", "gpu", 1, 500),), 1.0, 1.1)], few)
    with pytest.raises(
        PlanError, match="model 'c' has no iGniter coefficients; add the column l2_util_pct to its profile"
    ):
        TRUTH.slowdown(Load("c", "gpu", 1, 500), [Load("a", "gpu", 1, 500)])
    with pytest.raises(PlanError, match="no samples to fit an analytic model to"):
        igniter.fit([], PROFILES)


def test_igniter_of_unsampled_victim_uses_mean_cache_coefficient() -> None:
    stranger, beside = Load("c", "gpu", 4, 300), [Load("b", "gpu", 4, 300)]
    wider = TRUTH.with_profiles({("c", "gpu"): profile("c", OTHER)})
    expected = Igniter("gpu", TRUTH.models | {"b": OTHER, "c": msgspec.structs.replace(OTHER, cache=0.35)}, TRUTH.delay)
    assert wider.slowdown(stranger, beside) == pytest.approx(expected.slowdown(stranger, beside), rel=1e-3)
