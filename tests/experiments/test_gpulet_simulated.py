"""gpulet's figures that are simulated: what neighbours really do, what plans keep then, each figure on a few cells."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from cotenant.control.scaling.rates import TargetRateOptions
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.check import check
from cotenant.predictors import ConstantMargin, Load
from cotenant.predictors.samples import Sample
from cotenant.published import v100
from experiments.autoscaled_runs import AutoscaledRun
from experiments.gpulet import fig11, fig13, fig14, fig15, fig17, paper, schedulability, table04
from experiments.gpulet.ground_truth import (
    MeasuredInterference,
    RandomErrorInterference,
    true_environment,
    true_interference,
)
from experiments.gpulet.max_rates import MEAN, Group, group_model_set
from experiments.gpulet.model_sets import V100, model_set
from experiments.gpulet.systems import System, plan_function, planner_problem
from experiments.parallel import Options
from tests.experiments.data import needs_data

SBP = System(name="SBP", origin="cotenant", planner="squishy", interference=False)
PUBLISHED = System(name="gpulet+int", origin="published", planner="elastic")


def test_measured_interference_equals_samples_and_the_formula_elsewhere() -> None:
    def load(model: str, batch: int) -> Load:
        return Load(model, "gpu", batch, 500)

    samples = [Sample(load("x", 4), (load("y", 8),), 1.0, 1.8), Sample(load("x", 32), (load("y", 8),), 1.0, 1.2)]
    found = MeasuredInterference(ConstantMargin(1.5), samples, {"a": "x", "b": "y", "c": "x"})
    assert found.slowdown(load("a", 4), [load("b", 8)]) == pytest.approx(1.8, abs=0.01)
    assert found.slowdown(load("c", 32), [load("b", 8)]) == pytest.approx(1.2, abs=0.01)
    assert 1.2 < found.slowdown(load("a", 11), [load("b", 8)]) < 1.8
    assert found.slowdown(load("b", 8), [load("a", 4)]) == pytest.approx(1.5)
    assert found.slowdown(load("a", 4), [load("b", 8), load("b", 8)]) == pytest.approx(2.6, abs=0.02)
    assert found.slowdown(load("a", 4), []) == 1


@needs_data
def test_true_environment_of_the_v100_has_measured_interference() -> None:
    real = true_interference(model_set("v100"))
    roles = {name: role for role, (name, _) in V100.items()}
    samples = v100.pairs()[::37]
    errors = [abs(real.slowdown(*_asked(sample, roles)) / max(1.0, sample.slowdown) - 1) for sample in samples]
    assert sum(errors) / len(errors) < 0.01


def _asked(sample: Sample, roles: dict[str, str]) -> tuple[Load, Sequence[Load]]:
    victim, neighbour = (
        msgspec.structs.replace(load, model=roles[load.model]) for load in (sample.victim, *sample.colocated)
    )
    return victim, [neighbour]


def test_random_error_interference_has_the_error_of_the_paper_and_repeats() -> None:
    real = RandomErrorInterference(ConstantMargin(2.0), seed=3)
    loads = [Load("a", "gpu", batch, share) for batch in range(1, 41) for share in range(100, 1000, 100)]
    other = Load("b", "gpu", 8, 500)
    errors = sorted(abs(real.slowdown(load, [other]) / 2 - 1) for load in loads)
    assert errors[int(0.9 * len(errors))] == pytest.approx(0.1026, abs=0.02)
    assert errors[int(0.95 * len(errors))] == pytest.approx(0.1398, abs=0.03)
    assert [real.slowdown(load, [other]) for load in loads] == [
        RandomErrorInterference(ConstantMargin(2.0), seed=3).slowdown(load, [other]) for load in loads
    ]


@needs_data
def test_as_plan_of_a_published_schedule_is_a_valid_plan() -> None:
    players = model_set("v100")
    mix = dict.fromkeys(paper.GROUPS["scen2"], 300.0)
    plan = plan_function(PUBLISHED, players)(mix)
    assert plan is not None
    problem = msgspec.structs.replace(planner_problem(PUBLISHED, players), rates=mix)
    assert all(plan.rate(role) >= rate for role, rate in mix.items())
    assert all(device.free >= 0 for device in plan.devices)
    assert not [it for it in check(plan, problem) if it.rule in ("cut", "sum", "partitions", "batch")]
    group = Group(name="scen2", model_set="v100", system=PUBLISHED, mix=mix)
    assert (
        schedulability.attainment(
            plan, true_environment(players), schedulability.Trial(group=group, requests=1000), 1.0
        )
        > 0.99
    )
    assert plan_function(PUBLISHED, players)(dict.fromkeys(mix, 1e5)) is None


@needs_data
@pytest.mark.parametrize("system", [SBP, PUBLISHED], ids=["SBP", "published"])
def test_sustained_rates_never_exceed_planned_rates(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulability, "TARGET_SCALES", (1.0, 0.8))
    group = next(group for group in fig17.groups("v100", system) if group.name == "scen2")
    found = schedulability.sustained_rates(schedulability.Trial(group=group, requests=500))
    assert 0 < found.sustained <= found.planned
    assert found.sustained <= found.best
    profiled_set = group_model_set(group)
    with_scaled_targets = schedulability.with_scaled_targets(profiled_set, 0.8)
    assert all(
        with_scaled_targets.targets[role] == pytest.approx(0.8 * target, abs=1e-3)
        for role, target in profiled_set.targets.items()
    )


@needs_data
def test_sustained_rates_are_scored_on_other_seeds_than_the_plan_was_chosen_by(monkeypatch: pytest.MonkeyPatch) -> None:
    group = next(group for group in fig17.groups("v100", SBP) if group.name == "scen2")
    unit = sum(group.mix.values())
    limits = {0: math.inf, 1: 200.0, 2: 200.0, 3: 100.0}

    def attainment(plan: Plan, environment: Problem, trial: schedulability.Trial, x: float) -> float:
        return 1.0 if x <= limits[trial.seed] else 0.98

    monkeypatch.setattr(schedulability, "TARGET_SCALES", (1.0, 0.8))
    monkeypatch.setattr(schedulability, "attainment", attainment)
    found = schedulability.sustained_rates(schedulability.Trial(group=group, requests=500))
    assert found.best == found.planned > 200 * unit
    # 99 % on average over three seeds: also where one of them has 98, but not where two have.
    assert found.scored == pytest.approx(200 * unit, rel=0.01)


@needs_data
def test_attainment_of_an_application_counts_whole_requests() -> None:
    (game, traffic, *_) = fig17.groups("synthetic-0.8", SBP)
    for group in (game, traffic):
        assert group.application is not None
        assert group.application.models() == group.mix.keys()
        profiled_set = group_model_set(group)
        scale, plan = schedulability.largest_plan(SBP, profiled_set, group.mix, group.devices, profiled_set.units[0])
        assert plan is not None
        trial = schedulability.Trial(group=group, requests=1500)
        models = msgspec.structs.replace(trial, group=msgspec.structs.replace(group, application=None))
        assert schedulability.attainment(plan, true_environment(profiled_set), trial, scale / 10) == 1
        assert schedulability.attainment(plan, true_environment(profiled_set), models, scale / 10) == 1
        # Without one of its models nobody has an answer, however the others do.
        missing = min(group.mix)
        less = without(plan, missing)
        assert schedulability.attainment(less, true_environment(profiled_set), trial, scale / 10) == 0
        others = 1 - group.mix[missing] / sum(group.mix.values())
        assert schedulability.attainment(less, true_environment(profiled_set), models, scale / 10) == pytest.approx(
            others, abs=0.05
        )


def without(plan: Plan, model: str) -> Plan:
    """The plan, but nobody feasible the model."""
    devices = [
        msgspec.structs.replace(
            device,
            partitions=tuple(
                msgspec.structs.replace(
                    partition, placements=tuple(it for it in partition.placements if it.model != model)
                )
                for partition in device.partitions
            ),
        )
        for device in plan.devices
    ]
    return msgspec.structs.replace(plan, devices=tuple(devices))


@needs_data
def test_figure_13(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulability, "TARGET_SCALES", (1.0,))
    monkeypatch.setattr(fig13, "REQUESTS", 300)
    quick = tuple(system for system in fig13.SYSTEMS if system.planner in ("squishy", "bestfit"))
    monkeypatch.setattr(fig13, "SYSTEMS", quick)
    rows = fig13.run(Options(profiles=("v100",), every=2))
    cells = [row for row in rows if row.group != MEAN]
    assert {(row.system, row.origin) for row in cells} == {(system.name, system.origin) for system in quick}
    bases = {(row.group, row.origin): row.rate for row in cells if row.system == "SBP"}
    for row in cells:
        assert row.of_sbp is None or row.rate == pytest.approx(row.of_sbp * (bases[row.group, row.origin] or 0))
    for mean in rows:
        if mean.group == MEAN:
            own = [row.of_sbp for row in cells if (row.system, row.origin) == (mean.system, mean.origin) and row.of_sbp]
            assert mean.of_sbp == pytest.approx(sum(own) / len(own))
    drawn(fig13, rows, tmp_path)


@needs_data
def test_figure_14(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig14, "REQUESTS", 300)
    monkeypatch.setattr(fig14, "PAIRS", fig14.PAIRS[:1])
    rows = fig14.run(Options(profiles=("v100",), every=2))
    assert {(row.group, row.system) for row in rows} == {
        (group, system) for group in ("scen1", "scen3", "scen5") for system in ("gpulet", "gpulet+int")
    }
    for row in rows:
        assert row.rate == max(other.own_rate for other in rows if other.group == row.group)
        assert (row.verdict == fig14.NOT_SCHEDULABLE) == (row.own_rate < row.rate)
        assert row.missed is None or (row.missed > 1) == (row.verdict == "over 1 %")
    assert {(row.group, row.system): row.paper for row in rows}["scen5", "gpulet+int"] == "under 1 %"
    drawn(fig14, rows, tmp_path)


def drawn(figure, rows, folder: Path) -> None:  # type: ignore[no-untyped-def]
    figure.plot(rows, folder / "it.svg")
    assert ET.parse(folder / "it.svg").getroot().tag.endswith("svg")  # noqa: S314


@needs_data
def test_table_4_equals_the_paper_except_for_one_group(tmp_path: Path) -> None:
    rows = table04.run(Options())
    assert {row.group: row.alike for row in rows} == {group: group != "scen5" for group in paper.GROUPS}
    assert (rows[-1].below_1_gb, rows[-1].above_2_gb) == ("le, ssd", "vgg")
    drawn(table04, rows, tmp_path)


@needs_data
def test_figure_15(tmp_path: Path) -> None:
    system = fig15.SYSTEMS[0]
    run = fig15.Run("v100", system, TargetRateOptions(), 200.0, 0, seconds=120.0)
    result = fig15.simulate_run(run)
    rows = fig15.rows_of(run, result)
    assert [row.seconds for row in rows] == ["0", "100", "all"]
    whole = rows[-1]
    for column in ("offered", "goodput", "gpus", "shares"):
        mean = (100 * getattr(rows[0], column) + 20 * getattr(rows[1], column)) / 120
        assert getattr(whole, column) == pytest.approx(mean)
    assert whole.plans == sum(row.plans for row in rows[:-1]) == len(result.plans) - 1 > 1
    assert rows[0].offered < rows[1].offered
    assert 0 < whole.shares <= 100 * whole.gpus <= 400
    assert whole.missed <= whole.worst_missed
    drawn(fig15, rows, tmp_path)


@pytest.mark.slow
@needs_data
def test_figure_15_under_our_own_controller() -> None:
    run = fig15.Run("v100", fig15.TRACKING, TargetRateOptions(), 2940.0, 0, seconds=200.0)
    result = fig15.simulate_run(run)
    rows = fig15.rows_of(run, result)
    whole = rows[-1]
    assert whole.plans == len(result.plans) - 1 >= 1
    assert rows[0].shares < rows[-2].shares


@pytest.mark.slow
@needs_data
def test_own_controller_follows_the_first_wave_with_fewer_gpus_than_algorithm_2() -> None:
    """The headline of Figure 15: what docs/reproduction.md says, within a little."""
    variants = [(fig15.TRACKING, TargetRateOptions()), (fig15.SYSTEMS[0], TargetRateOptions())]
    runs = [fig15.Run("v100", system, rates, 2940.0, 0, seconds=fig15.FIRST_WAVE) for system, rates in variants]
    results = [fig15.simulate_run(run) for run in runs]
    tracking, algorithm_2 = (fig15.rows_of(run, result)[-1] for run, result in zip(runs, results, strict=True))
    periods = [missed_by_period(result)[3:] for result in results]  # from the second minute on
    assert tracking.gpus < algorithm_2.gpus
    assert tracking.missed < algorithm_2.missed
    assert max(periods[0]) < 0.01 < max(periods[1])


def missed_by_period(result: AutoscaledRun) -> list[float]:
    """The fraction of all requests late or dropped, every 20 s."""
    timeline = result.timeline
    offered, kept = (
        [sum(rates) for rates in zip(*each.values(), strict=True)] for each in (timeline.offered, timeline.goodput)
    )
    return [max(0.0, 1 - good / many) if many else 0.0 for good, many in zip(kept, offered, strict=True)]


@pytest.mark.slow
@needs_data
def test_figure_11(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old workers serve until new ones are ready, and nothing is late because of the change."""
    change = fig11.change_of("v100", 0)
    monkeypatch.setattr(fig11, "change_of", lambda name, seed: change)  # plans that take seconds to make
    monkeypatch.setattr(fig11, "SECONDS", fig11.CHANGE + fig15.STARTUP + 10.0)
    rows = fig11.run(Options())
    lanes = [row for row in rows if row.share is not None]
    assert {row.partition for row in lanes} == set(fig11.assigned_lanes(change))
    assert {"old", "new"} <= {row.plan for row in lanes}
    switch = fig11.CHANGE + fig15.STARTUP
    for row in lanes:
        if row.plan == "new":
            assert row.prepared == pytest.approx(fig11.CHANGE)
            assert row.serves_from is None or switch <= row.serves_from
        elif row.plan == "old":
            assert row.serves_to is not None and row.serves_to <= switch + 1.0
        else:
            assert row.serves_to is not None and row.serves_to > switch
    totals = {row.partition: row for row in rows if row.partition not in {lane.partition for lane in lanes}}
    changed, old, new = (totals[what] for what in (fig11.ALL, fig11.OLD_ONLY, fig11.NEW_ONLY))
    assert (
        changed.requests
        == old.requests
        == new.requests
        == sum(row.requests for row in lanes) + _dropped(changed, lanes)
    )
    assert changed.late is not None and old.late is not None and new.late is not None
    assert changed.late <= max(old.late, new.late) + 0.0002 * changed.requests
    drawn(fig11, rows, tmp_path)


def _dropped(total: fig11.Row, lanes: Sequence[fig11.Row]) -> int:
    """Requests that no partition ran: rejected, or expired while they waited."""
    dropped = total.requests - sum(row.requests for row in lanes)
    assert 0 <= dropped <= (total.late or 0)
    return dropped
