from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.isotonic import isotonic_grid

grids = st.integers(1, 4).flatmap(
    lambda columns: st.lists(
        st.lists(st.floats(-5, 5), min_size=columns, max_size=columns), min_size=1, max_size=4
    ).map(np.array)
)


def test_isotonic_grid_of_a_row_is_by_pooling_adjacent_violators() -> None:
    fitted = isotonic_grid(np.array([[1.0, 3.0, 2.0, 2.0, 5.0, 4.0, 6.0]]))
    assert fitted.tolist()[0] == pytest.approx([1, 7 / 3, 7 / 3, 7 / 3, 4.5, 4.5, 6])


def test_isotonic_grid_pools_over_rows_and_columns() -> None:
    # Every other entry would have to be at least the first of the last row, so all are their mean.
    assert isotonic_grid(np.array([[1.0, 1.0], [5.0, 1.0]])) == pytest.approx(np.full((2, 2), 2.0), abs=1e-3)


@given(grids)
def test_isotonic_grid_is_monotone_and_nearer_than_any_other(values: np.ndarray) -> None:
    fitted = isotonic_grid(values)
    assert (np.diff(fitted, axis=1) >= -1e-2).all()
    assert (np.diff(fitted, axis=0) <= 1e-2).all()
    # The projection onto a cone: what is left is orthogonal to the fit, and at no acute angle to any monotone grid.
    left = values - fitted
    rows, columns = values.shape
    assert float((left * fitted).sum()) == pytest.approx(0, abs=0.2)
    for n in range(rows):
        for m in range(columns):
            corner = np.zeros_like(values)
            corner[: n + 1, m:] = 1
            assert float((left * corner).sum()) <= 0.05


def test_isotonic_grid_returns_a_monotone_grid_unchanged_and_skips_unknown_entries() -> None:
    monotone = np.array([[2.0, math.nan, 7.0], [1.0, 2.0, math.nan]])
    np.testing.assert_array_equal(isotonic_grid(monotone), monotone)
