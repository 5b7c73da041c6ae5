"""What must hold however events fall: over random sequences of starts, deaths, lost devices, plans and late news."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import given, settings

from cotenant.control.events import (
    DeviceRestored,
    DevicesLost,
    LaneFailed,
    LaneLost,
    LaneReady,
    LanesDown,
    LaneStopped,
    PartitionClosed,
    ReviveLane,
    StartFailed,
    Switched,
    Woke,
    WorkerReady,
    WorkerRefused,
    WorkersExited,
)
from cotenant.control.orchestrator import Event, Orchestrator
from cotenant.control.revision import MemoryPolicy
from cotenant.control.rollout import Rollout, RolloutOptions
from cotenant.control.supervisor import Supervisor
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Outcome
from tests.control.world import OPTIONS, Cut, World

D0, D1, D2 = (DeviceId("d", index) for index in range(3))

CUTS = [
    Cut(D0, ("a",), 2),
    Cut(D0, ("b",), 1),
    Cut(D0, ("a", "b"), 2, 300),
    Cut(D0, ("c",), None, 500),
    Cut(D1, ("a",), 3, 300),
    Cut(D1, ("c",), 1),
    Cut(D1, ("b", "c"), 2, 200),
]
CAPACITY = {D0: 4, D1: 4}
FAR = 1e5  # seconds: less than the longest deadline


class Chance:
    """Turns drawn numbers into what happens next, out of all that may happen."""

    def __init__(self, world: World, *, failures: bool) -> None:
        self.world = world
        self.failures = failures
        self.requested = 0

    def step(self, kind: int, which: int) -> None:
        """kind: of the things that may happen now. which: of those to which it may happen."""
        actions = self._actions(which)
        actions[kind % len(actions)]()

    def _actions(self, which: int) -> list[Callable[[], None]]:
        world = self.world

        def one(items: list[int]) -> int:
            return items[which % len(items)]

        starting = [n for n, w in world.workers.items() if not w.ready and not w.killed]
        serving = [n for n, w in world.workers.items() if w.ready and not w.killed and not w.retired]
        leaving = [n for n, w in world.workers.items() if w.killed or w.retired]
        actions: list[Callable[[], None]] = [
            lambda: self._request(which, None),
            lambda: self._arrive(which),
            lambda: self._arrive(which),
        ]
        if starting:
            actions += [lambda: world.ready(one(starting))] * 3
        if leaving:
            actions += [lambda: world.exit(one(leaving), "it was stopped")] * 2
        if world.closing:
            actions += [lambda: world.close(which % len(world.closing))] * 2
        if world.running:
            actions += [lambda: world.finish(list(world.running)[which % len(world.running)])] * 3
        if any(timer.time < world.now + FAR for timer in world.timers):
            actions.append(world.wake)
        if world.news:
            actions.append(lambda: self._repeat(which))
        if self.failures:
            actions += [lambda: self._unassignable(which), lambda: world.lose(*(D0, D1)[which % 2 : 1 + which % 3])]
            actions += [
                lambda: self._request(which, self._base(which)),
                lambda: world.abort(self.requested - which % 3),
            ]
            if starting:
                actions += [lambda: world.exit(one(starting)), lambda: world.refuse(one(starting))]
            if serving:
                actions += [
                    lambda: world.exit(one(serving)),
                    lambda: self._crash(which),
                    lambda: world.busy(one(serving), world.now - which),
                ]
            if world.lost:
                actions += [lambda: world.restore(sorted(world.lost)[which % len(world.lost)])] * 3
            if world.cuts:
                actions.append(lambda: world.revive(list(world.cuts)[which % len(world.cuts)]))
        return actions

    def _crash(self, which: int) -> None:
        """All that was spawned on a device: its process, where one serves all lanes."""
        world, device = self.world, f"d{which % 2}"
        world.crash([n for n, w in world.workers.items() if world.cuts[w.lane].device == device and not w.abandoned])

    def _request(self, which: int, base: int | None) -> None:
        self.requested += 1
        self.world.request(self.requested, *[cut for bit, cut in enumerate(CUTS) if which >> bit & 1], base=base)

    def _base(self, which: int) -> int:
        desired = self.world.orchestrator.rollout.desired
        return 0 if desired is None else desired.number - which % 2

    def _unassignable(self, which: int) -> None:
        self.world.unassignable.add(self.requested + 1)
        self._request(which, None)

    def _arrive(self, which: int) -> None:
        self.world.arrive("abc"[which % 3], within=(0.2, 30.0, 1e6)[which // 3 % 3])

    def _repeat(self, which: int) -> None:
        """News that everybody has had already, or that was on its way for long."""
        world = self.world
        event = world.news[which % len(world.news)]
        match event:
            case WorkersExited(workers):
                stale = not any(incarnation in world.workers for _, incarnation in workers)
            case WorkerReady(_, incarnation):
                stale = incarnation not in world.workers or world.workers[incarnation].ready
            case WorkerRefused(_, incarnation):
                stale = incarnation not in world.workers
            case DevicesLost(devices):
                stale = devices.keys() <= world.lost
            case DeviceRestored(device):
                stale = device not in world.lost
            case PartitionClosed(lane, incarnation):
                stale = not any(close.lane == lane for close in world.closing)
            case Woke() | Switched():
                stale = True
            case _:
                stale = False
        if stale:
            world.feed(event)


STEPS = st.lists(st.tuples(st.integers(0, 59), st.integers(0, 127)), min_size=5, max_size=120)


@settings(max_examples=400, deadline=None)
@given(STEPS, st.sampled_from(MemoryPolicy), st.booleans(), st.integers(0, 2))
def test_orchestrator_over_random_events_keeps_every_invariant(
    steps: list[tuple[int, int]], memory: MemoryPolicy, stops: bool, standbys: int
) -> None:
    world = World(CAPACITY, memory, standbys=standbys)
    chance = Chance(world, failures=True)
    for kind, which in steps:
        chance.step(kind, which)
    if stops:
        world.shutdown()
    world.settle()
    world.check_settled()


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_rollout_without_failures_loses_no_request_of_a_model_that_stays(steps: list[tuple[int, int]]) -> None:
    world = World()  # whose devices have memory for all
    everywhere = Cut(D2, ("a", "b", "c"), 1, 900)
    world.request(1, everywhere)
    world.settle()
    chance = Chance(world, failures=False)
    chance.requested = 1

    def request(which: int, base: int | None) -> None:
        chance.requested += 1
        cuts = [cut for bit, cut in enumerate(CUTS) if which >> bit & 1]
        moves = Cut(D2, ("a", "b", "c"), which % 3, 900)  # as another partition each time
        world.request(chance.requested, *cuts, moves)

    chance._request = request  # type: ignore[method-assign]

    def arrive(which: int) -> None:
        world.arrive("abc"[which % 3])

    chance._arrive = arrive  # type: ignore[method-assign]
    for kind, which in steps:
        chance.step(kind, which)
    world.settle()
    world.check_settled()
    assert set(world.replies.values()) <= {Outcome.SERVED}


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_orchestrator_fed_the_same_events_gives_the_same_commands(steps: list[tuple[int, int]]) -> None:
    world = World(CAPACITY, MemoryPolicy.GAP)
    story: list[tuple[Event, float, list[object]]] = []
    handle = world.orchestrator.handle

    def recorded(event: Event, now: float) -> list[object]:
        commands = handle(event, now)
        story.append((event, now, list(commands)))
        return commands  # type: ignore[return-value]

    world.orchestrator.handle = recorded  # type: ignore[method-assign, assignment]
    chance = Chance(world, failures=True)
    for kind, which in steps:
        chance.step(kind, which)
    again = Orchestrator(Rollout(RolloutOptions(memory=MemoryPolicy.GAP)), Supervisor(OPTIONS))
    for event, now, commands in story:
        assert again.handle(event, now) == commands


def test_orchestrator_keeps_no_news_of_lanes_to_itself() -> None:
    """A driver logs and counts them."""
    world = World()
    world.request(1, Cut(D0, ("a",)))
    (incarnation,) = world.workers
    world.ready(incarnation)
    world.lose(D0)
    news = [word for word in world.take() if isinstance(word, LaneReady | LanesDown | LaneLost)]
    assert news == [
        LaneReady(LaneId(D0, 0)),
        LanesDown((LaneId(D0, 0),), "d-0 is lost: it fell off the bus"),
        LaneLost(LaneId(D0, 0), "d-0 is lost: it fell off the bus"),
    ]
    assert not [word for word in world.take() if isinstance(word, LaneFailed | LaneStopped | StartFailed | ReviveLane)]
