"""What a comparison of scenarios says of SLOs: the same in its table and in its sentences."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rich.console import Console

from cotenant.cli.what_if import scenario_summary, side_by_side
from cotenant.measure.report import ModelReport, Report
from cotenant.planning.what_if import ScenarioResult
from tests.render.plans import PLAN


def scenario(label: str, attainment: float | None, requests: int = 1000) -> ScenarioResult:
    row = ModelReport(
        model="bert",
        offered=10.0,
        served=10.0,
        goodput=10.0,
        attainment=attainment,
        required=0.99,
        target=0.1,
        mean=0.05,
        p50=0.05,
        p99=0.09,
        p999=0.1,
        outcomes={"served": requests},
    )
    report = Report(source="simulated", seconds=10.0, models=(row,))
    return ScenarioResult(label=label, plan=msgspec.structs.replace(PLAN, unserved={}), report=report, utilisation=0.5)


def shown(*results: ScenarioResult) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(side_by_side(results))
    return captured.get()


@pytest.mark.parametrize(
    ("attainment", "cell", "sentence"),
    [
        (1.0, "100.00 %", "all SLOs met."),
        (0.99, "99.00 %", "all SLOs met."),
        (0.98996, "98.99 % ~", "below the SLO by chance: bert 98.99 % < 99 %."),
        (0.985, "98.50 % ~", "below the SLO by chance: bert 98.50 % < 99 %."),
        (0.5, "50.00 % !", "SLO violated: bert 50.00 % < 99 %."),
        (None, "-", "all SLOs met."),
    ],
)
def test_what_if_says_that_slos_are_met_beside_no_row_below_its_slo(
    attainment: float | None, cell: str, sentence: str
) -> None:
    now, then = scenario("now", 1.0), scenario("rate=2", attainment)
    assert scenario_summary(then, now).endswith(f"; {sentence}")
    (row,) = [line for line in shown(now, then).splitlines() if line.startswith("bert attainment")]
    assert row.rstrip().endswith(cell)
    assert (" ".join(shown(now, then).split()).count("by no more than chance") == 1) == cell.endswith("~")


def test_what_if_scenario_with_both_names_both() -> None:
    violated = scenario("rate=2", 0.5)
    below: Any = msgspec.structs.replace(scenario("x", 0.985).report.models[0], model="digits")
    both = msgspec.structs.replace(
        violated, report=msgspec.structs.replace(violated.report, models=(*violated.report.models, below))
    )
    text = scenario_summary(both, scenario("now", 1.0))
    assert text.endswith("SLO violated: bert 50.00 % < 99 %; below the SLO by chance: digits 98.50 % < 99 %.")
