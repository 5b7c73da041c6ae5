import math
from collections.abc import Iterator, Mapping

import pytest

from cotenant.control.events import WorkerReady
from cotenant.core.identity import DeviceId, LaneId, parse_identity
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.errors import ConfigError, PlanError
from cotenant.planners import Problem
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Applied, Command, Died, Event, LaneModel, LaneSpec, Ready
from cotenant.runtime.lane_assignment import LaneAssignment
from cotenant.sim.loop import play
from cotenant.sim.workers import Workers
from cotenant.workload.failures import Failure


def plan(*models: str) -> Plan:
    """A device with one partition for each model."""
    cuts = tuple(
        Partition(share=200, placements=(Placement(model=name, batch=1, rate=1.0, duty=0.1, latency=0.1),))
        for name in models
    )
    return Plan(planner="hand", devices=(Device(id=DeviceId("cpu"), partitions=cuts),))


def lanes(plan: Plan) -> Iterator[LaneSpec]:
    for _, _, placement in plan.placements():
        yield LaneSpec(id=LaneId(DeviceId("cpu"), 0), models=(LaneModel(model=placement.model, latencies=(0.1,)),))


def problem(memory: int = 1 << 62) -> Problem:
    """Devices with that much memory, of which each worker takes one byte."""
    point = Point(share=200, batch=1, latency=0.1, memory=1)
    return Problem(
        models=tuple(Model(name=name, slo=1.0) for name in "abcde"),
        rates=dict.fromkeys("abcde", 1.0),
        fleet=(Kind(name="cpu", count=9, memory=memory),),
        profiles={(name, "cpu"): Profile(name, "cpu", [point]) for name in "abcde"},
    )


class Watched:
    """Workers in a run without requests, with a word for each event that the dispatcher is told."""

    def __init__(self, first: Plan, startup: float = 0.0, memory: int = 1 << 62) -> None:
        self.opened: list[list[str]] = []
        self.workers = Workers(first, problem(memory), lanes, self._open, lambda lane: startup)

    def _open(self, lanes: Mapping[LaneId, LaneAssignment]) -> None:
        self.opened.append(list(lanes))

    def story(self) -> list[tuple[float, str]]:
        told: list[tuple[float, str]] = []
        dispatcher = Dispatcher()

        def handle(event: Event, now: float) -> list[Command]:
            told.append((round(now, 6), _word(event)))
            return dispatcher.handle(event, now)

        play(handle, (), lambda run, now: 0.1, lambda reply, now: (), self.workers)
        return told

    def outcomes(self) -> list[tuple[int, str]]:
        return [(ended.revision.number, ended.outcome.value) for ended in self.workers.ended]


def _word(event: Event) -> str:
    match event:
        case Applied(specs):
            return " ".join(["applied", *(spec.id for spec in specs)])
        case Ready(lane):
            return f"ready {lane}"
        case Died(lane, _, others):
            return " ".join(["died", lane, *others])
        case _:
            raise AssertionError(event)


START = [
    (0.0, "applied cpu-0/0 cpu-0/1"),
    (0.0, "ready cpu-0/0"),
    (0.0, "ready cpu-0/1"),
    (0.0, "applied cpu-0/0 cpu-0/1"),
]


def test_worker_that_fails_is_started_again_once_it_may() -> None:
    watched = Watched(plan("a", "b"), startup=2.0)
    watched.workers.fail([Failure(parts=(LaneId.parse("cpu-0/1"),), time=5.0, back=1.0)])
    assert watched.story() == [*START, (5.0, "died cpu-0/1"), (8.0, "ready cpu-0/1")]


@pytest.mark.parametrize("part", [LaneId.parse("cpu-0/1"), DeviceId.parse("cpu-0")])
def test_failure_at_the_beginning_finds_the_first_plan_in_force(part: LaneId | DeviceId) -> None:
    watched = Watched(plan("a", "b"), startup=2.0)
    watched.workers.fail([Failure(parts=(part,), time=0.0, back=1.0)])
    lost = "cpu-0/1" if isinstance(part, LaneId) else "cpu-0/0 cpu-0/1"
    assert watched.story() == [*START, (0.0, f"died {lost}"), *((3.0, f"ready {lane}") for lane in lost.split())]
    assert watched.outcomes() == [(1, "completed")]


