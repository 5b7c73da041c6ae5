from __future__ import annotations

from rich.console import Console, RenderableType

from cotenant.measure.report import Report
from cotenant.render.report import report_table
from tests.measure.test_report import MODELS, ledgers, report


def text(table: RenderableType) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_report_table_shows_every_model_and_its_outcomes() -> None:
    shown = text(report_table(report()))
    assert "98.00 %" in shown
    assert "1 rejected, 1 cancelled" in shown
    assert "25 ms" in shown
    assert "idle" in shown
    assert "send lag p99: 400 µs" in shown


def test_report_table_without_batches_omits_their_table() -> None:
    assert "predicted" in text(report_table(report()))
    assert "predicted" not in text(report_table(Report.of("live", MODELS[1:], ledgers(), 10.0)))


def test_report_table_in_80_columns_folds_nothing() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(report_table(report()))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80 and "attainment" in capture.get() and "p99.9" not in capture.get()
    assert any(line.endswith("1 rejected, 1 cancelled") for line in lines)
