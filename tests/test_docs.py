"""What the documentation names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cotenant.core.identity import LaneId
from cotenant.live.metrics import LaneReading, ServerCollector, render
from cotenant.live.statistics import ModelCounts

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["examples/alerts.yml", "operating.md", "reference.md"])
def test_metrics_that_are_named_are_exported(page: str) -> None:
    lane = LaneReading(
        lane=LaneId.parse("cpu-0/0"),
        up=True,
        lost=False,
        share=200,
        used_share=200,
        over_share=False,
        busy=0.0,
        restarts=0,
        waiting={"m": 0},
    )
    collector = ServerCollector([ModelCounts("m", "1")], [lane], backend="cpu", isolation="")
    text = render(collector, "")[0].decode()
    exported = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    named = set(re.findall(r"\b(?:cotenant|nv)_[a-z_]*[a-z]\b", (DOCS / page).read_text()))
    named = {re.sub(r"_(sum|count|bucket)$", "", name) if name not in exported else name for name in named}
    assert named and named <= exported
