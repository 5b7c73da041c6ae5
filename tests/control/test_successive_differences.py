"""The variance of the latest values, from their successive differences."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant.control.successive_differences import SuccessiveDifferences


@pytest.mark.parametrize("most", [2, 3, 20])
@pytest.mark.parametrize("seed", range(3))
def test_variance_is_that_of_the_latest_values(most: int, seed: int) -> None:
    """Few different values, so that many differences are equal."""
    values = np.random.default_rng(seed).integers(0, 6, 200).astype(float)
    window = SuccessiveDifferences(most)
    for n, value in enumerate(values, 1):
        window.append(value)
        latest = values[max(0, n - most) : n]
        assert list(window.values) == latest.tolist()
        squares = np.sort(np.diff(latest) ** 2)
        for steps in range(min(3, len(squares))):
            assert window.variance(steps) == pytest.approx(squares[: len(squares) - steps].mean() / 2)


def test_variance_leaves_steps_out() -> None:
    window = SuccessiveDifferences(100)
    for value in [5.0, 7.0] * 10 + [105.0, 107.0] * 10:
        window.append(value)
    assert window.variance(0) > 100.0
    assert window.variance(1) == 2.0
