from __future__ import annotations

import numpy as np
import pytest

from cotenant.predictors import Load
from cotenant.predictors.gaussian_process import fit
from cotenant.predictors.gp_regression import GpRegression
from cotenant.predictors.residuals import MIN_SAMPLES, ResidualModes, fit_residual_modes, names, without_each
from tests.predictors.test_gaussian_process import PROFILES, pairs

WIDTH = 0.03


def test_it_is_where_most_are_and_not_between() -> None:
    left = np.array([0.0, 0.01, -0.01, 0.2, 0.21])
    assert ResidualModes(left, [("x",)] * 5, WIDTH).of(("x",)) == pytest.approx(0.0, abs=0.005)


def test_those_beside_the_same_models_count_more() -> None:
    left = np.array([0.0, 0.01, -0.01, 0.2, 0.21])
    remainder = ResidualModes(left, [("x",), ("x",), ("x",), ("y",), ("y",)], WIDTH)
    assert remainder.of(("y",)) == pytest.approx(0.205, abs=0.005)
    for beside in "x", "z":
        assert remainder.of((beside,)) == pytest.approx(0.0, abs=0.005)


def test_no_sample_speaks_for_itself() -> None:
    left = np.array([0.0, 0.0, 0.0, 0.3])
    remainder = ResidualModes(left, [("x",), ("x",), ("x",), ("y",)], WIDTH)
    assert remainder.of(("y",)) == pytest.approx(0.3)
    assert remainder.without_each() == pytest.approx([0.0] * 4)
    assert ResidualModes(left[-MIN_SAMPLES:], [("x",)] * MIN_SAMPLES, WIDTH).without_each() == pytest.approx(
        [0.0] * MIN_SAMPLES
    )


def test_of_few_samples_of_a_load_nothing_is_made() -> None:
    ours = fit(pairs("ab"), PROFILES)
    samples = pairs("ab")
    assert set(fit_residual_modes(ours._process, samples)) == {sample.victim for sample in samples}
    load = samples[0].victim
    own = [i for i, sample in enumerate(samples) if sample.victim == load]
    places = [i for i in range(len(samples)) if i not in own[MIN_SAMPLES - 1 :]]
    it = ours._process
    process = GpRegression(it.prior, it.terms.of(np.array(places)), it.values[places], it.noise_factors[places])
    few = [samples[i] for i in places]
    assert load not in fit_residual_modes(process, few)
    assert not without_each(process, few)[[sample.victim == load for sample in few]].any()


def test_names_of_neighbours_have_no_order() -> None:
    one, other = Load("a", "k", 1, 200), Load("b", "k", 1, 300)
    assert names([one]) == ("a",)
    assert names([other, one]) == names([one, other]) == ("a", "b")