def test_command_that_fails_costs_no_other_and_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(plan("a", "b"))
    spawned: list[str] = []

    def fails(ready: WorkerReady, now: float) -> None:
        spawned.append(ready.lane)
        raise ValueError(f"the command of {ready.lane} failed")

    monkeypatch.setattr(watched.workers, "_spawn", fails)
    with pytest.raises(ValueError, match=r"^the command of cpu-0/0 failed$"):
        watched.story()
    assert spawned == ["cpu-0/0", "cpu-0/1"]


def test_worker_that_dies_is_started_again_after_the_first_delay() -> None:
    watched = Watched(plan("a", "b"), startup=2.0)
    watched.workers.fail([Failure(parts=(LaneId.parse("cpu-0/1"),), time=5.0, back=0.0)])
    assert watched.story() == [*START, (5.0, "died cpu-0/1"), (7.01, "ready cpu-0/1")]


def test_device_that_fails_takes_all_its_workers_at_one_moment() -> None:
    watched = Watched(plan("a", "b"))
    watched.workers.fail([Failure(parts=(DeviceId.parse("cpu-0"), DeviceId.parse("cpu-7")), time=5.0)])
    assert watched.story() == [*START, (5.0, "died cpu-0/0 cpu-0/1")]


def test_device_that_returns_starts_its_workers_again() -> None:
    watched = Watched(plan("a", "b"), startup=2.0)
    watched.workers.fail([Failure(parts=(DeviceId.parse("cpu-0"),), time=5.0, back=1.0)])
    assert watched.story()[4:] == [(5.0, "died cpu-0/0 cpu-0/1"), (8.0, "ready cpu-0/0"), (8.0, "ready cpu-0/1")]


def test_device_that_fails_twice_returns_after_the_longer_failure() -> None:
    watched = Watched(plan("a"), startup=1.0)
    watched.workers.fail(
        [
            Failure(parts=(DeviceId.parse("cpu-0"),), time=5.0, back=9.0),
            Failure(parts=(DeviceId.parse("cpu-0"),), time=6.0, back=1.0),
        ]
    )
    assert watched.story()[3:] == [(5.0, "died cpu-0/0"), (15.0, "ready cpu-0/0")]


def test_worker_that_fails_again_before_it_is_up_waits_for_the_longer_failure() -> None:
    watched = Watched(plan("a", "b"), startup=1.0)
    watched.workers.fail(
        [
            Failure(parts=(LaneId.parse("cpu-0/0"),), time=5.0, back=1.0),
            Failure(parts=(DeviceId.parse("cpu-0"),), time=5.5, back=3.0),
            Failure(parts=(LaneId.parse("cpu-0/1"),), time=6.0, back=0.0),
        ]
    )
    died = [(5.0, "died cpu-0/0"), (5.5, "died cpu-0/1")]
    assert watched.story() == [*START, *died, (9.5, "ready cpu-0/0"), (9.5, "ready cpu-0/1")]


def test_rollout_starts_new_lanes_beside_old_and_switches_at_once() -> None:
    watched = Watched(plan("a", "b"), startup=2.0)
    watched.workers.change([(5.0, plan("b", "c"))])
    assert watched.story() == [
        *START,
        (7.0, "applied cpu-0/0 cpu-0/1 cpu-0/2"),
        (7.0, "ready cpu-0/2"),
        (7.0, "applied cpu-0/1 cpu-0/2"),
    ]
    assert watched.opened[-2:] == [["cpu-0/2"], ["cpu-0/1", "cpu-0/2"]]


