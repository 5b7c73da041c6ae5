"""List every figure and table of evaluation in the five papers: which experiment makes it, how far, and why not whole.

`catalogue.csv` has a line for each. Concept and set-up figures are left out. States:

- made: from measurements, or by simulation, of what the paper evaluates;
- in part: some of its systems, loads or numbers;
- stand-in: with other profiles, models or systems in the place of the paper's;
- not made: for the reason given, or because its experiments are not in this checkout.
"""

from __future__ import annotations

import csv
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import msgspec

State = Literal["made", "in part", "stand-in", "not made"]


class Item(msgspec.Struct, frozen=True):
    """Describe a figure or table. experiments: that make it; state: how far they do; why: what is missing, and why."""

    paper: str
    item: str
    shows: str
    state: State
    experiments: tuple[str, ...]
    why: str

    def state_with(self, existing: Collection[str]) -> State:
        """Return how far it is made by the experiments that exist."""
        return self.state if set(self.experiments) <= set(existing) else "not made"


def items() -> list[Item]:
    """Return all figures and tables, by paper."""
    text = Path(__file__).with_suffix(".csv").read_text(encoding="utf-8")
    return [
        msgspec.convert({**line, "experiments": line["experiments"].split()}, Item)
        for line in csv.DictReader(text.splitlines())
    ]
