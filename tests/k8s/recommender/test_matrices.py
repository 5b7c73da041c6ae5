"""What is recommended, by what was measured."""

from __future__ import annotations

import msgspec
import pytest

from cotenant.errors import ConfigError, PlanError
from cotenant.k8s.recommender.matrices import PROFILES, SAMPLES, Matrices, Rate, read_fitted
from tests.k8s.recommender.measured import LOSS, PAIRS, latency, load, profile, sample

ALL = Matrices((profile("a"), profile("b"), profile("c")), tuple(PAIRS))


def test_rate_is_that_of_the_best_batch_within_the_target() -> None:
    """A batch waits for one and runs: at 500 ‰ four rows of `a` take 10 ms, one row 4 ms."""
    for target, qps, batch in ((0.02, 400.0, 4), (0.015, 250.0, 1)):
        found = ALL.rate("a", "gpu", 500, target)
        assert (found.batch, found.measured) == (batch, True) and found.qps == pytest.approx(qps)
    assert ALL.rate("a", "gpu", 500, 0.005) == Rate(0.0, 0, True)


def test_rate_that_was_not_measured_is_predicted_from_others() -> None:
    gaps = Matrices((profile("a"), profile("b"), profile("c", without=((250, 4),))))
    predicted = gaps.rate("c", "gpu", 250, 10.0)
    assert not predicted.measured and predicted.batch == 4
    assert predicted.qps == pytest.approx(4 / latency("c", 250, 4), rel=0.6)


def test_rate_of_what_is_unknown_says_what_there_is() -> None:
    with pytest.raises(PlanError, match=r"^nothing was measured on 30 % of 'gpu'; available: 25, 50, 100 %$"):
        ALL.rate("a", "gpu", 300, 1.0)
    with pytest.raises(PlanError, match=r"^nothing was measured of model 'x', or on 'gpu'; available: a, b, c$"):
        ALL.rate("x", "gpu", 500, 1.0)


def test_completed_profiles_keep_what_was_measured() -> None:
    gaps = Matrices((profile("a"), profile("b"), profile("c", without=((250, 4),))))
    points = {(each.share, each.batch): each for each in gaps.completed["c", "gpu"].points}
    assert set(points) == {(each.share, each.batch) for each in profile("c").points}
    assert points[500, 4].latency == latency("c", 500, 4)
    assert points[250, 4].memory == 1 << 30
    assert gaps.completed["a", "gpu"].points == profile("a").points


def test_slowdown_is_that_of_the_samples() -> None:
    assert ALL.slowdown(load("a"), [load("c")]) == pytest.approx(1 / (1 - LOSS["c"]), rel=1e-3)
    assert ALL.slowdown(load("a"), [load("b"), load("c")]) == pytest.approx(1 / (1 - 0.3), rel=1e-3)


def test_texts_are_read_again() -> None:
    again = Matrices.read(ALL.texts())
    assert again.revision == ALL.revision and len(again.samples) == 9
    assert again.slowdown(load("b"), [load("a")]) == pytest.approx(ALL.slowdown(load("b"), [load("a")]), rel=1e-4)
    alone = Matrices.read({PROFILES: ALL.texts()[PROFILES]})
    assert alone.samples == () and SAMPLES not in alone.texts() and alone.predictor_json() == ""
    assert alone.slowdown(load("a"), [load("b")]) == 1.0
    with pytest.raises(ConfigError, match=r"^profiles.csv:1: column 'model' is missing"):
        Matrices.read({})


def test_learnt_samples_change_revision_and_prediction() -> None:
    some = Matrices(ALL.profiles, tuple(PAIRS[:6]))
    more = some.learnt(PAIRS[6:])
    assert more.revision != some.revision and more.learnt(PAIRS) == more
    assert more.slowdown(load("c"), [load("b")]) == pytest.approx(1 / 0.9, rel=1e-3)


def test_too_few_samples_predict_nothing_yet() -> None:
    few = Matrices(ALL.profiles, (sample("a", "b"),))
    assert "measure pairs" in few.unfitted and few.predictor_json() == ""
    assert ALL.unfitted == "" and ALL.predictor_json().startswith('{\n "model": "svd"')


def test_what_is_fetched_predicts_the_same() -> None:
    profiles, interference = read_fitted(ALL.texts()[PROFILES], ALL.predictor_json())
    assert set(profiles) == {(model, "gpu") for model in "abc"}
    assert interference.slowdown(load("a"), (load("c"),)) == ALL.slowdown(load("a"), [load("c")])
    other = msgspec.structs.replace(ALL, predictor="linear")
    assert other.revision != ALL.revision
