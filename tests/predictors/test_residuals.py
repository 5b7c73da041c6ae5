from __future__ import annotations

import numpy as np
import pytest

from cotenant.predictors import Load
from cotenant.predictors.gaussian_process import fit
from cotenant.predictors.gp_regression import GpRegression
from cotenant.predictors.residuals import (
    MIN_SAMPLES,
    TOWARDS_MEAN,
    ResidualModes,
    fit_residual_modes,
    names,
    without_each,
)
from tests.predictors.test_gaussian_process import PROFILES, pairs

WIDTH = 0.03


def test_residual_mode_of_two_groups_lies_in_the_larger() -> None:
    residuals = np.array([0.0, 0.01, -0.01, 0.2, 0.21])
    expected = TOWARDS_MEAN * residuals.mean()  # from a mode at 0
    assert ResidualModes(residuals, [("x",)] * 5, WIDTH).of(("x",)) == pytest.approx(expected, abs=0.005)


def test_residual_mode_weighs_same_colocated_models_more() -> None:
    residuals = np.array([0.0, 0.01, -0.01, 0.2, 0.21])
    modes = ResidualModes(residuals, [("x",), ("x",), ("x",), ("y",), ("y",)], WIDTH)
    for beside, mode, mean in (("y", 0.205, 2.05 / 13), ("x", 0.0, 0.41 / 17), ("z", 0.0, 0.082)):
        assert modes.of((beside,)) == pytest.approx(mode + TOWARDS_MEAN * (mean - mode), abs=0.005)


def test_residual_modes_without_each_exclude_the_sample() -> None:
    residuals = np.array([0.0, 0.0, 0.0, 0.3])
    modes = ResidualModes(residuals, [("x",), ("x",), ("x",), ("y",)], WIDTH)
    assert modes.of(("y",)) == pytest.approx(0.3 + TOWARDS_MEAN * (0.3 * 5 / 8 - 0.3))
    with_the_last = TOWARDS_MEAN * 0.3 / 11
    assert modes.without_each() == pytest.approx([with_the_last] * 3 + [0.0])
    assert ResidualModes(residuals[-MIN_SAMPLES:], [("x",)] * MIN_SAMPLES, WIDTH).without_each() == pytest.approx(
        [0.0] * MIN_SAMPLES
    )


def test_fit_residual_modes_of_few_samples_returns_none() -> None:
    predictor = fit(pairs("ab"), PROFILES)
    samples = pairs("ab")
    assert set(fit_residual_modes(predictor._process, samples)) == {sample.victim for sample in samples}
    load = samples[0].victim
    own = [i for i, sample in enumerate(samples) if sample.victim == load]
    places = [i for i in range(len(samples)) if i not in own[MIN_SAMPLES - 1 :]]
    it = predictor._process
    process = GpRegression(it.prior, it.terms.of(np.array(places)), it.values[places], it.noise_factors[places])
    few = [samples[i] for i in places]
    assert load not in fit_residual_modes(process, few)
    assert not without_each(process, few)[[sample.victim == load for sample in few]].any()


def test_names_of_colocated_loads_ignore_order() -> None:
    one, other = Load("a", "k", 1, 200), Load("b", "k", 1, 300)
    assert names([one]) == ("a",)
    assert names([other, one]) == names([one, other]) == ("a", "b")
