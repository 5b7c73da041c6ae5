"""Rates over time from public traces that count requests a minute.

The format is that of the Azure Functions trace of 2019 (Shahrad et al., ATC 2020): columns that name a function, then
one for each minute, headed 1, 2, … The trace itself is not part of this project.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable

import numpy as np

from cotenant.errors import ConfigError
from cotenant.workload.arrivals import Floats

MINUTE = 60.0


def read_minutes(lines: Iterable[str], place: str, column: str = "HashFunction") -> dict[str, Floats]:
    """Requests per second in each minute, by the name in `column`; rows of the same name add up.

    Raises ConfigError with `place` and the line.
    """
    rows = csv.reader(lines)
    header = next(rows, [])
    minutes = [index for index, heading in enumerate(header) if heading.strip().isdigit()]
    if column not in header:
        raise ConfigError(f"{place}:1: column {column!r} is missing; there are {', '.join(header) or 'none'}")
    if not minutes:
        raise ConfigError(f"{place}:1: no column is headed by the number of a minute: 1, 2, …")
    name = header.index(column)
    rates: dict[str, Floats] = {}
    for row in rows:
        if len(row) != len(header):
            raise ConfigError(f"{place}:{rows.line_num}: {len(row)} cells where the header names {len(header)}")
        try:
            counts = np.array([float(row[index]) for index in minutes])
        except ValueError as error:
            raise ConfigError(f"{place}:{rows.line_num}: {error}") from None
        if not (np.isfinite(counts).all() and (counts >= 0).all()):
            raise ConfigError(f"{place}:{rows.line_num}: a count is not a finite number of 0 or more")
        rates[row[name]] = rates.get(row[name], np.zeros(len(minutes))) + counts / MINUTE
    return rates


def scaled(rates: Floats, mean: float) -> Floats:
    """The same ups and downs around another mean, in requests per second. All zeros stay as they are."""
    if not (math.isfinite(mean) and mean >= 0):
        raise ConfigError(f"a mean rate of {mean:g} requests/s is none; take 0 or more")
    before = float(rates.mean()) if rates.size else 0.0
    return rates * (mean / before) if before else rates
