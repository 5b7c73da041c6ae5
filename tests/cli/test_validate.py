"""`cotenant validate`: one plan and the same arrivals, live and simulated."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from benchmarks.live_vs_simulated import settings
from cotenant.cli.adaptive_validation import (
    AdaptiveComparison,
    AdaptiveRunReport,
    adaptive_comparison_view,
    replayed,
)
from cotenant.cli.served_process import complete_lines
from cotenant.cli.validate import (
    Comparison,
    OutsideTime,
    batch_time_drift,
    comparison_summary,
    largest_difference,
    outside_time,
    slowdowns,
)
from cotenant.config import read_settings
from cotenant.control.adaptation import Acquire, Adopted
from cotenant.control.controller_built import ControllerBuilt
from cotenant.control.controller_status import Decision
from cotenant.control.event_log import ControllerLine
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.measure.report import Report
from cotenant.planners import Problem
from cotenant.sim.run import simulate
from cotenant.sim.trace_replay import Observations, ObservedBatch
from cotenant.workload import Workload
from tests.cli.program import Program


def test_validate_sends_the_same_requests_live_and_simulated(program: Program) -> None:
    command = ("validate", "serve.toml", "--scale", "0.5", "--duration", "2", "--json")
    said = program(*command)
    assert said.code == 0, said.err
    assert "0.5 × the planned rates, twice 2 s" in said.err.splitlines()
    found = json.loads(said.out)
    (it,) = found["loads"]
    runs = [it[name]["models"] for name in ("live", "simulated", "predicted", "first")]
    asked, *others = [{row["model"]: sum(row["outcomes"].values()) for row in rows} for rows in runs]
    assert others == [asked] * 3
    assert set(asked) == {"identity", "lookup"}
    assert it["batches"].keys() == asked.keys()
    assert it["outside"].keys() == asked.keys()
    assert any(name.startswith("identity ") for name in it["slowdowns"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere.toml", "nowhere.toml: cannot be read: No such file or directory"),
        ("--model-repository nowhere", "no model repository at 'nowhere': No such file or directory"),
    ],
)
def test_validate_with_wrong_options_says_why(program: Program, arguments: str, message: str) -> None:
    assert program.refuses("validate", *arguments.split()).startswith(message)


def test_benchmark_settings_are_those_of_the_demo(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(settings(tmp_path))
    known = read_settings(tmp_path / "settings.toml")
    assert (known.model_repository, known.objective) == (tmp_path, "rate")
    assert "resnet50" in {model.name for model in known.models}


PROFILE = Profile("a", "cpu", [Point(share=share, batch=1, latency=1 / share, memory=0) for share in (250, 500)])
CUTS = tuple(
    Partition(
        share=share, placements=(Placement(model="a", batch=1, rate=50.0, duty=1.2 / share, latency=1.2 / share),)
    )
    for share in (500, 250, 250)
)
PLAN = Plan(planner="hand", devices=(Device(id=DeviceId("cpu", 0), partitions=CUTS),))
PROBLEM = Problem(
    models=(Model(name="a", slo=0.1),),
    rates={"a": 100.0},
    fleet=(Kind(name="cpu"),),
    profiles={("a", "cpu"): PROFILE},
)


def test_slowdowns_of_batches_are_relative_to_profiles() -> None:
    """Whatever the plan reckons with; on the two small shares, batches took 1.5 and 1.1 times that."""
    took = {
        (LaneId.parse("cpu-0/0"), "a"): [ObservedBatch(0.0, 1, 0.002)] * 2,
        (LaneId.parse("cpu-0/1"), "a"): [ObservedBatch(0.0, 1, 0.006)] * 2,
        (LaneId.parse("cpu-0/2"), "a"): [ObservedBatch(0.0, 1, 0.0044)] * 2,
    }
    found = slowdowns(PLAN, PROBLEM, Observations(took, {}))
    assert found == {"a 50 %": pytest.approx(1.0), "a 25 %": pytest.approx(1.3)}
    assert slowdowns(PLAN, PROBLEM, Observations({}, {})) == {}


def test_batch_time_drift_compares_batches_of_as_many_rows() -> None:
    before = Observations(
        {
            (LaneId.parse("cpu-0/0"), "a"): [
                ObservedBatch(0.0, 1, 0.002),
                ObservedBatch(1.0, 1, 0.004),
                ObservedBatch(2.0, 2, 0.010),
            ]
        },
        {},
    )
    after = Observations(
        {
            (LaneId.parse("cpu-0/0"), "a"): [ObservedBatch(0.0, 2, 0.012), ObservedBatch(1.0, 3, 9.0)],
            (LaneId.parse("cpu-0/1"), "b"): [ObservedBatch(0.0, 1, 1.0)],
        },
        {},
    )
    assert batch_time_drift(before, after) == {"a": pytest.approx(1.2)}
    assert batch_time_drift(after, before) == {"a": pytest.approx(1 / 1.2)}


def test_outside_time_is_latency_seen_by_callers_over_logged() -> None:
    report = run("live", 0)
    (row,) = report.models
    assert row.mean is not None and row.p50 is not None
    seen = Observations({}, {"a": [row.p50 - 0.001, row.p50 - 0.001, 3 * row.mean - 2 * row.p50 - 0.004]})
    spent = outside_time(report, seen)["a"]
    assert [spent.mean, spent.p50, spent.p99] == pytest.approx([0.002, 0.001, 0.002])
    assert row.p99 is not None
    often = Observations({}, {"a": [row.p50] * 980 + [row.p99 - 0.001] * 20})
    assert outside_time(report, often)["a"].p99 == pytest.approx(0.001)
    assert outside_time(report, Observations({}, {"a": [9.0]})) == {"a": OutsideTime()}
    assert outside_time(report, Observations({}, {})) == {}


def test_lines_of_a_growing_log_are_complete_ones(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\nsecond\nthi")
    assert complete_lines(log, 0) == [b"first", b"second"]
    assert complete_lines(log, 6) == [b"second"]
    assert complete_lines(log, 8) == []
    log.write_bytes(b"first\nsecond\nthird\n")
    assert complete_lines(log, 8) == complete_lines(log, 13) == [b"third"]


def run(source: str, seed: int, lag: float | None = None) -> Report:
    report = simulate(PLAN, PROBLEM, seconds=5, seed=seed)
    return Report(source=source, seconds=5, models=report.models, lag=lag)


def test_comparison_summary_states_the_largest_differences() -> None:
    same, other = run("live", 0, 0.0001), run("live", 1, 0.02)
    assert largest_difference(
        same, same
    ) == "p50 within 0.0 % (a), half within 0.0, p99 within 0.0 % (a), half within 0.0, " + (
        "attainment within 0.0 points (a)"
    )
    few = Report(source="live", seconds=0.1, models=simulate(PLAN, PROBLEM, seconds=0.1).models)
    assert largest_difference(same, few) == "no model had 200 requests; run longer with --duration"
    it = Comparison(
        load=0.5,
        live=other,
        simulated=same,
        predicted=same,
        first=other,
        batches={},
        slowdowns={},
        outside={},
        profiled=same,
        lent=True,
    )
    own, predicted, profiled, first = comparison_summary(it)
    assert own.startswith(f"simulated with its own batches: {largest_difference(same, other)}. Unreliable: ")
    assert own.endswith("the machine was busy, send lag p99: 20 ms")
    assert predicted == f"predicted from the first run: {largest_difference(same, other)}"
    assert profiled == f"predicted from the profiles, idle share lent: {largest_difference(same, other)}"
    assert first == f"the first live run: {largest_difference(other, other)}"


def test_validate_compares_a_run_that_adapts_with_its_simulation(program: Program) -> None:
    command = ("validate", "serve.toml", "--adapt", "--scale", "0.5", "--scale", "3", "--duration", "6", "--json")
    said = program(*command)
    assert said.code == 0, said.err
    assert "0.5, 3 × the planned rates, 6 s each" in said.err.splitlines()
    compared = json.loads(said.out)
    runs = [compared["live"], compared["simulated"]]
    asked = [{row["model"]: sum(row["outcomes"].values()) for row in run["report"]["models"]} for run in runs]
    assert asked[0] == asked[1]
    for run in runs:
        assert run["plans"], "three times the rates are planned for"
        assert any(decision["action"] == "plan again" for decision in run["decisions"])
        assert all(row["attainment"] > 0.9 for row in run["report"]["models"])
        assert run["difference"] == "", "a replay decides the same, command by command"
    assert compared["slowdowns"].keys() == {"identity", "lookup"}


def test_adaptive_comparison_shows_both_runs() -> None:
    report = simulate(PLAN, PROBLEM, Workload.poisson({"a": 5.0}), seconds=5.0)
    decision = Decision(time=1.5, action="plan again", reason="a is offered 200/s")
    live = AdaptiveRunReport(report=report, decisions=(decision,), plans=("rate: keep",), rollouts=())
    other = msgspec.structs.replace(live, plans=(), decisions=())
    compared = AdaptiveComparison(loads=(0.5, 2.0), seconds=30.0, live=live, simulated=other, slowdowns={"a": 1.25})
    shown = io.StringIO()
    Console(file=shown, width=200).print(adaptive_comparison_view(compared))
    text = shown.getvalue()
    assert "0.5, 2 × the planned rates, 30 s each" in text
    assert "× 1.25" in text
    assert "1.5 s" in text and "a is offered 200/s" in text
    assert "Replay (the same observations): the same decisions" in text
    assert (
        "Simulation (its own observations): different decisions" in text
        and "Live: rate: keep. Simulated: none." in text
    )
    assert msgspec.structs.replace(compared, simulated=live).decides_the_same


def test_replay_that_decides_otherwise_is_told_from_a_simulation_that_does() -> None:
    report = simulate(PLAN, PROBLEM, Workload.poisson({"a": 5.0}), seconds=5.0)
    built = ControllerBuilt(devices=tuple(device.id for device in PLAN.devices), targets={"a": 0.99})
    adopted = Adopted(plan=PLAN, rates={"a": 5.0})
    quiet = ControllerLine(now=0.0, event=adopted, commands=[])
    same = replayed(report, built, [quiet], 0.0)
    other = replayed(report, built, [quiet, ControllerLine(now=1.0, event=adopted, commands=[Acquire("k", 1)])], 0.0)
    assert same.difference == ""
    assert other.difference.startswith("at 1.0 s: logged [Acquire(")
    compared = AdaptiveComparison(loads=(1.0,), seconds=5.0, live=other, simulated=same, slowdowns={})
    assert compared.decides_the_same, "which is another matter"
    shown = io.StringIO()
    Console(file=shown, width=200).print(adaptive_comparison_view(compared))
    assert "DIFFERENT DECISIONS, which is a bug: at 1.0 s" in shown.getvalue()
