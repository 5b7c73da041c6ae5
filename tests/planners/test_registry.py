"""Planners of other packages, from folders such as pip leaves behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cotenant.config import read_settings
from cotenant.core.plan import Plan
from cotenant.errors import ConfigError, PlanError
from cotenant.planners import PLANNERS, contract, load_planner, planner_names, registry
from tests.cli.program import Program
from tests.planners.problems import embedded

MINE = """
import msgspec
from cotenant.planners.elastic import plan as elastic
def plan(problem):
    return msgspec.structs.replace(elastic(problem), planner="whatever it says")
number = 3
def nothing(problem):
    return None
def fails(problem):
    return problem.rates["nobody"]
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts packages where imports and their metadata are found. Takes the name of one, and its entry points."""
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "others_planners.py").write_text(MINE)

    def done(package: str, **points: str) -> None:
        folder = tmp_path / f"{package.replace('-', '_')}-1.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        entries = "".join(f"{name} = {value}\n" for name, value in points.items())
        (folder / "entry_points.txt").write_text(f"[cotenant.planners]\n{entries}")
        forgotten()

    def forgotten() -> None:
        registry._registered.cache_clear()
        registry._loaded.cache_clear()

    yield done
    forgotten()
    for name in sys.modules.keys() - modules:
        if name.startswith("others_"):
            del sys.modules[name]


def test_registry_installed_package_adds_a_planner(install: Install) -> None:
    assert planner_names() == list(PLANNERS)
    install("others-planners", mine="others_planners:plan")
    assert planner_names() == [*PLANNERS, "mine"]
    plan = load_planner("mine")(embedded())
    assert plan.planner == "mine"
    assert contract.contract_violations(plan, embedded()) == []


def test_registry_added_planner_is_used_like_any_other(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(capsys, monkeypatch)
    install("others-planners", mine="others_planners:plan", broken="others_planners:fails")
    (tmp_path / "serve.toml").write_text('planner = "mine"')
    assert read_settings(tmp_path / "serve.toml").planner == "mine"
    problem = Path(__file__).parents[2] / "docs/examples/problem.toml"
    assert Plan.from_json(program("plan", problem, "--planner", "mine", "--json").out.encode()).planner == "mine"
    said = program("plan", problem, "--compare", "--planners", "mine,broken,elastic", "--json")
    rows = {row["planner"]: row for row in json.loads(said.out)["rows"]}
    assert rows["mine"]["devices"] == rows["elastic"]["devices"]
    assert rows["broken"]["error"].startswith("planner 'broken' of others-planners 1.2 failed: KeyError: 'nobody' (")
    assert rows["broken"]["error"].endswith("others_planners.py, line 10)")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("others_absent:plan", r"cannot be loaded: ModuleNotFoundError: No module named 'others_absent'"),
        ("others_planners:absent", r"cannot be loaded: AttributeError: .*'absent'"),
        ("others_planners:number", ": .* is int, not a function from a Problem to a Plan"),
        ("others_planners:nothing", "returned NoneType, not a Plan"),
    ],
)
def test_registry_invalid_planner_is_reported_with_its_package(install: Install, value: str, message: str) -> None:
    install("others-planners", mine=value)
    assert load_planner("elastic")(embedded()).planner == "elastic", "and stops no other"
    with pytest.raises(PlanError, match=rf"^planner 'mine' of others-planners 1\.2:? ?{message}$"):
        load_planner("mine")(embedded())


def test_registry_two_planners_of_one_name_are_rejected(install: Install) -> None:
    install("others-planners", mine="others_planners:plan")
    install("more-planners", mine="others_planners:plan")
    with pytest.raises(
        PlanError, match=r"^planner 'mine' of (more|others)-planners 1\.2: (others|more)-planners 1\.2 "
    ):
        load_planner("mine")


def test_registry_name_of_a_built_in_planner_is_rejected(install: Install) -> None:
    install("others-planners", elastic="others_planners:plan")
    assert load_planner("elastic").__module__ == PLANNERS["elastic"]
    with pytest.raises(
        PlanError, match=r"^planner 'elastic' of others-planners 1\.2: cotenant registers the same name"
    ):
        planner_names()


def test_registry_unknown_planner_lists_all_names(install: Install, tmp_path: Path) -> None:
    install("others-planners", mine="others_planners:plan")
    with pytest.raises(PlanError, match=r"^unknown planner 'x'; available: bestfit, .*, mine, .*, squishy$"):
        load_planner("x")
    (tmp_path / "serve.toml").write_text('planner = "x"')
    with pytest.raises(ConfigError, match=r"'x' is unknown; use 'bestfit' or .* or 'mine' or .* or 'squishy'$"):
        read_settings(tmp_path / "serve.toml")
