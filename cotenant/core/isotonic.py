"""Fit monotone grids to noisy ones: isotonic regression in two dimensions, by least squares."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MAX_ROUNDS = 50
CONVERGED = 1e-4  # largest change in a round at which the fit ends


def isotonic_grid(values: Array) -> Array:
    """Return the grid nearest to `values` whose entries fall along columns and rise along rows; nan stays nan.

    Dykstra's alternating projections on monotone rows and columns (Boyle and Dykstra 1986), each by pooling adjacent
    violators. A monotone grid is returned as it is; otherwise the result is monotone up to about `CONVERGED`.
    """
    fit = values.copy()
    row_corrections, column_corrections = np.zeros_like(fit), np.zeros_like(fit)
    for _ in range(MAX_ROUNDS):
        before = fit
        shifted = before + row_corrections
        fit = _monotone_rows(shifted)
        row_corrections = shifted - fit
        shifted = fit + column_corrections
        fit = _monotone_rows(shifted.T[:, ::-1])[:, ::-1].T
        column_corrections = shifted - fit
        if not np.nanmax(np.abs(fit - before), initial=0.0) > CONVERGED:
            break
    return fit


def _monotone_rows(grid: Array) -> Array:
    """Return for each row the nearest one that rises, over its known entries."""
    fitted = grid.copy()
    for row in fitted:
        known = ~np.isnan(row)
        values = row[known]
        if (values[1:] < values[:-1]).any():
            row[known] = _pooled(values.tolist())
    return fitted


def _pooled(values: Iterable[float]) -> list[float]:
    """Return the nearest rising sequence, by pooling adjacent violators (Ayer et al. 1955)."""
    blocks: list[tuple[float, int]] = []  # mean and length
    for value in values:
        mean, many = value, 1
        while blocks and blocks[-1][0] > mean:
            earlier, length = blocks.pop()
            mean = (mean * many + earlier * length) / (many + length)
            many += length
        blocks.append((mean, many))
    return [mean for mean, many in blocks for _ in range(many)]
