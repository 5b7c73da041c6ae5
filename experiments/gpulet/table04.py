"""Reproduce Table 4: the five groups of models, sorted by memory.

Sizes are those in the published program's file. The paper's table has SSD below 1 GB in scen4 and above in scen5.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from experiments.data import glet
from experiments.gpulet import paper
from experiments.gpulet.model_sets import GLET
from experiments.parallel import Options
from experiments.plotting import Bar, grouped

TITLE = "groups of models by memory (gpulet, Table 4)"

GIGABYTE = 1e9


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """List the models with less than 1 GB, 1 to 2 GB, and more, here and in the paper."""

    group: str
    below_1_gb: str
    up_to_2_gb: str
    above_2_gb: str
    paper: str
    alike: bool


def run(options: Options) -> list[Row]:
    sizes = sizes_of()
    rows = []
    for group, roles in paper.GROUPS.items():
        found: tuple[list[str], list[str], list[str]] = ([], [], [])
        for role in roles:
            found[sum(sizes[role] >= limit for limit in (GIGABYTE, 2 * GIGABYTE))].append(role)
        reported = paper.TABLE04[group]
        rows.append(
            Row(
                group=group,
                below_1_gb=_text(found[0]),
                up_to_2_gb=_text(found[1]),
                above_2_gb=_text(found[2]),
                paper=" | ".join(map(_text, reported)),
                alike=[set(part) for part in found] == [set(part) for part in reported],
            )
        )
    return rows


def sizes_of() -> dict[str, int]:
    """Return the bytes of each of the paper's models by its short name."""
    memory = glet.memory()
    return {role: memory[name] for role, name in GLET.items()}


def _text(roles: Sequence[str]) -> str:
    return ", ".join(roles) or "-"


def plot(rows: Sequence[Row], path: Path) -> None:
    sizes = sizes_of()
    bars = [
        Bar("", row.group, role, "file", sizes[role] / GIGABYTE) for row in rows for role in paper.GROUPS[row.group]
    ]
    limits = [("1 GB", 1.0), ("2 GB", 2.0)]
    grouped(path, bars, lines=limits, ylabel="memory, GB", title="gpulet, Table 4")
