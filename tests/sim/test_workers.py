import math
from collections.abc import Iterable, Iterator, Mapping

import pytest

from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.errors import ConfigError, PlanError
from cotenant.runtime.events import Applied, Died, Event, LaneModel, LaneSpec, Ready, Woke
from cotenant.runtime.lane_assignment import LaneAssignment
from cotenant.sim.workers import Workers
from cotenant.workload.failures import Failure


def plan(*models: str) -> Plan:
    """A device with one partition for each model."""
    cuts = tuple(
        Partition(share=200, placements=(Placement(model=name, batch=1, rate=1.0, duty=0.1, latency=0.1),))
        for name in models
    )
    return Plan(planner="hand", devices=(Device(kind="cpu", id=0, partitions=cuts),))


def lanes(plan: Plan) -> Iterator[LaneSpec]:
    for _, _, placement in plan.placements():
        yield LaneSpec(id="", models=(LaneModel(model=placement.model, latencies=(0.1,)),))


class Watched:
    """Workers, with a word for each of their events and for the lanes that were opened."""

    def __init__(self, first: Plan, startup: float = 0.0) -> None:
        self.opened: list[list[str]] = []
        self.workers = Workers(first, lanes, self._open, lambda lane: startup)

    def _open(self, lanes: Mapping[str, LaneAssignment]) -> None:
        self.opened.append(list(lanes))

    def story(self) -> list[tuple[float, str]]:
        return [(round(now, 6), _word(event)) for now, event in self.workers.events()]


def _word(event: Event) -> str:
    match event:
        case Applied(specs):
            return " ".join(["applied", *(spec.id for spec in specs)])
        case Ready(lane):
            return f"ready {lane}"
        case Died(lane):
            return f"died {lane}"
        case Woke():
            return "look"
        case _:
            raise AssertionError(event)


START = [(0.0, "applied cpu-0/0 cpu-0/1"), (0.0, "ready cpu-0/0"), (0.0, "ready cpu-0/1")]


def test_a_worker_that_fails_starts_anew_when_it_may() -> None:
    watched = Watched(plan("a", "b"), startup=2.0)
    watched.workers.fail([Failure(parts=("cpu-0/1",), time=5.0, back=1.0)])
    assert watched.story() == [*START, (5.0, "died cpu-0/1"), (8.0, "ready cpu-0/1")]


def test_a_device_takes_all_its_workers_along_and_may_never_come_back() -> None:
    watched = Watched(plan("a", "b"))
    watched.workers.fail([Failure(parts=("cpu-0", "cpu-7"), time=5.0)])
    assert watched.story() == [*START, (5.0, "died cpu-0/0"), (5.0, "died cpu-0/1")]


def test_what_fails_again_before_it_is_up_waits_for_the_longer_of_both() -> None:
    watched = Watched(plan("a", "b"), startup=1.0)
    watched.workers.fail(
        [
            Failure(parts=("cpu-0/0",), time=5.0, back=1.0),
            Failure(parts=("cpu-0",), time=5.5, back=3.0),
            Failure(parts=("cpu-0/1",), time=6.0, back=0.0),
        ]
    )
    died = [(5.0, "died cpu-0/0"), (5.5, "died cpu-0/0"), (5.5, "died cpu-0/1"), (6.0, "died cpu-0/1")]
    assert watched.story() == [*START, *died, (9.5, "ready cpu-0/0"), (9.5, "ready cpu-0/1")]


def test_a_change_starts_what_is_new_beside_what_is_there_and_then_goes_over_at_once() -> None:
    watched = Watched(plan("a", "b"), startup=2.0)
    watched.workers.change([(5.0, plan("b", "c"))])
    assert watched.story() == [
        *START,
        (7.0, "applied cpu-0/0 cpu-0/1 cpu-0/2"),
        (7.0, "ready cpu-0/2"),
        (7.0, "applied cpu-0/1 cpu-0/2"),
    ]
    assert watched.opened == [["cpu-0/0", "cpu-0/1"], ["cpu-0/2"], ["cpu-0/1", "cpu-0/2"]]


def test_of_plans_asked_for_during_a_change_the_last_is_next() -> None:
    watched = Watched(plan("a"), startup=2.0)
    watched.workers.change([(5.0, plan("b")), (5.5, plan("c")), (6.0, plan("d"))])
    assert [word for _, word in watched.story() if word.startswith("applied")][1:] == [
        "applied cpu-0/0 cpu-0/1",
        "applied cpu-0/1",
        "applied cpu-0/1 cpu-0/2",
        "applied cpu-0/2",
    ]
    assert [next(iter(lane.spec.models)).model for lane in watched.workers.layout.lanes.values()] == ["d"]