def test_last_of_the_plans_requested_during_a_rollout_is_next() -> None:
    watched = Watched(plan("a"), startup=2.0)
    watched.workers.change([(5.0, plan("b")), (5.5, plan("c")), (6.0, plan("d"))])
    assert [word for _, word in watched.story() if word.startswith("applied")][2:] == [
        "applied cpu-0/0 cpu-0/1",
        "applied cpu-0/1",
        "applied cpu-0/1 cpu-0/2",
        "applied cpu-0/2",
    ]
    assert watched.outcomes() == [(1, "completed"), (3, "superseded"), (2, "completed"), (4, "completed")]


@pytest.mark.parametrize("part", ["cpu-0", "cpu-0/1"])
def test_rollout_with_a_failed_start_rolls_back(part: str) -> None:
    """The old lane serves on, as long as its own device is there."""
    watched = Watched(plan("a"), startup=2.0)
    watched.workers.change([(5.0, plan("b"))])
    watched.workers.fail([Failure(parts=(LaneId.parse("cpu-0/0"), parse_identity(part)), time=6.0, back=10.0)])
    assert watched.story()[3:] == [(6.0, "died cpu-0/0"), (18.0, "ready cpu-0/0")]
    assert watched.outcomes() == [(1, "completed"), (2, "rolled-back")]


def test_rollout_whose_workers_cannot_start_changes_nothing() -> None:
    watched = Watched(plan("a"))
    watched.workers.fail([Failure(parts=(DeviceId.parse("cpu-0"),), time=4.0)])
    watched.workers.change([(5.0, plan("b")), (6.0, plan("a"))])
    assert watched.story() == [
        (0.0, "applied cpu-0/0"),
        (0.0, "ready cpu-0/0"),
        (0.0, "applied cpu-0/0"),
        (4.0, "died cpu-0/0"),
        (6.0, "applied cpu-0/0"),
        (6.0, "applied cpu-0/0"),
    ]


def test_failure_of_an_unknown_target_is_rejected() -> None:
    watched = Watched(plan("a", "b"))
    with pytest.raises(
        ConfigError, match=r"^a failure of cpu-1: no partition is there; the plan has cpu-0/0, cpu-0/1$"
    ):
        watched.workers.fail([Failure(parts=(DeviceId.parse("cpu-1"),), time=1.0)])


@pytest.mark.parametrize(
    ("time", "back", "message"),
    [
        (-1.0, 1.0, r"^a failure of cpu-0 at -1 s; use 0 or more$"),
        (math.nan, 1.0, r"^a failure of cpu-0 at nan s; use 0 or more$"),
        (1.0, -1.0, r"^a failure of cpu-0 that ends after -1 s; use 0 or more$"),
    ],
)
def test_failure_at_an_invalid_time_is_rejected(time: float, back: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Failure(parts=(DeviceId.parse("cpu-0"),), time=time, back=back)


def test_rollout_without_memory_for_both_plans_is_an_error() -> None:
    watched = Watched(plan("a", "b"), startup=2.0, memory=3)
    watched.workers.change([(1.0, plan("a", "c"))])  # three at once
    assert watched.story()[-1] == (3.0, "applied cpu-0/0 cpu-0/2")
    watched = Watched(plan("a", "b"), startup=2.0, memory=3)
    watched.workers.change([(1.0, plan("a", "c")), (2.0, plan("d", "e"))])  # the second waits, and then there are four
    with pytest.raises(PlanError, match=r"^the plan cannot change after 3 s: cpu-0 has 3 B of memory, and its workers"):
        watched.story()


def test_lost_devices_stop_until_they_are_restored() -> None:
    watched = Watched(plan("a"), startup=1.0)
    cpu = DeviceId.parse("cpu-0")
    watched.workers.at(2.0, lambda now: watched.workers.lose({cpu}, "it was taken away", now))
    watched.workers.at(5.0, lambda now: watched.workers.restore({cpu}, now))
    story = watched.story()
    assert [word for now, word in story if now == 2.0] == ["died cpu-0/0"]
    assert story[-1] == (6.0, "ready cpu-0/0")
