"""Which label a lane has, from plan to plan."""

from __future__ import annotations

from typing import Any, cast

from cotenant.core.identity import LaneId
from cotenant.live.partition_labels import RETIRED, PartitionLabels
from cotenant.live.serving_state import ServingState


class Plans:
    """Put lanes in force, one plan after the other, and read their labels."""

    def __init__(self) -> None:
        self.state = ServingState(cast(Any, None))
        self.labels = PartitionLabels(self.state)

    def next(self, *lanes: str) -> dict[str, str]:
        self.state.lanes = {LaneId.parse(lane): cast(Any, None) for lane in lanes}
        return {lane: " ".join(self.labels.of(LaneId.parse(lane))) for lane in lanes}


def test_label_lane_that_stays_keeps_its_number_and_a_new_one_gets_the_lowest_free() -> None:
    plans = Plans()
    assert plans.next("cpu-0/0", "cpu-0/1", "cpu-0/2") == {
        "cpu-0/0": "cpu-0 0",
        "cpu-0/1": "cpu-0 1",
        "cpu-0/2": "cpu-0 2",
    }
    assert plans.next("cpu-0/1", "cpu-0/3", "cpu-0/4") == {
        "cpu-0/1": "cpu-0 1",
        "cpu-0/3": "cpu-0 0",
        "cpu-0/4": "cpu-0 2",
    }
    assert plans.next("cpu-0/4") == {"cpu-0/4": "cpu-0 2"}
    assert plans.next("cpu-0/5", "cpu-0/6") == {"cpu-0/5": "cpu-0 0", "cpu-0/6": "cpu-0 1"}


def test_label_each_device_counts_for_itself_and_workers_share_a_number() -> None:
    assert Plans().next("h200-0/4", "h200-0/4.2", "node/h200-0/9") == {
        "h200-0/4": "h200-0 0",
        "h200-0/4.2": "h200-0 0.2",
        "node/h200-0/9": "node/h200-0 0",
    }


def test_label_lane_that_is_not_in_force_is_retired() -> None:
    plans = Plans()
    plans.next("cpu-0/0", "cpu-0/1")
    plans.next("cpu-0/2")
    assert plans.labels.of(LaneId.parse("cpu-0/1")) == RETIRED != plans.labels.of(LaneId.parse("cpu-0/2"))
