from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.program import Program

ASK = ("compare", "synthetic/steady", "--planners", "max,geometry", "--seeds", "2", "--duration", "0.2")
QUICK = ("compare", "synthetic/steady", "--planners", "max,bestfit", "--seeds", "2", "--duration", "0.2")


@pytest.fixture(autouse=True)
def _without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_compare_shows_planners_problems_and_distances_and_draws_them(program: Program, tmp_path: Path) -> None:
    said = program(*ASK, "--plot", "study.svg")
    assert said.code == 0
    assert "planners on 2 problems: means and 95 % intervals" in said.out
    rows = [line.split()[0] for line in said.out.splitlines() if line.startswith(("geometry", "max"))]
    assert rows == ["geometry", "max"] * 2  # of both tables; the nearer to the bound is first
    assert "synthetic" in said.out
    assert "wrote study.svg" in said.err
    assert (tmp_path / "study.svg").read_text().startswith("<?xml")


def test_compare_goes_on_from_the_results_of_an_earlier_run(program: Program, tmp_path: Path) -> None:
    results = tmp_path / "deep" / "results.jsonl"
    whole = json.loads(program(*QUICK, "--results", str(results), "--json").out)
    lines = results.read_bytes().splitlines(keepends=True)
    assert len(lines) == len(whole["measurements"]) == 4
    # As if it had been stopped within the third line; the value shows that the first two are read, not made again.
    first = json.loads(lines[0]) | {"value": 99.0}
    results.write_bytes(json.dumps(first).encode() + b"\n" + lines[1] + lines[2][:20])
    rest = json.loads(program(*QUICK, "--results", str(results), "--json").out)
    assert [row["value"] for row in rest["measurements"]] == [
        99.0,
        *[row["value"] for row in whole["measurements"][1:]],
    ]
    again = program(*QUICK, "--results", str(results), "--json")
    assert json.loads(again.out) == rest


def test_compare_of_a_problem_file(program: Program, tmp_path: Path) -> None:
    profiles = "model,kind,share_pct,batch,latency_ms,memory_mib\nm,gpu,50,1,4,10\nm,gpu,100,1,2,10\n"
    (tmp_path / "profiles.csv").write_text(profiles)
    (tmp_path / "problem.toml").write_text(
        'profiles = ["profiles.csv"]\n[[models]]\nname = "m"\nslo = "20ms"\nrate = 100\n'
        '[[devices]]\nkind = "gpu"\ncuts = [50, 100]\n'
    )
    said = program("compare", "problem.toml", "--planners", "bestfit", "--seeds", "1", "--duration", "0.2", "--json")
    (row,) = json.loads(said.out)["measurements"]
    assert (row["problem"], row["value"], row["error"]) == ("problem.toml", 1.0, "")


def test_compare_all_leaves_out_problems_whose_data_are_not_there(program: Program, tmp_path: Path) -> None:
    said = program(
        "compare", "--all", "--data", str(tmp_path), "--planners", "max", "--seeds", "1", "--duration", "0.1", "--json"
    )
    assert {row["problem"] for row in json.loads(said.out)["measurements"]} == {
        "synthetic/steady", "synthetic/tight", "synthetic/rate", "synthetic/mixed",
    }  # fmt: skip
    assert "left out: v100/steady: " in said.err
    assert "does not exist" in program.refuses("compare", "v100/steady", "--data", str(tmp_path))


def test_compare_refuses_what_makes_no_sense(program: Program, tmp_path: Path) -> None:
    assert "no problem to compare on; name some, or use --all" in program.refuses("compare")
    assert "unknown planner 'nobody'" in program.refuses("compare", "--all", "--planners", "nobody")
    (tmp_path / "other.jsonl").write_text('{"planner": 3}\n')
    said = program.refuses(*ASK, "--results", "other.jsonl")
    assert "other.jsonl:1: not a measurement of `cotenant compare`" in said
    assert "cannot draw a .txt" in program.refuses(*ASK, "--plot", "picture.txt")
