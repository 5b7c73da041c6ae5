"""What the documentation names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cotenant.control.controller_status import ModelState
from cotenant.core.identity import LaneId
from cotenant.live.metrics import AdaptationReading, LaneReading, ServerCollector, render
from cotenant.live.statistics import ModelCounts
from cotenant.measure.histogram import Histogram

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
    adaptation = AdaptationReading(
        models={"m": ModelState(offered=1, planned=1, sustained=1, slowdown=1, observed_slowdown=1, attainment=None)},
        foreign_load=0.5,
        short=False,
        replans={("rate", "keep"): 1},
        late=0,
        handling=Histogram(),
        solving=Histogram(),
        rollouts=Histogram(),
    )
    collector = ServerCollector([ModelCounts("m", "1")], [lane], adaptation=adaptation, backend="cpu", isolation="")
    text = render(collector, "")[0].decode()
    exported = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    named = set(re.findall(r"\b(?:cotenant|nv)_[a-z_]*[a-z]\b", (DOCS / page).read_text()))
    named = {re.sub(r"_(sum|count|bucket)$", "", name) if name not in exported else name for name in named}
    assert named and named <= exported


def test_commands_of_docs_and_makefile_name_modules_that_exist() -> None:
    root = DOCS.parent
    texts = [root / "Makefile", root / "README.md", root / "CHANGELOG.md", *DOCS.glob("*.md")]
    named = {
        name
        for text in texts
        for name in re.findall(r"python -m ((?:benchmarks|experiments)[.\w]*\w)", text.read_text())
    }
    listed = re.search(r"for name in (.+); do", (root / "Makefile").read_text())
    assert listed is not None
    named |= {f"benchmarks.{name}" for name in listed[1].split()}
    missing = sorted(name for name in named if not _exists(root / Path(*name.split("."))))
    assert named and not missing


def _exists(module: Path) -> bool:
    return module.with_suffix(".py").exists() or (module / "__main__.py").exists()
