"""KACE's protocol against what its authors print, workload by workload."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from cotenant.errors import ConfigError
from cotenant.predictors import Load
from cotenant.published import kace
from experiments.kace import fig6_1, fig6_2, fig6_3, fig7_1, fig7_2, paper, protocol
from experiments.parallel import Options
from tests.experiments.data import needs_data

pytestmark = needs_data


def test_runs_and_profiles_have_the_documented_sizes() -> None:
    every = kace.runs()
    assert len(every) == 181
    assert len(protocol.workloads(every)) == 21
    assert len(kace.profiles()) == 7
    triples = kace.runs(kace.TRIPLES)
    assert (len(triples), len(protocol.workloads(triples))) == (400, 14)
    bert = kace.load("bert-base-cased_batch8-inf")
    assert bert == Load("bert-base-cased-inf", "v100-32gb", 8, 1000)
    assert kace.workload(bert) == "bert-base-cased_batch8-inf"
    assert kace.profiles()["bert-base-cased-inf", kace.KIND].latency(8, 1000) == pytest.approx(8 / 98.34844157)
    slowest = max(kace.samples(), key=lambda sample: sample.slowdown)
    assert slowest.slowdown > 5


@pytest.mark.parametrize("seed", kace.SEEDS)
def test_as_published_every_choice_equals_the_published_one(seed: int) -> None:
    train, test = kace.split(3, seed)
    expected = kace.published("KACE", seed)

    def agrees(found: dict[Load, float], column: str) -> None:
        assert len(found) == len(expected) == 21
        for load, value in found.items():
            assert value == pytest.approx(expected[kace.workload(load)][column], abs=1e-6)

    agrees(protocol.relative(test, protocol.AsPublished(train, "lr")), "prediction")
    agrees(protocol.random_choice(test), "random")
    for name, column in (("MEMCAP", "memcap"), ("SM%", "sm%"), ("MEM%", "mem%")):
        agrees(protocol.relative(test, protocol.RULES[name]), column)


def test_as_published_averages_equal_the_paper() -> None:
    published, scaled_by_training = [], []
    for seed in kace.SEEDS:
        train, test = kace.split(3, seed)
        published.append(protocol.mean(protocol.relative(test, protocol.AsPublished(train, "lr"))))
        scaled_by_training.append(protocol.mean(protocol.relative(test, protocol.ScaledByTraining(train, whole=False))))
    assert np.mean(published) == pytest.approx(0.906345, abs=1e-6)
    assert np.mean(scaled_by_training) >= 0.927


def test_best_rule_average_equals_the_report() -> None:
    found = [protocol.mean(protocol.best_rule(kace.split(3, seed)[1])) for seed in kace.SEEDS]
    assert np.mean(found) == pytest.approx(0.837, abs=5e-4)


def test_unseen_models_reach_the_relative_sum_of_the_report() -> None:
    runs = kace.runs()
    targets = [load for load in protocol.workloads(runs) if load.batch == 16]
    assert len(targets) == 7
    for make, least in (
        (lambda runs: protocol.AsPublished(runs, "lr"), 0.92),
        (lambda runs: protocol.ScaledByTraining(runs, whole=True), 0.96),
    ):
        found = [protocol.relative(runs, make(protocol.unseen(runs, each)), [each])[each] for each in targets]
        assert np.mean(found) >= least


def test_load_of_an_invalid_name_raises() -> None:
    with pytest.raises(ConfigError, match="'resnet' is not a workload"):
        kace.load("resnet")


def test_printed_figure_labels_are_permuted() -> None:
    """The same values as in the published run, and attached to other targets."""
    printed = kace.printed()["KACE"]
    true = {
        name: np.mean([kace.published("KACE", seed)[name]["prediction"] for seed in kace.SEEDS]) for name in printed
    }
    assert sorted(printed.values()) == pytest.approx(sorted(true.values()))
    assert sum(abs(printed[name] - true[name]) > 0.01 for name in printed) > 10


def test_figure_6_3_policies_are_compared_with_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kace, "SEEDS", kace.SEEDS[:1])
    monkeypatch.setattr(fig6_3, "effort", lambda *_: 1)
    rows = fig6_3.run(Options())
    found = {row.policy: row for row in rows}
    assert found["KACE"].relative == pytest.approx(found["KACE"].published)
    assert found["Best rule"].relative >= max(found[name].relative for name in protocol.RULES)
    for name in ("MEMCAP", "SM%", "MEM%", "Random"):
        assert found[name].relative == pytest.approx(found[name].published)
    drawn(fig6_3, rows, tmp_path)


@pytest.mark.slow
def test_figures_6_and_7_run_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lines alone: what takes long is trained elsewhere."""
    monkeypatch.setattr(paper, "TECHNIQUES", {"lr": "LR"})
    monkeypatch.setattr(fig7_1, "PERCENT", (10, 50))
    monkeypatch.setattr(fig7_2, "TECHNIQUES", {"lr": "LR", "ridge": "ridge"})
    made = {figure: figure.run(Options()) for figure in (fig6_1, fig6_2, fig7_1, fig7_2)}
    at_three = next(row for row in made[fig6_1] if row.published_r2 is not None)
    assert at_three.r2 == pytest.approx(at_three.published_r2, abs=1e-6)
    assert at_three.rmse == pytest.approx(at_three.published_rmse, abs=1e-6)
    assert [row.relative for row in made[fig6_2] if row.published is not None] == pytest.approx([0.906345], abs=1e-6)
    small, large = made[fig7_1]
    assert large.mse < small.mse
    three = {(row.technique, row.scaled_by): row.relative for row in made[fig7_2]}
    assert three["LR", "own"] > 0.957
    assert three["ridge", "training"] >= 0.96
    for figure, rows in made.items():
        drawn(figure, rows, tmp_path)


def drawn(figure, rows, folder: Path) -> None:  # type: ignore[no-untyped-def]
    figure.plot(rows, folder / "it.svg")
    assert ET.parse(folder / "it.svg").getroot().tag.endswith("svg")  # noqa: S314
