"""`cotenant reproduce`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cotenant import published
from cotenant.cli import reproduce
from cotenant.errors import ConfigError
from experiments import parallel
from experiments.catalogue import Item, items
from experiments.gpulet import model_sets, systems, table05
from tests.cli.program import Program

NAMES = list(reproduce.experiment_titles())


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Without the measurements of others, and without what earlier tests read of them."""
    kept = (model_sets._synthetic, model_sets._a100, model_sets._v100, systems._serves)
    for each in kept:
        each.cache_clear()
    folder = tmp_path / "nowhere"
    monkeypatch.setattr(published, "FOLDER", folder)
    yield folder
    for each in kept:
        each.cache_clear()


def test_reproduce_list_shows_every_figure_with_its_state(program: Program) -> None:
    said = program("reproduce", "--list")
    assert said.code == 0
    assert said.out.startswith("69 figures and tables: ")
    assert {"gpulet/fig16", "gpulet/table05", "thesis/fig7_1"} <= set(NAMES)
    listed = json.loads(program("reproduce", "--list", "--json").out)
    assert list(listed["experiments"]) == NAMES
    at = {(item["paper"], item["item"]): item for item in listed["figures"]}
    assert at["KACE", "Figure 6.3"]["state"] == "made"
    assert at["gpulet", "Figure 7"]["state"] == "stand-in"
    assert at["gpulet", "Figure 7"]["experiments"] == ["gpulet/fig07"]
    assert at["InSS", "Figure 5"]["state"] == "not made"
    for item in listed["figures"]:
        assert item["state"] in ("made", "in part", "stand-in", "not made")
        assert item["why"] or item["state"] == "made", item


def test_catalogue_has_every_experiment_and_every_figure_once() -> None:
    catalogue = items()
    assert Counter(item.paper for item in catalogue) == {"gpulet": 13, "HetSev": 6, "KACE": 8, "InSS": 24, "thesis": 18}
    assert len({(item.paper, item.item) for item in catalogue}) == len(catalogue)
    named = {name for item in catalogue for name in item.experiments}
    figures = {name for name in NAMES if name.startswith(("gpulet/", "hetsev/", "kace/", "thesis/"))}
    # Why Figure 5 does not reproduce, and at which loads sharing serves more.
    assert figures - named == {"hetsev/fig05_clients", "hetsev/fig05_loads"}


def test_documentation_counts_figures_as_the_catalogue_does() -> None:
    counts = Counter(item.state for item in items())
    text = " ".join((reproduce.CHECKOUT / "docs" / "reproduction.md").read_text().split())
    said = f"{counts['made']} are made, {counts['in part']} in part, {counts['stand-in']} by a stand-in, and"
    assert f"{said} {counts['not made']} are not made" in text


def test_figure_without_its_experiment_is_not_made() -> None:
    item = Item("p", "Figure 1", "what", "made", ("p/fig1",), "")
    assert item.state_with(["p/fig1", "p/fig2"]) == "made"
    assert item.state_with(["p/fig2"]) == "not made"
    assert Item("p", "Figure 2", "what", "not made", (), "why").state_with([]) == "not made"


def test_reproduce_prints_a_table_json_and_a_figure(program: Program, folder: Path) -> None:
    said = program("reproduce", "gpulet/table05", "--plot", "pictures")
    assert said.code == 0
    assert "wrote pictures/gpulet-table05.svg" in said.err
    for word in ("Nexus", "paper", "squishy", "probed", "batch tuning"):
        assert word in said.out
    assert ET.parse(folder / "pictures" / "gpulet-table05.svg").getroot().tag.endswith("svg")  # noqa: S314

    rows = json.loads(program("reproduce", "gpulet/table05", "--json").out)["gpulet/table05"]
    assert {"system": "GSLICE", "source": "paper", "spatial": True}.items() <= rows[4].items()


