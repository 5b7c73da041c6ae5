"""InSS' figures: those from measurements in whole, those of the learner with policies that are hardly trained."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

from cotenant.planners.capacity import DeviceDraft, PartitionDraft, build_plan
from cotenant.planners.check import check
from cotenant.planners.inss.cluster import Cluster
from cotenant.planners.inss.device_options import options_of
from cotenant.planners.inss.sac import SacOptions
from cotenant.planners.inss.training import Episode, TrainingOptions, train
from experiments.inss import (
    bda_gpulet,
    cluster,
    evaluation,
    fig01,
    fig03,
    fig07,
    fig08,
    fig10,
    fig11,
    fig12,
    fig13,
    fig15,
    fig16,
    fig21,
    trained,
)
from experiments.inss.generated import generated
from experiments.parallel import Options
from tests.experiments.data import needs_data
from tests.planners.inss.cases import two_devices

pytestmark = needs_data


def drawn(figure: ModuleType, rows: object, folder: Path) -> str:
    figure.plot(rows, folder / "it.svg")
    return (folder / "it.svg").read_text()


def test_latency_and_throughput_grow_with_the_batch_and_the_share(tmp_path: Path) -> None:
    rows = fig01.run(Options())
    latency = [row.measured for row in rows if row.line == "vgg19" and row.what.startswith("latency")]
    assert len(latency) == 32 and latency[-1] > 4 * latency[0]
    assert "InSS, Figures 1 and 2" in drawn(fig01, rows, tmp_path)
    by_share = {row.x: row.measured for row in fig03.run(Options()) if row.line == "resnet50" and row.what[0] == "r"}
    assert by_share[60] > 1.4 * by_share[20]
    assert by_share[80] < 1.2 * by_share[60], "as in the paper, more than 60 % gains little"
    assert "share, %" in drawn(fig03, fig03.run(Options()), tmp_path)


def test_colocation_slows_resnet50_about_as_much_as_in_the_paper(tmp_path: Path) -> None:
    rows = fig07.run(Options())
    assert {row.line for row in rows} >= {"beside alexnet on 60 %", "beside vgg19 on 60 %"}
    assert 18.7 < max(row.measured for row in rows) < 25
    assert "Figure 7" in drawn(fig07, rows, tmp_path)


def test_scheduling_delay_is_a_line_in_the_number_of_models(tmp_path: Path) -> None:
    rows = fig10.run(Options())
    assert [row.x for row in rows] == [1, 2, 3, 4, 5] and rows[0].measured == 0
    assert all(abs(row.measured - (row.fitted or 0)) < 0.3 for row in rows)
    assert "Figure 10" in drawn(fig10, rows, tmp_path)


def test_regression_and_line_fit_what_was_measured(tmp_path: Path) -> None:
    running = fig11.run(Options())
    errors = [abs((row.fitted or 0) / row.measured - 1) for row in running]
    assert len(errors) == 25 and np.mean(errors) < 0.05
    assert "Figure 11" in drawn(fig11, running, tmp_path)
    used = fig12.run(Options())
    assert np.corrcoef([row.measured for row in used], [row.fitted or 0 for row in used])[0, 1] > 0.9
    assert "Figure 12" in drawn(fig12, used, tmp_path)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_interquartile_mean_of_equal_spacing_is_the_mean_and_leaves_outliers_out(count: int) -> None:
    values = [float(n) for n in range(count)]
    assert evaluation.interquartile_mean(values) == pytest.approx(np.mean(values))
    if count >= 4:
        assert evaluation.interquartile_mean([*values[:-1], 1e6]) < 1e6 / 4


def test_interquartile_mean_of_five_weighs_the_second_and_fourth_by_three_quarters() -> None:
    assert evaluation.interquartile_mean([0.0, 4.0, 1.0, 2.0, 100.0]) == pytest.approx((0.75 * 1 + 2 + 0.75 * 4) / 2.5)


def test_interval_holds_the_interquartile_mean_and_is_a_point_for_one_run() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 9.0]
    low, high = evaluation.interval(values)
    assert 1.0 <= low < evaluation.interquartile_mean(values) < high <= 9.0
    assert evaluation.interval([2.0]) == (2.0, 2.0)


@functools.cache
def quick(training: trained.Training) -> trained.Trained:
    """Train for a moment: plans are poor, and rows are as complete."""
    asked = trained.problem_of(training)
    curve: list[Episode] = []
    options = TrainingOptions(episodes=40, steps=2, batch=4, learner=SacOptions(hidden=(16,)), seed=training.seed)
    low, high = cluster.scaled(asked, "low"), cluster.scaled(asked, "high")
    return trained.Trained(train(Cluster.of(asked), low, high, options, curve.append), curve)


@pytest.fixture
def hardly_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (evaluation, fig13):
        monkeypatch.setattr(module, "trained", quick)
    monkeypatch.setattr(evaluation, "MOMENTS", 2)
    monkeypatch.setattr(evaluation, "SECONDS", 0.2)


@pytest.mark.slow
def test_convergence_has_a_row_for_each_twenty_episodes_of_each_learner(hardly_trained: None, tmp_path: Path) -> None:
    rows = fig13.run(Options(every=3))
    assert [(row.learner, row.episode) for row in rows] == [(name, n) for name in fig13.LEARNERS for n in (20, 40)]
    assert all(row.seeds == 2 and row.reward_low <= row.reward <= row.reward_high for row in rows)
    assert "late or dropped, %" in drawn(fig13, rows, tmp_path)


@pytest.mark.slow
def test_systems_are_compared_at_the_same_rates(
    hardly_trained: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(evaluation.PLANNERS, evaluation.OURS, "bestfit")  # geometry takes seconds
    rows = {row.system: row for row in fig15.run(Options(every=3))}
    assert rows["gpulet"].paper_gain == 28.1 and rows["InSS"].seeds == 2
    assert all(row.devices <= 4 and 0 <= row.late + row.dropped <= 100 for row in rows.values())
    assert rows["iGniter"].inss_gain == pytest.approx(100 * (rows["InSS"].sustained / rows["iGniter"].sustained - 1))
    assert rows["GSLICE"].resnet50_run > 0
    assert rows["BDA-Gpulet"].sustained != rows["gpulet"].sustained
    assert "Figure 15" in drawn(fig15, [*rows.values()], tmp_path)
    times = fig16.run(Options())
    assert len(times) == 4 * 2 and len({row.offered for row in times if row.moment == 0}) == 1
    assert "Figures 16 and 18" in drawn(fig16, times, tmp_path)
    heavy = {row.system: row for row in fig21.run(Options(every=4))}
    assert heavy["InSS_4"].gpus <= 4 and heavy["InSS_5"].gpus <= 5
    assert [row.seeds for row in heavy.values()] == [2, 2, 1, 1, 1, 1]
    assert all(row.violated_low <= row.violated <= row.violated_high for row in heavy.values())
    assert heavy["InSS_4"].sustained_low < heavy["InSS_4"].sustained_high
    assert "Figures 21 to 23" in drawn(fig21, [*heavy.values()], tmp_path)


def test_batches_of_gpulets_partitions_are_those_of_algorithm_1() -> None:
    """A batch of b takes 2 + b ms and waits (b - 1) / 300 s to fill: 23 is the largest within 100 ms."""
    asked = two_devices(rates=(300.0,))
    planned = build_plan(
        asked, "p", [DeviceDraft(asked.fleet[0], [PartitionDraft(1000, {"a": 300.0}, batches={"a": 3})])]
    )
    decided = bda_gpulet.with_decided_batches(asked, planned)
    assert [p.batch for p in decided.devices[0].partitions[0].placements] == [23]
    assert check(decided, asked) == [] and not decided.unserved


def test_batches_of_models_that_share_a_partition_keep_each_others_targets_and_rates() -> None:
    asked = two_devices(rates=(60.0, 600.0))
    shared = [PartitionDraft(1000, {"a": 60.0, "b": 600.0}, batches={"a": 3, "b": 28})]
    planned = build_plan(asked, "p", [DeviceDraft(asked.fleet[0], shared)])
    decided = bda_gpulet.with_decided_batches(asked, planned)
    before, after = ([p.batch for p in plan.devices[0].partitions[0].placements] for plan in (planned, decided))
    assert before != after and check(decided, asked) == [] and not decided.unserved


def test_decisions_are_timed_of_every_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(evaluation.PLANNERS, evaluation.OURS, "bestfit")
    rows = {row.system: row for row in fig08.run(Options())}
    assert set(rows) == {*evaluation.PLANNERS, "InSS"}
    assert all(0 < row.median_ms <= row.longest_ms for row in rows.values())
    assert "Figure 8" in drawn(fig08, [*rows.values()], tmp_path)


def test_rates_of_moments_stay_within_their_range_and_turn_at_its_ends() -> None:
    asked = cluster.problem()
    low, high = cluster.scaled(asked, "low"), cluster.scaled(asked, "high")
    for moment in range(40):
        for rate, least, most in zip(evaluation.rates_at(asked, moment).values(), low, high, strict=True):
            assert least * (1 - 1e-9) <= rate <= most * (1 + 1e-9)
    assert evaluation.rates_at(asked, 0) == pytest.approx(asked.rates)


def test_generated_fleets_differ_by_seed_and_have_models_that_meet_their_targets() -> None:
    problems = [generated(seed) for seed in range(4)]
    assert generated(2).models == problems[2].models
    assert len({(len(p.models), p.fleet[0].count, p.models[0].slo) for p in problems}) == 4
    assert all((options_of(problem).sizes > 0).all() for problem in problems)


def test_policies_of_inss_plus_are_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "FOLDER", tmp_path)
    asked = trained.PlusTraining(seed=0, fleets=1, episodes=2)
    once = trained.trained_plus(asked)
    monkeypatch.setattr(trained, "plus_training", None)
    assert trained.trained_plus(asked) == once
    assert once.policy.planner == "inss-plus" and len(once.curve) == 2


def test_policies_are_kept_in_files_and_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "FOLDER", tmp_path)
    monkeypatch.setattr(trained, "STEPS", 1)
    once = trained.trained(trained.Training(seed=0, episodes=1))
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr(trained, "train", None)
    assert trained.trained(trained.Training(seed=0, episodes=1)) == once
    assert msgspec.json.decode(file.read_bytes(), type=trained.Trained).policy.planner == "inss"
