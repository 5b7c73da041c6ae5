from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from experiments.data import thesis
from experiments.parallel import Options
from experiments.thesis import fig7_1
from tests.experiments.data import needs_data

pytestmark = needs_data


def test_losses_of_pairs_that_did_not_fit_are_nan_and_named() -> None:
    rows, columns, values = thesis.losses()
    assert values.shape == (36, 18)
    cannot = thesis.cannot()
    assert ("onnx_ssd_mobilenet_1024_V100", "tensorflow_mobilenet_1024") in cannot
    assert ("onnx_mobilenet_1024_A30", "onnx_resnet50_2048") in cannot
    assert all(np.isnan(values[rows.index(row), columns.index(column)]) for row, column in cannot)
    assert not np.isin(values, (100.0, 400.0)).any()
    assert np.isnan(values).sum() == len(cannot) + 18  # beside itself nobody was tried on the A30


def test_thesis_tables_have_the_documented_shapes() -> None:
    assert thesis.alone()[2].shape == (18, 6)
    assert thesis.configurations()[2].shape == (18, 6)
    assert {hidden: len(each["svd"]) for hidden, each in thesis.published().items()} == dict.fromkeys(range(1, 6), 18)


@pytest.mark.slow
def test_figure_7_1_on_a_subset_compares_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, items, values = thesis.alone()
    monkeypatch.setattr(thesis, "alone", lambda: (names[::3], items[:4], values[::3, :4]))
    rows = fig7_1.run(Options(every=3))
    for hidden, system in ((1, "regression"), (2, "SVD"), (3, "SVD")):
        of = {row.method: row for row in rows if row.hidden == hidden}
        assert set(of) == set(fig7_1.METHODS)
        assert of["mix"].mse == of[system].mse
        assert of["SVD"].paper is None and of["regression"].paper is not None
    fig7_1.plot(rows, tmp_path / "it.svg")
    assert ET.parse(tmp_path / "it.svg").getroot().tag.endswith("svg")  # noqa: S314


def test_subset_hides_every_column_in_some_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[fig7_1.Task] = []

    def errors(task: fig7_1.Task) -> tuple[float, ...]:
        seen.append(task)
        return (1.0,) * len(fig7_1.METHODS)

    monkeypatch.setattr(fig7_1, "errors", errors)
    fig7_1.run(Options(every=6))
    single = [task.hidden[0] for task in seen if len(task.hidden) == 1]
    assert len(single) == 18, "one of six in each row"
    assert len(set(single)) >= 4, "not the first column of each"


def test_svd_as_published_reproduces_the_published_errors() -> None:
    """With one hidden entry a row: all 108 choices, as the data set's notes have it."""
    tasks = [fig7_1.Task(row, (column,)) for row in range(18) for column in range(6)]
    system = fig7_1.METHODS["SVD, as published"]
    whole = thesis.alone()[2]
    errors = []
    for task in tasks:
        given = whole.copy()
        given[task.row, list(task.hidden)] = np.nan
        errors.append((system(given) - whole)[task.row, task.hidden[0]] ** 2)
    assert round(float(np.mean(errors))) == 3746
