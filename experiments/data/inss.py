"""Read Tables 2 and 3 of InSS (2023): latencies observed and predicted on RTX 2060s. No profile was published."""

from __future__ import annotations

import csv

import msgspec

from cotenant.published import lines, numbers

SOURCE = "code-InSS+InSS/TRANSCRIBED_techreport_tables2_3.csv"


class Cell(msgspec.Struct, frozen=True):
    """Hold one cell.

    label: the model and, after &, its co-located models; * marks fixed ones. x: batch, or share in percent.
    """

    label: str
    x: int
    observed_ms: float
    predicted_ms: float
    error_percent: float


def table(number: int) -> list[Cell]:
    places, texts = zip(*lines(SOURCE), strict=True)
    cells = []
    for place, row in zip(places[1:], csv.DictReader(texts), strict=True):
        if int(row["table"]) == number:
            x, *values = numbers(place, row["x"], row["observed_ms"], row["predicted_ms"], row["error_pct"])
            cells.append(Cell(row["row_label"], int(x), *values))
    return cells
