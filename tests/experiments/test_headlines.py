"""Numbers that docs/reproduction.md gives for figures which cost little to make: they hold on every tree."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.gpulet import fig05, fig06, fig07, fig10, fig13, fig17, max_rates
from experiments.gpulet.systems import System, schedule_scenarios
from experiments.hetsev import fig02, fig05_clients
from experiments.hetsev.fig05_clients import HOST_BOUND, MEASURED
from experiments.inss import table2, table3
from experiments.parallel import Options
from experiments.thesis import fig9_1
from tests.experiments.data import needs_data

pytestmark = needs_data

ROUNDED = 0.051  # of a percentage with one decimal


def percentages(systems: list[System], profiles: str) -> list[float]:
    """Return what each system schedules of a random tenth of the scenarios, by load."""
    verdicts = schedule_scenarios(systems, Options(every=10, profiles=(profiles,)))
    return [100 * each.count / len(each.served) for each in verdicts.values()]


def mean_rates(figure, names: set[tuple[str, str]], profiles: str, monkeypatch) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Return mean rates over the base's of some systems (name, origin) of Figure 6 or 17."""
    monkeypatch.setattr(figure, "SYSTEMS", tuple(each for each in figure.SYSTEMS if (each.name, each.origin) in names))
    rows = figure.run(Options(profiles=(profiles,)))
    return {f"{row.system}, {row.origin}": row.relative for row in rows if row.group == max_rates.MEAN}


def test_figure_5_published_sbp_schedules_28_percent_on_whole_gpus_and_98_on_halves() -> None:
    published = [system for system in fig05.SYSTEMS if system.origin == "published"]
    assert [system.name for system in published] == ["SBP", "SBP on halves"]
    assert percentages(published, "synthetic-0.2") == pytest.approx([28.1, 97.7], abs=ROUNDED)


@pytest.mark.slow
def test_figure_5_published_sbp_on_other_profiles() -> None:
    (sbp,) = (system for system in fig05.SYSTEMS if (system.name, system.origin) == ("SBP", "published"))
    assert percentages([sbp], "synthetic-0.8") == pytest.approx([13.2, 5.3, 1.5], abs=ROUNDED)
    assert percentages([sbp], "v100") == pytest.approx([13.8, 7.0, 4.2], abs=ROUNDED)


@pytest.mark.slow
def test_figure_6_two_models_on_two_v100s(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {("SBP", "published"), ("SBP", "cotenant"), ("best fit", "cotenant"), ("elastic-plus", "cotenant")}
    found = mean_rates(fig06, names | {("gpulet+int", "cotenant")}, "v100", monkeypatch)
    assert found == pytest.approx(
        {
            "SBP, published": 0.643,
            "SBP, cotenant": 0.955,
            "best fit, cotenant": 1.0,
            "gpulet+int, cotenant": 1.146,
            "elastic-plus, cotenant": 1.133,
        },
        abs=0.001,
    )


@pytest.mark.slow
def test_figure_17_published_gpulet_reaches_96_1_percent_of_its_ideal_on_the_v100(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {("ideal", "published"), ("gpulet+int", "published"), ("ideal", "cotenant")}
    assert mean_rates(fig17, names, "v100", monkeypatch)["gpulet+int, published"] == pytest.approx(0.961, abs=0.001)


@pytest.mark.slow
def test_figure_13_published_gpulet_sustains_1_67_times_what_sbp_does_on_the_v100(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published = tuple(system for system in fig13.SYSTEMS if system.origin == "published")
    monkeypatch.setattr(fig13, "SYSTEMS", published)
    rows = fig13.run(Options(profiles=("v100",)))
    found = {row.system: row.of_sbp for row in rows if row.group == max_rates.MEAN}
    assert found == pytest.approx({"SBP": 1.0, "gpulet": 1.67, "gpulet+int": 1.61}, abs=0.006)


def test_figure_7_percentages_below_18() -> None:
    rows = {row.pairs: row for row in fig07.run(Options())}
    assert (rows["v100"].below_18, rows["a100"].below_18) == pytest.approx((96.6, 38.4), abs=ROUNDED)
    assert (rows["v100"].p90, rows["a100"].p90) == pytest.approx((15.5, 70.6), abs=ROUNDED)
    assert {row.pairs: row.below_18 for row in fig02.run(Options())}["v100"] == rows["v100"].below_18


def test_figure_10_errors_of_the_linear_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig10, "PREDICTORS", ("linear",))
    _, v100, a100 = fig10.run(Options())
    assert (v100.p90, v100.p95) == pytest.approx((5.8, 6.5), abs=ROUNDED)
    assert (a100.p90, a100.p95) == pytest.approx((30.9, 37.8), abs=ROUNDED)


def test_inss_tables_2_and_3_mean_errors() -> None:
    held_out = []
    for table in (table2, table3):
        ours = [row for row in table.run(Options()) if row.origin == "V100, ours"]
        held_out.append(np.mean([row.error_percent for row in ours if not row.fitted]))
    assert held_out == pytest.approx([3.9, 4.1], abs=ROUNDED)


@pytest.mark.slow
def test_hetsev_clients_who_wait_gain_1_43_times_by_three_instances_as_measured_and_1_85_with_host_time() -> None:
    rows = {(row.latencies, row.instances): row for row in fig05_clients.run(Options())}
    assert rows[MEASURED, 3].of_one == pytest.approx(1.43, abs=0.01)
    assert rows[HOST_BOUND, 3].of_one == pytest.approx(1.85, abs=0.01)
    assert rows[HOST_BOUND, 2].of_one == pytest.approx(1.55, abs=0.01)


@pytest.mark.slow
def test_thesis_figure_9_1_margins_of_all_seeds() -> None:
    rows = {(row.reading, row.pods, row.scheduler): row.of_score for row in fig9_1.run(Options())}
    text = {name: rows["as the text has it", fig9_1.ALL, name] for name in ("min", "roundrobin", "max")}
    assert text == pytest.approx({"min": 1.24, "roundrobin": 1.26, "max": 1.69}, abs=0.006)
