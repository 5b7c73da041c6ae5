"""iGniter's published coefficients against another campaign of its authors, 750 pairs that none were fitted to."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant.predictors import analytic, igniter
from cotenant.published import v100
from experiments.data import igniter as published
from tests.experiments.data import needs_data

pytestmark = needs_data


def test_igniter_co_located_latencies_are_close_to_measurements() -> None:
    model, pairs = published.coefficients(), v100.pairs()
    off = [abs(model.latency(each.victim, each.colocated) / each.together - 1) for each in pairs]
    assert np.mean(off) < 0.04
    assert np.percentile(off, 90) < 0.09
    slowed = [abs(model.slowdown(each.victim, each.colocated) / each.slowdown - 1) for each in pairs]
    assert np.percentile(slowed, 90) < 0.10


def test_igniter_delay_fitted_to_pairs_equals_the_published_one() -> None:
    """Published: 4.75 µs a kernel for each model more. From pairs: what two cost more than one."""
    expected = published.coefficients().delay.slope
    for module in (analytic, igniter):
        fitted = module.fit(v100.pairs(), published.profiles())
        assert fitted.delay.slope == pytest.approx(expected, rel=0.1)
