"""Generate fleets and models to train `inss-plus` on, so that every measured model is one that it has not seen.

A batch of b on a share s takes ((a + c·b) / s^e + u) ms, with a, c, u and e drawn for each model, and targets of 1.2 to
4 times the latency of a batch of 16 on a whole device. Latencies under co-location are a constant factor longer.
"""

from __future__ import annotations

import numpy as np

from cotenant.core.model import Kind, Model
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem
from cotenant.predictors import ConstantMargin

TENTHS = tuple(range(100, 1001, 100))
GPULETS = (200, 400, 500, 600, 800, 1000)
LEAST_SLO = 2.6  # times the latency of one row on a whole device, of which twice is a worst case
BATCHES = (1, 2, 4, 8, 16, 32)


def generated(seed: int) -> Problem:
    """Return a problem of 3 to 10 models on 2 to 6 devices; its rates are not meant."""
    rng = np.random.default_rng([seed, 17])
    cuts = TENTHS if rng.random() < 0.5 else GPULETS
    names = [f"g{n}" for n in range(int(rng.integers(3, 11)))]
    profiles, models = {}, []
    for name in names:
        profile = _profile(name, cuts, rng)
        profiles[name, "g"] = profile
        slo = max(rng.uniform(1.2, 4.0) * profile.latency(16, 1000), LEAST_SLO * profile.latency(1, 1000))
        models.append(Model(name=name, slo=float(slo)))
    return Problem(
        models=tuple(models),
        rates=dict.fromkeys(names, 1.0),
        fleet=(Kind(name="g", count=int(rng.integers(2, 7)), cuts=cuts),),
        profiles=profiles,
        interference=ConstantMargin(float(rng.uniform(1.0, 1.3))),
        arrivals="even",
    )


def _profile(name: str, cuts: tuple[int, ...], rng: np.random.Generator) -> Profile:
    size, exponent = float(np.exp(rng.uniform(np.log(0.3), np.log(8.0)))), float(rng.uniform(0.6, 1.0))
    fixed, row, unscaled = size * rng.uniform(0.5, 2), size * rng.uniform(0.05, 0.4), size * rng.uniform(0.1, 1)
    points = [
        Point(
            share=share,
            batch=batch,
            latency=float((fixed + row * batch) / (share / 1000) ** exponent + unscaled) / 1e3,
            memory=0,
        )
        for share in cuts
        for batch in BATCHES
    ]
    return Profile(name, "g", points)
