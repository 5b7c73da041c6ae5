"""`cotenant train`, and plans by what it trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cotenant.core.profile import write_profiles
from tests.cli.program import Program
from tests.planners.inss.cases import two_devices

PROBLEM = """
profiles = ["profiles.csv"]
arrivals = "even"
models = [{ name = "a", slo = "100ms", rate = 100 }, { name = "b", slo = "100ms", rate = 50 }]
devices = [{ kind = "k", count = 2, cuts = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100] }]
"""
SHORT = ("--episodes", "3", "--steps", "60")


@pytest.fixture(autouse=True)
def asked(folder: Path) -> None:
    (folder / "profiles.csv").write_text(write_profiles(two_devices().profiles.values()))
    (folder / "problem.toml").write_text(PROBLEM)
    (folder / "learnt.toml").write_text('policy = "policy.json"\n' + PROBLEM)


def test_train_writes_a_policy_that_plans_use(program: Program, folder: Path) -> None:
    said = program("train", "problem.toml", "--output", "policy.json", "--plot", "curve.svg", *SHORT)
    assert said.code == 0, said.err
    assert said.out.startswith("3 episodes, 81 updates; over the last 3 episodes: reward ")
    assert "wrote policy.json" in said.err and 'policy = "policy.json"' in said.err
    assert (folder / "curve.svg").read_text().count("late or dropped, %") == 1
    plan = program("plan", "learnt.toml", "--planner", "inss", "--json")
    assert plan.code == 0, plan.err
    assert json.loads(plan.out)["planner"] == "inss"


def test_train_json_has_a_row_for_each_episode(program: Program) -> None:
    rows = json.loads(program("train", "problem.toml", "--output", "policy.json", "--json", *SHORT).out)
    assert [row["number"] for row in rows] == [0, 1, 2]
    assert all(0 <= row["violated"] <= 1 for row in rows)


def test_policy_of_inss_plus_decides_for_other_models_and_devices(program: Program, folder: Path) -> None:
    said = program("train", "problem.toml", "--output", "policy.json", "--planner", "inss-plus", "--episodes", "30")
    assert said.code == 0, said.err
    assert " requests/s served, " in said.out and " % unserved" in said.out
    assert "--planner inss-plus" in said.err
    other = (
        ('policy = "policy.json"\n' + PROBLEM)
        .replace("count = 2", "count = 3")
        .replace('slo = "100ms"', 'slo = "90ms"')
    )
    (folder / "learnt.toml").write_text(other)
    first = program("plan", "learnt.toml", "--planner", "inss-plus", "--output", "plan.json")
    assert first.code == 0, first.err
    (folder / "learnt.toml").write_text(other.replace("rate = 100 }", "rate = 700 }"))
    moved = program("plan", "learnt.toml", "--planner", "inss-plus", "--diff", "plan.json", "--output", "moved.json")
    assert moved.code == 0, moved.err
    made = json.loads((folder / "moved.json").read_text())
    assert made["planner"] == "inss-plus" and made["unserved"] == {}


def test_policy_that_does_not_fit_is_an_error_of_one_line(program: Program, folder: Path) -> None:
    missing = program("plan", "learnt.toml", "--planner", "inss")
    assert missing.code == 1 and "policy.json: cannot be read: No such file" in missing.err
    program("train", "problem.toml", "--output", "policy.json", *SHORT)
    (folder / "learnt.toml").write_text(('policy = "policy.json"\n' + PROBLEM).replace("count = 2", "count = 1"))
    other = program("plan", "learnt.toml", "--planner", "inss")
    assert other.code != 0 and other.err.count("\n") == 1
    assert "trained for another cluster (2 × k" in other.err


def test_train_rejects_bad_input_before_it_trains(program: Program, folder: Path) -> None:
    said = program("train", "problem.toml", "--output", "policy.json", "--low", "2", "--high", "1")
    assert said.code == 1 and "--low 2 is above --high 1" in said.err
    said = program("train", "problem.toml", "--output", "policy.json", "--planner", "elastic")
    assert said.code == 1 and "--planner elastic: not trainable; use 'inss' or 'inss-plus'" in said.err
    said = program("train", "problem.toml", "--output", "policy.json", "--plot", "curve.gif")
    assert said.code == 1 and "cannot draw a .gif" in said.err
    (folder / "problem.toml").write_text(PROBLEM.replace("count = 2", "count = 0"))
    said = program("train", "problem.toml", "--output", "policy.json")
    assert said.code == 1 and "problem.toml: an environment needs at least one device" in said.err
    assert not (folder / "policy.json").exists()


def test_training_too_short_for_one_update_is_refused(program: Program, folder: Path) -> None:
    short = ("--episodes", "3", "--steps", "33")
    assert "99 decisions are too few to learn from; the first update needs 100" in program.refuses(
        "train", "problem.toml", "--output", "policy.json", *short
    )
    assert not (folder / "policy.json").exists()


def test_train_without_torch_says_what_to_install(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cotenant.planners.inss.sac", "cotenant.planners.inss.training", "cotenant.planners.inss.replay"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    said = program("train", "problem.toml", "--output", "policy.json")
    assert said.code == 1 and "training needs torch: pip install 'cotenant[learn]'" in said.err
    planned = program("plan", "problem.toml", "--planner", "inss")
    assert planned.code != 0 and "training needs torch" in planned.err and "`cotenant train`" in planned.err
