"""Figure 6.3 of KACE over pairs that were measured with this package: they are in this checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.core.profile import Point, Profile
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample
from experiments.kace import fig6_3_live
from experiments.parallel import Options


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig6_3_live, "SPLITS", 1)


def test_figure_6_3_live_prediction_reaches_92_percent_of_oracle_over_60_measured_pairs(tmp_path: Path) -> None:
    rows = fig6_3_live.run(Options())
    found = {(row.policy, row.sums): row.relative for row in rows}
    assert all(row.pairs >= 60 for row in rows)
    assert found["prediction", "rows/s"] >= 0.92
    assert found["random", "rows/s"] < found["MEMCAP", "rows/s"] < found["prediction", "rows/s"]
    assert {found["Oracle", sums] for sums in ("rows/s", "relative to alone")} == {1.0}
    fig6_3_live.plot(rows, tmp_path / "figure.svg")
    assert "MEMCAP" in (tmp_path / "figure.svg").read_text()


def test_figure_6_3_live_scores_a_choice_by_the_measured_sum_of_the_best_step() -> None:
    """Beside the first step nothing is slowed, beside the second everything is twice as slow."""
    loads = [Load(f"served{n}", "cpu", 1, 500) for n in range(12)]
    steps = {Load("kind_train", "cpu", 1, 500): 1.0, Load("rude_train", "cpu", 1, 500): 2.0}
    alone = {load: 0.031 + 0.001 * n for n, load in enumerate([*steps, *loads])}
    profiles = {
        (load.model, "cpu"): Profile(load.model, "cpu", [Point(share=500, batch=1, latency=seconds, memory=n << 20)])
        for n, (load, seconds) in enumerate(alone.items(), 1)
    }
    samples = [
        Sample(victim, (other,), alone[victim], slower * alone[victim])
        for load in loads
        for step, slower in steps.items()
        for victim, other in ((load, step), (step, load))
    ]
    rows = {(row.policy, row.sums): row for row in fig6_3_live.compare(samples, profiles, seed=0)}
    assert rows["random", "relative to alone"].relative == pytest.approx(0.75)
    assert rows["MEMCAP", "rows/s"].relative == 1.0  # the kind step has less memory
    assert rows["prediction", "relative to alone"].relative == 1.0
    assert rows["prediction", "rows/s"].pairs == 24
