"""Figures that are read off measurements: gpulet's 4, HetSev's 1 to 3, KACE's table 5.1, the thesis' 6 and 8.1."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from cotenant.errors import ConfigError
from experiments.gpulet import fig04
from experiments.hetsev import fig01, fig02, fig03
from experiments.hetsev.fig05_clients import HOST_BOUND, MEASURED
from experiments.hetsev.paper import FIG01_THROUGHPUT_RATIO, FIG01_UTILISATION_RATIO
from experiments.kace import table5_1
from experiments.parallel import Options
from experiments.thesis import fig6_1, fig6_6, fig6_9, fig6_10, fig8_1
from tests.experiments.data import needs_data


def drawn(path: Path) -> bool:
    return ET.parse(path).getroot().tag.endswith("svg")  # noqa: S314


@pytest.mark.slow
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
    with pytest.raises(ConfigError, match="no such profiles; available: v100 or a100"):
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


@needs_data
def test_hetsev_figure_1_by_host_time_two_instances_gain_more_than_a_third_one(tmp_path: Path) -> None:
    rows = fig01.run(Options())
    by = {(row.latencies, row.model, row.instances): row for row in rows}
    three, two = (by[HOST_BOUND, fig01.MEAN, n] for n in (3, 2))
    assert three.of_one == pytest.approx(FIG01_THROUGHPUT_RATIO)  # by construction
    assert two.of_one == pytest.approx(1.6, abs=0.01)
    assert three.of_one - two.of_one < two.of_one - 1
    assert three.utilisation_of_one == pytest.approx(1.64, abs=0.01)
    assert three.utilisation_of_one < FIG01_UTILISATION_RATIO
    assert all(row.utilisation == pytest.approx(100) for row in rows if row.latencies == MEASURED and row.utilisation)
    fig01.plot(rows, tmp_path / "f.svg")
    assert drawn(tmp_path / "f.svg")


@needs_data
def test_kace_table_5_1_is_that_of_the_data_to_the_last_digit(tmp_path: Path) -> None:
    rows = table5_1.run(Options())
    assert len(rows) == 7 and all(row.alike for row in rows)
    assert {row.batches for row in rows} == {"2, 8, 16"}
    table5_1.plot(rows, tmp_path / "f.svg")
    assert drawn(tmp_path / "f.svg")


@needs_data
def test_thesis_figure_6_1_small_parts_cost_onnx_resnet_most_and_some_models_next_to_nothing(tmp_path: Path) -> None:
    rows = fig6_1.run(Options())
    assert len(rows) == 12
    rising = {(row.gpu, row.model) for row in rows if not row.quarter <= row.half <= row.whole}
    assert rising == {("A30", "tensorflow_ssd_mobilenet")}
    assert min(rows, key=lambda row: row.quarter_percent).model == "onnx_resnet50"
    assert max(row.half_percent for row in rows) > 99  # "as close as 1 % to the optimal"
    fig6_1.plot(rows, tmp_path / "f.svg")
    assert drawn(tmp_path / "f.svg")


@needs_data
def test_thesis_figure_6_6_four_pods_serve_most_where_parts_cost_least(tmp_path: Path) -> None:
    rows = {row.model: row for row in fig6_6.run(Options())}
    assert all(row.one < row.two < row.four for row in rows.values())
    assert min(rows.values(), key=lambda row: row.of_one).of_one == rows["onnx_resnet50"].of_one
    assert rows["onnx_resnet50"].of_one == pytest.approx(1.92, abs=0.01)
    fig6_6.plot(list(rows.values()), tmp_path / "f.svg")
    assert drawn(tmp_path / "f.svg")


@needs_data
def test_thesis_figures_6_9_and_6_10_are_losses_in_the_units_that_they_were_measured_in(tmp_path: Path) -> None:
    v100 = {(row.model, row.beside): row for row in fig6_10.run(Options())}
    assert v100["onnx_resnet50", "tensorflow_resnet50"].together == pytest.approx(21.0, abs=0.1)  # "more than 20"
    assert v100["onnx_resnet50", "onnx_resnet50"].lost_percent == pytest.approx(38.9, abs=0.1)
    a30 = {(row.model, row.beside): row for row in fig6_9.run(Options())}
    assert a30["tensorflow_ssd_mobilenet", "tensorflow_ssd_mobilenet"].runs == 0
    assert a30["tensorflow_mobilenet", "tensorflow_mobilenet"].lost_percent == pytest.approx(100)
    assert a30["onnx_ssd_mobilenet", "onnx_resnet50"].lost_percent == pytest.approx(48.8, abs=0.1)
    for figure, rows in ((fig6_9, a30), (fig6_10, v100)):
        figure.plot(list(rows.values()), tmp_path / "f.svg")
        assert drawn(tmp_path / "f.svg")