def test_a_failure_holds_back_what_is_starting() -> None:
    watched = Watched(plan("a"), startup=2.0)
    watched.workers.change([(5.0, plan("b"))])
    watched.workers.fail([Failure(parts=("cpu-0",), time=6.0, back=10.0)])
    assert (18.0, "applied cpu-0/1") in watched.story()


def test_a_plan_whose_workers_cannot_start_changes_nothing() -> None:
    watched = Watched(plan("a"))
    watched.workers.fail([Failure(parts=("cpu-0",), time=4.0)])
    watched.workers.change([(5.0, plan("b")), (6.0, plan("a"))])
    assert watched.story() == [
        (0.0, "applied cpu-0/0"),
        (0.0, "ready cpu-0/0"),
        (4.0, "died cpu-0/0"),
        (6.0, "applied cpu-0/0"),
        (6.0, "applied cpu-0/0"),
    ]


class Alternating:
    """Asks for the other of two plans at every second look."""

    period = 2.0

    def __init__(self) -> None:
        self.seen: list[tuple[float, dict[str, float]]] = []

    def observe(self, rates: Mapping[str, float], now: float) -> Plan | None:
        self.seen.append((now, dict(rates)))
        return plan("b" if len(self.seen) % 4 == 2 else "a") if len(self.seen) % 2 == 0 else None


def test_a_control_sees_rates_and_its_plans_are_gone_over_to() -> None:
    watched, control = Watched(plan("a"), startup=1.0), Alternating()
    counts = iter([0, 6, 6, 10, 30])
    watched.workers.control(control, lambda: {"a": next(counts)}, until=9.0)
    story = watched.story()
    assert control.seen == [(2.0, {"a": 3.0}), (4.0, {"a": 0.0}), (6.0, {"a": 2.0}), (8.0, {"a": 10.0})]
    assert [now for now, word in story if word == "look"] == [2.0, 4.0, 6.0, 8.0]
    assert [(now, word) for now, word in story if word.startswith("ready")] == [
        (0.0, "ready cpu-0/0"),
        (5.0, "ready cpu-0/1"),
        (9.0, "ready cpu-0/2"),
    ]


def test_a_failure_of_what_is_not_there_is_refused() -> None:
    watched = Watched(plan("a", "b"))
    with pytest.raises(
        ConfigError, match=r"^a failure of cpu-1: no partition is there; the plan has cpu-0/0, cpu-0/1$"
    ):
        watched.workers.fail([Failure(parts=("cpu-1",), time=1.0)])


@pytest.mark.parametrize(
    ("time", "back", "message"),
    [
        (-1.0, 1.0, r"^a failure of cpu-0 at -1 s; take 0 or more$"),
        (math.nan, 1.0, r"^a failure of cpu-0 at nan s; take 0 or more$"),
        (1.0, -1.0, r"^a failure of cpu-0 that ends after -1 s; take 0 or more$"),
    ],
)
def test_a_failure_at_no_time_is_refused(time: float, back: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Failure(parts=("cpu-0",), time=time, back=back)


def at_most_three(lanes: Iterable[LaneAssignment]) -> str:
    """Devices that hold three workers and no more."""
    return "it is full" if len(list(lanes)) > 3 else ""


class Asks:
    """A control that asks for a plan at its first look."""

    period = 1.0

    def __init__(self, asked: Plan) -> None:
        self.asked: Plan | None = asked

    def observe(self, rates: Mapping[str, float], now: float) -> Plan | None:
        asked, self.asked = self.asked, None
        return asked


def crowded(first: Plan) -> Watched:
    watched = Watched(first)
    watched.workers = Workers(first, lanes, lambda opened: None, lambda lane: 2.0, crowded=at_most_three)
    return watched


def test_a_change_for_which_there_is_no_memory_is_refused_when_it_comes() -> None:
    watched = crowded(plan("a", "b"))
    watched.workers.change([(1.0, plan("a", "c"))])  # three at once
    assert watched.story()[-1] == (3.0, "applied cpu-0/0 cpu-0/2")
    watched = crowded(plan("a", "b"))
    watched.workers.change([(1.0, plan("a", "c")), (2.0, plan("d", "e"))])  # the second waits, and then there are four
    with pytest.raises(PlanError, match=r"^the plan cannot change after 3 s: it is full; go there by"):
        watched.story()


def test_what_a_control_asks_for_does_not_happen_where_there_is_no_memory_for_it() -> None:
    watched = crowded(plan("a", "b"))
    watched.workers.control(Asks(plan("c", "d")), dict, until=1.5)
    assert watched.story() == [*START, (1.0, "look")]
