"""gpulet's figures: origin plays, origin schedules, and each figure on a few scenarios."""

from __future__ import annotations

import csv
import gzip
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError
from cotenant.planners import load_planner
from cotenant.planners.check import check
from cotenant.published import FOLDER
from experiments.gpulet import fig05, fig06, fig16, fig17, max_rates, paper, published, table05
from experiments.gpulet.model_sets import MODEL_SETS, UNITS, model_set
from experiments.gpulet.systems import Demand, System, feasible, schedule_scenarios
from experiments.gpulet.tables import tables
from experiments.parallel import Options
from tests.experiments.data import needs_data

SBP = System(name="SBP", origin="cotenant", planner="squishy")
GPULET = System(name="gpulet+int", origin="cotenant", planner="elastic")


def test_scenarios_are_those_of_the_paper() -> None:
    every = paper.scenarios()
    assert len(every) == 19_682
    assert every[0] == dict.fromkeys(paper.TARGETS_MS, 0) | {"be": 1}
    assert every[-1] == dict.fromkeys(paper.TARGETS_MS, 2)
    assert len({tuple(levels.values()) for levels in every}) == 19_682


@needs_data
def test_scenarios_are_numbered_as_in_golden_files() -> None:
    with (FOLDER / "golden_glet" / "scenarios_19682.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    for row, levels in zip(rows, paper.scenarios(), strict=True):
        assert [int(rate) for rate in row[1:]] == [100 * level for level in levels.values()]


@needs_data
@pytest.mark.parametrize("name", MODEL_SETS)
def test_model_set_has_nine_models_with_feasible_targets(name: str) -> None:
    players = model_set(name)
    assert list(players.targets) == list(paper.TARGETS_MS)
    for role in players.targets:
        asked = msgspec.structs.replace(players.problem(), rates={role: players.units[-1]})
        plan = load_planner("elastic")(asked)
        assert not plan.unserved
        assert not check(plan, asked)


@needs_data
def test_model_set_targets_follow_the_rule_of_the_paper() -> None:
    """Table 3: about twice the latency of a batch of 32 on the whole device."""
    players = model_set("a100")
    for role, target in players.targets.items():
        latency = players.profiles[role, players.kind].latency(32, WHOLE)
        assert 0 <= target - 2 * latency <= 1e-3


@needs_data
@pytest.mark.parametrize("name", ["synthetic-0.8", "a100", "v100"])
def test_model_set_unit_makes_sbp_schedule_as_many_as_figure_5(name: str) -> None:
    works, some = feasible(SBP, model_set(name)), paper.scenarios()[::61]
    served = sum(works({role: level * UNITS[name][-1] for role, level in levels.items() if level}) for levels in some)
    assert served / len(some) == pytest.approx(paper.FIG05["SBP"] / paper.SCENARIOS, abs=0.04)


@needs_data
def test_schedule_scenarios_smaller_sample_is_a_subset_with_every_rate() -> None:
    slow = msgspec.structs.replace(SBP, every=4)
    load = Demand("synthetic-0.2", 100)
    verdicts = schedule_scenarios([SBP, slow], Options(seed=7, profiles=(load.model_set,), every=99))
    many, few = (set(verdicts[load, system].served) for system in (SBP, slow))
    assert few < many
    assert (len(many), len(few)) == (199, 50)
    every = paper.scenarios()
    for role in paper.TARGETS_MS:
        assert {every[number][role] for number in few} == {0, 1, 2}
    all_of_them = schedule_scenarios([slow], Options(seed=7, profiles=(load.model_set,), every=99, full=True))
    assert set(all_of_them[load, slow].served) == many


@needs_data
def test_halves_are_slower_and_twice_as_many() -> None:
    players = model_set("a100")
    halves = players.halves()
    (kind,) = halves.fleet
    assert kind.count == 8
    whole, half = players.profiles["res", "a100"], halves.profiles["res", "a100"]
    assert half.latency(32, WHOLE) == whole.latency(32, 500)


@needs_data
@pytest.mark.parametrize(
    ("file", "mode", "every"),
    [
        ("t2_08_elastic_int.csv.gz", published.ELASTIC, 199),
        ("t2_08_sbp_timeshare.csv.gz", published.SBP, 199),
    ],
)
def test_published_program_with_our_tables_reproduces_golden_verdicts(
    file: str, mode: published.Mode, every: int
) -> None:
    """Golden was made from the files as they are: what we hand it by system of a model_set must decide the same."""
    players = model_set("synthetic-0.8")
    known = tables(players)
    scenarios = paper.scenarios()
    with gzip.open(FOLDER / "golden_glet" / file, "rt") as text:
        golden = {int(row["scenario"]): row["schedulable"] == "1" for row in csv.DictReader(text)}
    for number in range(0, paper.SCENARIOS, every):
        asked = {role: 100 * level for role, level in scenarios[number].items()}
        assert published.schedule(known, asked, mode).schedulable == golden[number], number


@needs_data
@pytest.mark.parametrize(
    ("profiles", "percent"),
    [
        pytest.param("synthetic-0.8", [84.5, 15.9, 7.0], marks=pytest.mark.slow),
        ("v100", [76.8, 38.7, 20.6]),
    ],
)
def test_published_program_schedules_as_many_scenarios_as_figure_16_says(profiles: str, percent: list[float]) -> None:
    """The table of docs/reproduction.md, at each of the rates, of a random tenth of all scenarios."""
    system = System(name="gpulet+int", origin="published", planner="elastic")
    verdicts = schedule_scenarios([system], Options(every=10, profiles=(profiles,)))
    assert [100 * each.count / len(each.served) for each in verdicts.values()] == pytest.approx(percent, abs=0.051)


@needs_data
@pytest.mark.slow
def test_gpulet_schedules_as_many_scenarios_as_figure_16_says() -> None:
    verdicts = schedule_scenarios([msgspec.structs.replace(GPULET, every=4)], Options(every=10, profiles=("v100",)))
    found = [100 * each.count / len(each.served) for each in verdicts.values()]
    assert found == pytest.approx([97.6, 69.0, 43.8], abs=0.051)


@needs_data
def test_feasible_low_rate_is_served_and_extreme_rate_is_not() -> None:
    players = model_set("a100")
    for system in (SBP, GPULET):
        works = feasible(system, players)
        assert works({"res": 10.0})
        assert not works({"res": 1e6})


def test_largest_multiple_is_found_to_half_a_percent() -> None:
    for most in (0.7, 3.0, 1234.5):

        def works(asked: Mapping[str, float], most: float = most) -> bool:
            return asked["a"] + asked["b"] <= 2 * most

        assert most * 0.995 <= max_rates.largest_multiple(works, {"a": 1, "b": 1}, 100.0) <= most
    assert max_rates.largest_multiple(lambda _: False, {"a": 1.0}, 100.0) == 0


def test_largest_multiple_search_above_finds_rates_beyond_a_gap() -> None:
    def works(asked: Mapping[str, float]) -> bool:
        return asked["a"] <= 90 or 120 <= asked["a"] <= 125

    assert max_rates.largest_multiple(works, {"a": 1.0}, 100.0) == pytest.approx(90, rel=0.005)
    assert max_rates.largest_multiple(works, {"a": 1.0}, 100.0, search_above=True) == pytest.approx(125, rel=0.006)


@needs_data
def test_game_has_seven_models_with_targets_of_their_own() -> None:
    (game, traffic, *groups) = fig17.groups("synthetic-0.8", GPULET)
    assert (len(game.mix), len(traffic.mix), len(groups)) == (7, 3, 5)
    players = model_set(game.model_set).with_roles(game.roles, game.targets)
    assert players.targets == dict.fromkeys(["le1", "le2", "le3", "le4", "le5", "le6", "res1"], 0.108)
    assert players.inputs["le3"] == "le"
    tables(players)
    assert fig17.groups("a100", GPULET) != []
    assert {group.name for group in fig17.groups("a100", GPULET)} == set(paper.GROUPS)


@needs_data
@pytest.mark.parametrize("figure", [fig05, fig16], ids=["fig05", "fig16"])
def test_figures_5_and_16_count_scenarios(figure, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = figure.run(Options(seed=3, profiles=("synthetic-0.2",), every=4001))
    assert len(rows) == sum(system.available for system in figure.SYSTEMS)
    for row in rows:
        assert 0 <= row.scheduled <= row.tried <= 5
        assert row.percent == 100 * row.scheduled / row.tried
    assert {row.system for row in rows if row.origin == "cotenant"} >= {"SBP"}
    drawn(figure, rows, tmp_path)


@needs_data
def test_figure_5_numbers_of_the_paper_are_given_for_the_same_system() -> None:
    rows = fig05.run(Options(profiles=("synthetic-0.8",), every=9001))
    assert {(row.system, row.paper_percent) for row in rows if row.paper_percent} == {
        ("SBP", 100 * 5_772 / 19_682),
        ("SBP on halves", 100.0),
    }


@needs_data
@pytest.mark.parametrize("figure", [fig06, fig17], ids=["fig06", "fig17"])
def test_figures_6_and_17_compare_largest_rates(figure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    quick = tuple(system for system in figure.SYSTEMS if system.planner in ("squishy", "bestfit"))
    base = System(name="ideal", origin="cotenant", planner="elastic")
    monkeypatch.setattr(figure, "SYSTEMS", (*quick, base))
    rows = figure.run(Options(profiles=("a100",)))
    means = [row for row in rows if row.group == max_rates.MEAN]
    assert {row.system for row in means} == {system.name for system in (*quick, base)}
    for mean in means:
        own = [
            row.relative for row in rows if (row.system, row.origin) == (mean.system, mean.origin) and row is not mean
        ]
        assert mean.relative == pytest.approx(sum(own) / len(own))
    drawn(figure, rows, tmp_path)


def test_table_5_probes_find_what_planners_can_do(tmp_path: Path) -> None:
    rows = {row.system: row for row in table05.run(Options())}

    def done(system: str) -> tuple[bool, ...]:
        return msgspec.structs.astuple(rows[system])[2:]

    assert done("squishy") == done("Nexus")
    assert done("elastic") == done("elastic-plus") == done("gpulet")
    assert rows["bestfit"].spatial and not rows["bestfit"].temporal
    drawn(table05, list(rows.values()), tmp_path)


def test_model_set_of_an_unknown_name_raises() -> None:
    with pytest.raises(ConfigError, match="no profiles 'h100'; available: synthetic"):
        model_set("h100")


def drawn(figure, rows, folder: Path) -> None:  # type: ignore[no-untyped-def]
    figure.plot(rows, folder / "it.svg")
    assert ET.parse(folder / "it.svg").getroot().tag.endswith("svg")  # noqa: S314
