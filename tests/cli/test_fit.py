"""`cotenant fit`, and plans with what it fitted."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path

import pytest

from cotenant.config import read_problem
from cotenant.core.profile import write_profiles
from cotenant.predictors import Load
from cotenant.predictors.samples import write_samples
from cotenant.published.v100 import SOURCE
from tests.cli.program import Program
from tests.predictors.test_fitting import PROFILES, pairs

PROBLEM = """
profiles = ["profiles.csv"]
interference = INTERFERENCE
models = [{ name = "a", slo = "100ms", rate = 100 }, { name = "b", slo = "100ms", rate = 100 }]
devices = [{ kind = "k", count = 4, cuts = [20, 50, 80, 100] }]
"""


@pytest.fixture(autouse=True)
def measured(folder: Path) -> None:
    (folder / "pairs.csv").write_text(write_samples(pairs()))
    (folder / "profiles.csv").write_text(write_profiles(PROFILES.values()))


def test_fit_writes_a_predictor_that_plans_use(program: Program, folder: Path) -> None:
    said = program("fit", "pairs.csv", "--profiles", "profiles.csv", "--model", "linear", "--output", "linear.json")
    assert (said.code, said.out) == (0, "")
    assert 'interference = { model = "linear", fit = "linear.json" }' in said.err
    written = json.loads((folder / "linear.json").read_text())
    assert written["model"] == "linear" and set(written["coefficients"]) >= {"l2_victim", "constant"}
    for chosen in ('{ model = "linear", fit = "linear.json" }', '{ model = "linear", fit = "pairs.csv" }'):
        (folder / "asked.toml").write_text(PROBLEM.replace("INTERFERENCE", chosen))
        plan = program("plan", "asked.toml", "--planner", "elastic", "--json")
        assert plan.code == 0, plan.err


def test_plan_with_a_quantile_uses_it(program: Program, folder: Path) -> None:
    said = program("fit", "pairs.csv", "--profiles", "profiles.csv", "-o", "ours.json")
    assert said.code == 0, said.err
    asked = Load("a", "k", 4, 500), (Load("b", "k", 16, 500),)
    slowdowns = []
    for quantile in (0.5, 0.99):
        chosen = f'{{ model = "gaussian-process", fit = "ours.json", quantile = {quantile} }}'
        (folder / "asked.toml").write_text(PROBLEM.replace("INTERFERENCE", chosen))
        plan = program("plan", "asked.toml", "--planner", "ideal", "--json")
        assert plan.code == 0, plan.err
        slowdowns.append(read_problem(folder / "asked.toml").interference.slowdown(*asked))
    assert 1 < slowdowns[0] < slowdowns[1]
    for wrong, message in (
        (
            '{ model = "gaussian-process", fit = "ours.json", quantile = 2 }',
            "interference.quantile: 2 must be between 0 and 1",
        ),
        (
            '{ model = "linear", fit = "pairs.csv", quantile = 0.9 }',
            "'linear' knows no quantiles; leave it out, or use",
        ),
        ('{ model = "linear", fit = "ours.json" }', "ours.json: is a fitted 'gaussian-process', not 'linear'"),
        ('{ model = "gaussian-process", factor = 1.2 }', "'gaussian-process' takes no factor"),
        (
            '{ model = "linear" }',
            '\'linear\' has to be fitted to samples of pairs: { model = "linear", fit = "pairs.csv" }',
        ),
        ('{ model = "magic" }', "interference.model: 'magic' is unknown; use"),
        ('{ model = "gaussian-process", fits = "x" }', "interference: Object contains unknown field `fits`"),
        ('{ model = "gaussian-process", fit = "absent.csv" }', "absent.csv: cannot be read"),
        ('{ model = "gaussian-process", fit = "profiles.csv" }', "profiles.csv:1: column 'victim' is missing"),
    ):
        (folder / "asked.toml").write_text(PROBLEM.replace("INTERFERENCE", wrong))
        assert message in program.refuses("plan", "asked.toml")


def test_fit_repeats_without_a_cross_validation_is_rejected(program: Program) -> None:
    said = program.refuses("fit", "pairs.csv", "--profiles", "profiles.csv", "--repeats", "3")
    assert "--repeats is for cross-validation; add --compare or --report" in said


def test_fit_compare_shows_errors(program: Program, folder: Path) -> None:
    arguments = ("fit", "pairs.csv", "--profiles", "profiles.csv", "--compare", "-m", "linear", "--repeats", "2")
    said = program(*arguments, "--plot", "errors.svg")
    assert said.code == 0, said.err
    assert "held out: random 30 %" in said.out and "held out: new victim" in said.out
    assert "linear: " in said.err and " to do" in said.err and "profiling" not in said.err
    assert (folder / "errors.svg").stat().st_size
    verdicts = json.loads(program(*arguments, "--json").out)
    assert [verdict["predictor"] for verdict in verdicts] == ["linear", "linear"]


def test_fit_keeps_what_flaml_advises_its_own_users_from_those_of_fit(program: Program, folder: Path) -> None:
    importlib.import_module("flaml")  # which says what its loggers tell
    assert program("fit", "nowhere.csv").code == 1
    assert logging.getLogger("flaml.tune.searcher.flow2").getEffectiveLevel() == logging.WARNING


@pytest.mark.parametrize(
    ("name", "source"),
    [("v100", "icloud-ecnu/igniter"), ("a100", "0909wlgur/Gpulet"), ("kace", "nba556677go/KACE-artifact")],
)
def test_fit_of_a_published_set_says_where_its_files_are_to_be_had(
    program: Program, folder: Path, name: str, source: str
) -> None:
    said = program.refuses("fit", name, "--data", "elsewhere")
    place = f"elsewhere/{source.replace('/', '+')}"
    assert f"get https://github.com/{source} as {place}, or say with COTENANT_DATA" in said


def test_fit_of_a_published_set_reads_its_files_from_a_folder(program: Program, folder: Path) -> None:
    tables = {
        model: {
            what: {str(batch): {"50": value * batch, "20": 2 * value * batch} for batch in (1, 2, 4)}
            for what, value in (("latency", ms), ("l2cache", 5.0), ("dram", 7.0))
        }
        for model, ms in (("a", 2.0), ("b", 3.0))
    }
    together = [
        [one, other, batch, 2, percent, ms * 1.1 + batch / 10, 8.0 + batch]
        for one, other, ms in (("a", "b", 2.0), ("b", "a", 3.0))
        for batch in (1, 2, 4)
        for percent in (50,)
    ]
    place = folder / "sets" / SOURCE
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(tables) + "\n" + json.dumps({"interference": {"latency": together}}))
    said = program("fit", "v100", "--data", "sets", "-m", "linear")
    assert said.code == 0, said.err
    assert json.loads(said.out)["model"] == "linear"


def test_fit_report_validates_what_was_fitted(program: Program, folder: Path) -> None:
    arguments = ("fit", "pairs.csv", "--profiles", "profiles.csv", "-m", "linear", "--repeats", "2")
    said = program(*arguments, "-o", "linear.json", "--report", "linear.html")
    assert said.code == 0, said.err
    assert json.loads((folder / "linear.json").read_text())["model"] == "linear"
    page = (folder / "linear.html").read_text()
    assert "Held out random 30 %: linear is within " in page and "<td>pairs.csv</td>" in page


def test_fit_with_wrong_options_says_why(program: Program, folder: Path) -> None:
    assert "give the models' profiles with --profiles" in program.refuses("fit", "pairs.csv")
    assert "--model magic: unknown; available: linear" in program.refuses("fit", "pairs.csv", "--model", "magic")
    both = ("fit", "pairs.csv", "--profiles", "profiles.csv", "-m", "linear")
    assert "--compare writes no predictor" in program.refuses(*both, "--compare", "-o", "x.json")
    assert "only one --model can be fitted" in program.refuses(*both, "-m", "gaussian-process")
    assert "add --compare" in program.refuses(*both, "--plot", "x.svg")
    (folder / "few.csv").write_text("".join((folder / "pairs.csv").read_text().splitlines(keepends=True)[:4]))
    few = ("fit", "few.csv", "--profiles", "profiles.csv", "-m", "linear")
    assert "few.csv: all samples have the same co-located model" in program.refuses(*few)
    assert not (folder / "x.json").exists()
