"""KACE's protocol against what its authors print, workload by workload."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant.errors import ConfigError
from cotenant.predictors import Load
from experiments.data import kace
from experiments.kace import protocol
from tests.experiments.data import needs_data

pytestmark = needs_data


def test_what_was_measured() -> None:
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
def test_each_choice_is_the_published_one(seed: int) -> None:
    train, test = kace.split(3, seed)
    expected = kace.published("KACE", seed)

    def agrees(found: dict[Load, float], column: str) -> None:
        assert len(found) == len(expected) == 21
        for load, value in found.items():
            assert value == pytest.approx(expected[kace.workload(load)][column], abs=1e-6)

    agrees(protocol.relative(test, protocol.AsPublished(train, "lr")), "prediction")
    agrees(protocol.at_random(test), "random")
    for name, column in (("MEMCAP", "memcap"), ("SM%", "sm%"), ("MEM%", "mem%")):
        agrees(protocol.relative(test, protocol.RULES[name]), column)


def test_the_papers_averages() -> None:
    published, proper = [], []
    for seed in kace.SEEDS:
        train, test = kace.split(3, seed)
        published.append(protocol.mean(protocol.relative(test, protocol.AsPublished(train, "lr"))))
        proper.append(protocol.mean(protocol.relative(test, protocol.Proper(train, whole=False))))
    assert np.mean(published) == pytest.approx(0.906345, abs=1e-6)
    assert np.mean(proper) >= 0.927


def test_models_that_were_never_seen() -> None:
    runs = kace.runs()
    targets = [load for load in protocol.workloads(runs) if load.batch == 16]
    assert len(targets) == 7
    for make, least in (
        (lambda runs: protocol.AsPublished(runs, "lr"), 0.92),
        (lambda runs: protocol.Proper(runs, whole=True), 0.96),
    ):
        found = [protocol.relative(runs, make(protocol.unseen(runs, each)), [each])[each] for each in targets]
        assert np.mean(found) >= least


def test_a_name_that_is_none() -> None:
    with pytest.raises(ConfigError, match="'resnet' is no workload"):
        kace.load("resnet")