def test_reproduce_with_wrong_names_says_why(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert program.refuses("reproduce", "gpulet/fig99") == (
        f"no experiment 'gpulet/fig99'; available: {', '.join(NAMES)}; or all of gaussian_process, gpulet, hetsev,"
        " inss, kace, thesis"
    )
    assert "no profiles 'h100'; available: synthetic-0.2," in program.refuses(
        "reproduce", "gpulet/fig05", "--profiles", "h100", "--jobs", "1"
    )
    monkeypatch.setattr(reproduce, "CHECKOUT", tmp_path)
    assert "checkout" in program.refuses("reproduce", "gpulet/table05")


def test_reproduce_without_data_says_where_to_get_it(program: Program, no_data: Path) -> None:
    said = program.refuses("reproduce", "gpulet/fig05", "--profiles", "a100", "--jobs", "1")
    assert str(no_data) in said
    assert "https://github.com/0909wlgur/Gpulet" in said
    assert "COTENANT_DATA" in said


def test_kept_results_are_not_made_again_but_for_other_options(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = program("reproduce", "gpulet/table05", "--results", "kept")
    assert first.code == 0
    page = (folder / "kept" / "report.html").read_text()
    text = " ".join("".join(ET.fromstring(page.removeprefix("<!DOCTYPE html>")).itertext()).split())  # noqa: S314
    for words in ("gpulet, Table 5", "Table 5: made", "GSLICE", "batch tuning", "cotenant reproduce"):
        assert words in text
    assert page.count("<img ") == 1
    assert ET.parse(folder / "kept" / "gpulet-table05.svg").getroot().tag.endswith("svg")  # noqa: S314

    def never(options: object) -> None:
        raise AssertionError

    monkeypatch.setattr(table05, "run", never)
    again = program("reproduce", "gpulet/table05", "--results", "kept")
    assert again.code == 0
    assert again.out == first.out
    assert json.loads(program("reproduce", "gpulet/table05", "--results", "kept", "--json").out)["gpulet/table05"]
    with pytest.raises(AssertionError):
        program("reproduce", "gpulet/table05", "--results", "kept", "--seed", "1")


def test_paper_is_made_whole_and_what_fails_is_said_at_the_end(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(options: object) -> list[Made]:
        raise ConfigError("no such measurements")

    def draws(rows: list[Made], path: Path) -> None:
        path.write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')

    modules: dict[str, Any] = {
        "p/fig1": SimpleNamespace(TITLE="one", run=lambda options: [Made("first", 1.5, 1, True)], plot=draws),
        "p/fig2": SimpleNamespace(TITLE="two", run=fails, plot=draws),
        "p/fig3": SimpleNamespace(TITLE="three", run=lambda options: [Made("third", 3.5, 3, True)], plot=draws),
        "q/fig1": SimpleNamespace(TITLE="other", run=fails, plot=draws),
        "catalogue": SimpleNamespace(
            items=lambda: [
                Item("P", "Figure 1", "what", "made", ("p/fig1",), ""),
                Item("P", "Figure 9", "nothing", "not made", (), "a GPU is needed"),
                Item("Q", "Figure 1", "what", "made", ("q/fig1",), ""),
            ]
        ),
        "parallel": parallel,
    }
    monkeypatch.setattr(reproduce, "experiment_module", modules.__getitem__)
    monkeypatch.setattr(reproduce, "experiment_titles", lambda: {n: m.TITLE for n, m in modules.items() if "/" in n})
    said = program("reproduce", "p")
    assert said.code == 1
    assert "p/fig2: no such measurements" in said.err
    assert "first" in said.out and "third" in said.out
    page = (folder / "reproduced" / "p" / "report.html").read_text()
    for words in ("P, Figure 1", "Could not be made: no such measurements", "third", "a GPU is needed"):
        assert words in page
    assert "Q, Figure 1" not in page
    assert {each.name for each in (folder / "reproduced" / "p").glob("*.json")} == {"p-fig1.json", "p-fig3.json"}


class Made(msgspec.Struct):
    name: str
    value: float | None
    count: int
    yes: bool


def test_rows_table_has_a_column_per_field(capsys: pytest.CaptureFixture[str]) -> None:
    made = reproduce.rows_table("it", [Made("[x]", 0.12345, 3, True), Made("y", None, 12345, False)])
    assert [column.justify for column in made.columns] == ["left", "right", "right", "left"]
    assert [list(column.cells) for column in made.columns] == [
        ["\\[x]", "y"],
        ["0.1235", "-"],
        ["3", "12345"],
        ["yes", "no"],
    ]


def test_figures_go_to_one_folder(program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--plot and --results exclude each other" in program.refuses(
        "reproduce", "gpulet/table05", "--results", "kept", "--plot", "pictures"
    )
    monkeypatch.setattr(reproduce, "experiment_titles", lambda: {"gpulet/table05": "one of a paper"})
    assert program("reproduce", "gpulet", "--plot", "pictures").code == 0
    assert (folder / "pictures" / "gpulet-table05.svg").is_file() and not (folder / "reproduced").exists()


def test_experiments_are_listed_without_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("importlib.import_module", missing)
    titles = reproduce.experiment_titles()
    assert list(titles) == NAMES and all(titles.values())
    with pytest.raises(ConfigError, match=r"^inss/fig08 needs torch: pip install --editable '\.\[learn,plot\]'"):
        reproduce.experiment_module("inss/fig08")
