from __future__ import annotations

import numpy as np
import pytest

from cotenant.predictors import Load
from cotenant.predictors.calibration import KNOTS, NORMAL, PRIOR_ERRORS, Calibration, QuantileTables, pooled_table

RNG = np.random.default_rng(0)


def quantile(table: list[float], probability: float) -> float:
    return float(np.interp(probability, KNOTS, table))


def test_pooled_table_of_no_errors_is_the_prior() -> None:
    assert quantile(pooled_table(np.empty(0), NORMAL), 0.5) == pytest.approx(0, abs=1e-9)
    assert quantile(pooled_table(np.empty(0), NORMAL), 0.9) == pytest.approx(1.28, abs=0.25)  # of ten errors


def test_pooled_table_of_many_errors_is_theirs() -> None:
    errors = 10 + RNG.standard_normal(100 * PRIOR_ERRORS)
    assert quantile(pooled_table(errors, NORMAL), 0.9) == pytest.approx(11.28, abs=0.2)


def test_quantile_tables_tell_loads_and_models_apart() -> None:
    """One model has wide errors, and one of its loads runs in two groups."""
    narrow, wide, split = Load("a", "k", 1, 500), Load("b", "k", 1, 500), Load("b", "k", 8, 500)
    victims = [narrow] * 200 + [wide] * 200 + [split] * 60
    errors = np.concatenate((RNG.normal(0, 0.5, 200), RNG.normal(0, 2, 200), RNG.choice([-1.0, 6.0], 60)))
    seen = np.quantile(errors, KNOTS).tolist()
    tables = QuantileTables(Calibration(seen, [9.0] * len(KNOTS), errors.tolist()), victims)
    for load, expected in ((narrow, 0.64), (wide, 2.56), (split, 6.0)):
        assert quantile(tables.of(load), 0.9) == pytest.approx(expected, rel=0.3)
    assert quantile(tables.of(Load("b", "k", 4, 500)), 0.9) > 2  # a load that was not sampled, of a model that was
    assert quantile(tables.of(split), 0.5) == pytest.approx(quantile(seen, 0.5))
    assert tables.of(Load("c", "k", 1, 500)) == [9.0] * len(KNOTS)


def test_quantile_tables_of_a_file_without_errors_are_those_of_all_samples() -> None:
    table = list(NORMAL)
    tables = QuantileTables(Calibration(table, [9.0] * len(KNOTS)), [Load("a", "k", 1, 500)])
    assert tables.of(Load("a", "k", 1, 500)) == table
    assert tables.of(Load("b", "k", 1, 500)) == [9.0] * len(KNOTS)
