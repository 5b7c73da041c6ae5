from __future__ import annotations

from cotenant.control.adaptation import BatchLatency, Observed
from cotenant.control.observed_totals import ModelTotals, ObservedTotals


def test_observation_is_what_is_new_since_the_last_one() -> None:
    totals = ObservedTotals()
    first = ModelTotals(arrived=5, rows=20, ended=4, stayed=4, within_target=3, batches=2, predicted=0.25, observed=0.5)
    totals.observe({"a": first}, 1.0)
    then = ModelTotals(arrived=8, rows=50, ended=6, stayed=5, within_target=4, batches=5, predicted=1.0, observed=1.5)
    assert totals.observe({"a": then}, 0.5) == Observed(
        seconds=0.5,
        offered={"a": 30},
        stayed={"a": 1},
        within_target={"a": 1},
        waiting={"a": 2},
        latencies={"a": BatchLatency(3, 0.75, 1.0)},
    )


def test_model_that_appears_later_is_new_from_its_start() -> None:
    totals = ObservedTotals()
    totals.observe({"a": ModelTotals()}, 1.0)
    assert totals.observe({"a": ModelTotals(), "b": ModelTotals(rows=3)}, 1.0) == Observed(
        seconds=1.0, offered={"b": 3}
    )


def test_stage_that_ends_more_often_than_callers_ask_waits_for_nothing() -> None:
    assert ObservedTotals().observe({"a": ModelTotals(arrived=1, ended=4)}, 1.0).waiting == {}
