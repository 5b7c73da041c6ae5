"""`cotenant sweep`: all combinations as CSV, and what is done before an interruption is not lost."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import cotenant.sim.plan_validation
import cotenant.sim.sweep
from cotenant.core.profile import write_profiles
from cotenant.predictors.samples import write_samples
from cotenant.sim.sweep import Point, Row
from tests.cli.program import PATIENCE, Program, alive, started, until
from tests.predictors.test_fitting import PROFILES, pairs

COMMAND = (
    *("sweep", "problem.toml", "--over", "rate=0.5,1", "--over", "devices=0..1", "--seeds", "2"),
    *("--seconds", "1", "--jobs", "1", "--planner", "elastic", "--output", "out/sweep.csv"),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are judged by a short look."""
    monkeypatch.setattr(cotenant.sim.plan_validation, "LOOK_REQUESTS", 1000)


def test_every_combination_seed_and_model_has_a_line(program: Program, folder: Path) -> None:
    said = program(*COMMAND)
    assert (said.code, said.err) == (0, "wrote out/sweep.csv\n")
    assert "4 combinations, 2 seeds" in said.out
    with (folder / "out" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 2 * 2
    assert [(row["over_rate"], row["over_devices"]) for row in rows[::4]] == [
        ("0.5", "0"),
        ("0.5", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    served = {(row["over_rate"], row["seed"]): row for row in rows if row["devices"] and row["model"] == "identity"}
    assert float(served["1", "0"]["offered_per_s"]) == pytest.approx(100, rel=0.4)
    assert served["1", "0"]["offered_per_s"] != served["1", "1"]["offered_per_s"]
    assert float(served["0.5", "0"]["attainment"]) > 0.9
    nothing = [row for row in rows if not row["devices"]]
    assert {float(row["attainment"]) for row in nothing} == {0.0}
    assert {float(row["unserved_per_s"]) for row in nothing if row["model"] == "identity"} == {50.0, 100.0}
    assert list((folder / "out").iterdir()) == [folder / "out" / "sweep.csv"]


def test_an_interrupted_sweep_goes_on_where_it_was(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = program(*COMMAND, "--json").out
    (folder / "out" / "sweep.csv").unlink()
    work, tried = cotenant.sim.sweep.run_point, list[str]()

    def until(count: int) -> Callable[[Point], list[Row]]:
        def swept(point: Point) -> list[Row]:
            if len(tried) == count:
                raise KeyboardInterrupt
            tried.append(point.label)
            return work(point)

        return swept

    monkeypatch.setattr(cotenant.sim.sweep, "run_point", until(2))
    said = program(*COMMAND)
    assert (said.code, said.out) == (130, "")
    assert said.err == "2 of 4 combinations are in out/sweep.csv.part; the same command goes on from there\n"
    assert not (folder / "out" / "sweep.csv").exists()
    with (folder / "out" / "sweep.csv.part").open("a") as file:
        file.write('[{"changes":["ra')  # it was cut off while it wrote
    refused = program.refuses(*COMMAND, "--seconds", "2")
    assert refused == "out/sweep.csv.part: holds part of another sweep; delete it, or choose another --output"

    monkeypatch.setattr(cotenant.sim.sweep, "run_point", until(4))
    said = program(*COMMAND, "--json")
    assert said.err == "2 of 4 combinations were done before\nwrote out/sweep.csv\n"
    assert len(tried) == 4
    assert json.loads(said.out) == json.loads(whole)
    assert not (folder / "out" / "sweep.csv.part").exists()


def test_a_sweep_of_other_arrivals_or_predictors_is_another_one(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(point: Point) -> list[Row]:
        raise KeyboardInterrupt

    def asks(arrivals: str, more: str = "") -> None:
        (folder / "asked.toml").write_text(f'[[workload]]\nmodel = "a"\narrivals = "{arrivals}"\nrate = 9\n')
        fit = f'interference = {{ model = "gaussian-process", fit = "pairs.csv"{more} }}'
        models = 'profiles = ["profiles.csv"]\nmodels = [{ name = "a", slo = "100ms", rate = 100 }]'
        devices = 'devices = [{ kind = "k", count = 4, cuts = [20, 50, 80, 100] }]'
        (folder / "problem.toml").write_text("\n".join([fit, models, devices]))

    monkeypatch.setattr(cotenant.sim.sweep, "run_point", interrupted)
    (folder / "pairs.csv").write_text(write_samples(pairs()))
    (folder / "profiles.csv").write_text(write_profiles(PROFILES.values()))
    command = (*COMMAND, "--workload", "asked.toml")
    for _ in range(2):
        asks("poisson")
        assert program(*command).code == 130  # and is gone on with
    for arrivals, more in (("uniform", ""), ("poisson", ", quantile = 0.8")):
        asks(arrivals, more)
        assert program.refuses(*command).startswith("out/sweep.csv.part: holds part of another sweep")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "nothing to sweep over; say what varies, such as --over rate=0.5,1,2"),
        ("--over rate", "--over rate: write KEY=VALUE,VALUE,"),
        (
            "--over devices=1..900 --over rate=1,2",
            "900 x 2 combinations with 3 seeds are 5400 runs, more than 1000; take",
        ),
        ("--over rate=nobody:2", "rate=nobody:2: no model 'nobody'; there are identity, lookup"),
        ("--over rate=1 --output taken", "taken.part: cannot be read: Is a directory"),
    ],
)
def test_what_cannot_be_swept(program: Program, folder: Path, arguments: str, message: str) -> None:
    (folder / "taken.part").mkdir()
    assert program.refuses("sweep", "problem.toml", "--planner", "elastic", *arguments.split()).startswith(message)


def test_a_combination_without_a_plan_says_why_and_stops_no_other(program: Program, folder: Path) -> None:
    text = (folder / "problem.toml").read_text()
    (folder / "problem.toml").write_text('objective = "rate"\n' + text)
    said = program("sweep", "problem.toml", "--over", "planner=elastic,squishy", "--seconds", "1", "--jobs", "1")
    assert said.code == 0
    assert "elastic" in said.out and "squishy" in said.out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_sweep_that_is_ended(folder: Path, number: int) -> None:
    process = started(folder, "sweep", "problem.toml", "--over", "rate=0.5,1", "--planner", "elastic", "-s", "1e6")
    try:
        until(lambda: len(group(process.pid)) == 4)  # itself, two at work, and Python's tracker of what they share
        process.send_signal(number)
        until(lambda: not group(process.pid))
        out, err = process.communicate(timeout=PATIENCE)
        if number == signal.SIGTERM:
            assert (process.returncode, out, err) == (130, "", "")
    finally:
        with process, contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def group(leader: int) -> list[int]:
    """The processes of a group that live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ProcessLookupError):
            if os.getpgid(int(folder.name)) == leader and alive(int(folder.name)):
                found.append(int(folder.name))
    return found
