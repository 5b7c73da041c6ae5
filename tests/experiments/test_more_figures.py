"""Figures that are read off measurements: gpulet's 4, HetSev's 2 and 3, the thesis' 8.1."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from cotenant.errors import ConfigError
from experiments.gpulet import fig04
from experiments.hetsev import fig02, fig03
from experiments.parallel import Options
from experiments.thesis import fig8_1
from tests.experiments.data import needs_data


def drawn(path: Path) -> bool:
    return ET.parse(path).getroot().tag.endswith("svg")  # noqa: S314


@needs_data
def test_gpulet_figure_4_large_batches_gain_more_by_share_than_small_ones(tmp_path: Path) -> None:
    rows = fig04.run(Options())
    assert len(rows) == 14 * len(fig04.BATCHES)
    by_model = {(row.profiles, row.model, row.batch): row.gain for row in rows}
    assert all(by_model[p, m, 32] > by_model[p, m, 1] for p, m, batch in by_model if batch == 1)
    resnet = next(row for row in rows if (row.profiles, row.model, row.batch) == ("v100", "resnet50", 32))
    assert resnet.at_20 == pytest.approx(93.83, rel=1e-3)
    assert resnet.at_80 == pytest.approx(27.15, rel=1e-3)
    fig04.plot(rows, tmp_path / "f.svg")
    assert drawn(tmp_path / "f.svg")
    with pytest.raises(ConfigError, match="no such profiles; there are v100 or a100"):
        fig04.run(Options(profiles=("h100",)))


@needs_data
def test_hetsev_figure_2_is_the_distribution_of_pairs(tmp_path: Path) -> None:
    rows = {row.pairs: row for row in fig02.run(Options())}
    assert rows["v100"].below_18 > 90 > rows["a100"].below_18
    fig02.plot(list(rows.values()), tmp_path / "f.svg")
    assert drawn(tmp_path / "f.svg")


@needs_data
def test_hetsev_figure_3_compares_identical_and_different_pairs_at_equal_batches(tmp_path: Path) -> None:
    rows = {row.victim: row for row in fig03.run(Options())}
    assert rows["vgg19"].identical > rows["vgg19"].different
    assert rows["densenet121"].more_often < 50 < rows["resnet50"].more_often
    assert rows["all"].runs == sum(row.runs for name, row in rows.items() if name != "all")
    fig03.plot(list(rows.values()), tmp_path / "f.svg")
    assert drawn(tmp_path / "f.svg")


def test_thesis_figure_8_1_score_of_violated_workloads_falls_faster(tmp_path: Path) -> None:
    rows = fig8_1.run(Options())
    assert all(row.score_1 < row.score_2 for row in rows)
    ratios = [row.score_1 / row.score_2 for row in rows]
    assert ratios == sorted(ratios, reverse=True)
    assert all((row.score_1, row.score_2) == pytest.approx((row.paper_1, row.paper_2)) for row in rows)
    fig8_1.plot(rows, tmp_path / "f.svg")
    assert drawn(tmp_path / "f.svg")
