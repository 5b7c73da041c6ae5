from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from experiments.data import inss
from experiments.inss import cells, fig17_day, table2, table3
from experiments.parallel import Options
from tests.experiments.data import needs_data

pytestmark = needs_data


@pytest.mark.parametrize(("table", "count"), [(2, 12), (3, 16)])
def test_published_rows_have_the_errors_that_the_paper_prints(table: int, count: int) -> None:
    rows, printed = cells.published_rows(table), inss.table(table)
    assert len(rows) == count
    off = [abs(row.error_percent - cell.error_percent) for row, cell in zip(rows, printed, strict=True)]
    assert np.median(off) < 0.01
    assert sum(each > 0.1 for each in off) <= 2


@pytest.mark.parametrize("figure", [table2, table3], ids=["table2", "table3"])
def test_rows_that_were_not_fitted_to_have_a_mean_error_below_5_percent(figure, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = figure.run(Options())
    ours = [row for row in rows if row.origin == "V100, ours"]
    assert len(ours) >= 12
    alone = [row.error_percent for row in ours if "&" not in row.models]
    assert max(alone) < 4
    assert all(row.fitted for row in ours if "&" not in row.models), "InSS fits to its runs in isolation"
    held_out = [row.error_percent for row in ours if not row.fitted]
    assert len(held_out) >= 6
    assert np.mean(held_out) < 5
    figure.plot(rows, tmp_path / "it.svg")
    assert ET.parse(tmp_path / "it.svg").getroot().tag.endswith("svg")  # noqa: S314


@pytest.mark.slow
def test_day_changes_batches_first_and_shares_where_that_does_not_do(tmp_path: Path) -> None:
    rows = []
    results = {}
    for name in (fig17_day.BOTH, fig17_day.SHARES, fig17_day.FIXED):
        system = fig17_day.System(name, "elastic-plus", 0, seconds=2 * fig17_day.HOUR)
        results[name] = fig17_day.simulate_day(system)
        rows += fig17_day.rows_of(system, results[name])
    whole = {row.system: row for row in rows if row.hour == fig17_day.WHOLE_DAY}
    assert whole[fig17_day.BOTH].batches > 0
    assert 0 < whole[fig17_day.BOTH].shares < whole[fig17_day.SHARES].shares
    assert whole[fig17_day.BOTH].workers < whole[fig17_day.SHARES].workers
    assert whole[fig17_day.FIXED].batches == whole[fig17_day.FIXED].shares == 0
    assert whole[fig17_day.BOTH].gpus < whole[fig17_day.FIXED].gpus
    for name in whole:
        hours = [it for it in rows if it.system == name and it.hour != fig17_day.WHOLE_DAY]
        assert [it.hour for it in hours] == ["0", "1"]
        assert sum(it.batches + it.shares for it in hours) == len(results[name].plans) - 1
    fig17_day.plot(rows, tmp_path / "it.svg")
    assert (tmp_path / "it.svg").read_text().startswith("<?xml")
