import math

import pytest

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.request import Outcome, Request
from cotenant.measure.report import Report
from cotenant.measure.timeline import Timeline
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import (
    Applied,
    Arrived,
    Command,
    Drained,
    Event,
    Finished,
    LaneModel,
    LaneSpec,
    Reply,
    Run,
)
from cotenant.sim.recorder import LanePlace, Recorder, lane_places
from cotenant.sim.run import simulate
from tests.sim.test_run import PLAN, PROBLEM


def lane(name: str) -> LaneSpec:
    return LaneSpec(id=LaneId.parse(name), models=(LaneModel(model="a", latencies=(1.0,)),))


def request(id: int, arrived: float, slo: float = 2.0) -> Request:
    return Request(id, "a", arrived, arrived + slo)


def told(story: list[tuple[float, Event, list[Command]]], slots: dict[LaneId, LanePlace], seconds: float) -> Timeline:
    """What is written down of events to which these commands are the answers."""
    answers = iter([commands for _, _, commands in story])
    recorder = Recorder(lambda event, now: next(answers), ["a"], slots, seconds=seconds, intervals=round(seconds))
    for now, event, _ in story:
        recorder(event, now)
    return recorder.timeline()


def test_recorder_interval_holds_what_happened_in_it() -> None:
    """One device, half of it a lane: a request runs from 0.5 to 2.5 s while another waits until it expires at 3 s."""
    first, second = request(0, 0.5), request(1, 1.0)
    story: list[tuple[float, Event, list[Command]]] = [
        (0.0, Applied((lane("cpu-0/0"),)), []),
        (0.5, Arrived(first), [Run(LaneId.parse("cpu-0/0"), 1, "a", (first,))]),
        (1.0, Arrived(second), []),
        (2.5, Finished(LaneId.parse("cpu-0/0"), 1), [Reply((first,), Outcome.SERVED)]),
        (
            3.0,
            Arrived(request(2, 3.0)),
            [Reply((second,), Outcome.EXPIRED), Reply((request(2, 3.0),), Outcome.REJECTED)],
        ),
    ]
    line = told(story, {LaneId.parse("cpu-0/0"): LanePlace(DeviceId("cpu", 0), 500, 3.6)}, 4.0)
    assert line.times == [0.5, 1.5, 2.5, 3.5]
    assert line.offered == {"a": [1.0, 1.0, 0.0, 1.0]}
    assert line.goodput == {"a": [0.0, 0.0, 1.0, 0.0]}
    assert line.missed == {"a": [0.0, 0.0, 0.0, 2.0]}
    assert line.p99 == {"a": [None, None, pytest.approx(2.0, rel=0.01), None]}
    assert line.waiting == pytest.approx([0.0, 1.0, 1.0, 0.0])
    assert line.busy == pytest.approx([0.25, 0.5, 0.25, 0.0])
    assert line.devices == pytest.approx([1.0] * 4)
    assert line.cost == pytest.approx([3.6] * 4)
    assert line.utilisation == pytest.approx(0.25)
    assert line.spent == pytest.approx(4 * 3.6 / 3600)
    assert line.answers == 1


def test_recorder_device_counts_from_its_first_lane_until_drained() -> None:
    slots = {
        LaneId.parse("v100-0/0"): LanePlace(DeviceId("v100", 0), 1000, 2.0),
        LaneId.parse("t4-0/0"): LanePlace(DeviceId("t4", 0), 1000, None),
    }
    story: list[tuple[float, Event, list[Command]]] = [
        (0.0, Applied((lane("v100-0/0"),)), []),
        (1.0, Applied((lane("v100-0/0"), lane("t4-0/0"))), []),
        (2.5, Applied((lane("t4-0/0"),)), [Drained(LaneId.parse("v100-0/0"))]),
    ]
    line = told(story, slots, 4.0)
    assert line.devices == pytest.approx([1.0, 2.0, 1.5, 1.0])
    assert line.cost == pytest.approx([2.0, 2.0, 1.0, 0.0])
    assert told(story, {name: LanePlace(slot.device, 1000, None) for name, slot in slots.items()}, 4.0).cost is None


def recorded(seconds: float) -> tuple[Report, Timeline]:
    recorder = Recorder(Dispatcher().handle, PROBLEM.rates, lane_places(PLAN, PROBLEM.fleet), seconds=seconds)
    return simulate(PLAN, PROBLEM, seconds=seconds, handle=recorder), recorder.timeline()


def test_recorder_does_not_change_the_run() -> None:
    report, line = recorded(20.0)
    assert report == simulate(PLAN, PROBLEM, seconds=20.0)
    assert len(line.waiting) == 60
    for row in report.models:
        assert math.fsum(line.offered[row.model]) * line.step == pytest.approx(row.offered * 20)
        late = 0.1 * row.offered  # answers after the last arrival are not in any interval
        assert math.fsum(line.goodput[row.model]) * line.step == pytest.approx(row.goodput * 20, abs=late)
    work = sum((row.observed or 0.0) * row.served / (row.batch or 1.0) for row in report.models)
    assert line.utilisation == pytest.approx(work / 2, rel=0.01)  # each runs on half of the device


def test_lane_places_have_share_and_price_of_their_device() -> None:
    placement = Placement(model="a", batch=1, rate=1.0, duty=0.1, latency=0.1)
    cuts = tuple(Partition(share=share, placements=(placement,)) for share in (600, 400))
    plan = Plan(planner="hand", devices=(Device(id=DeviceId("v100", 3), partitions=cuts),))
    assert lane_places(plan, [Kind(name="v100", price=3.0)]) == {
        LaneId.parse("v100-3/0"): LanePlace(DeviceId("v100", 3), 600, 3.0),
        LaneId.parse("v100-3/1"): LanePlace(DeviceId("v100", 3), 400, 3.0),
    }
