"""The periodic controller in a hand-written world: a cloud that lies, a slow solver, rollouts that fail."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.control.adaptation import (
    Acquire,
    AcquisitionFailed,
    Adopted,
    ControllerCommand,
    ControllerEvent,
    DevicesFound,
    DevicesGone,
    Observed,
    Release,
    Roll,
    RollEnded,
    Solve,
    Solved,
)
from cotenant.control.periodic import PeriodicController, PeriodicOptions
from cotenant.control.provider import DeviceProvider, FixedProvider
from cotenant.control.revision import RolloutOutcome
from cotenant.control.scaling import ScalingContext, ScalingPolicy
from cotenant.control.scaling.gpulet import IncrementalScaling
from cotenant.control.scaling.hetsev import GreedyScaling
from cotenant.control.scaling.rates import LATEST
from cotenant.control.scaling.static import StaticScaling
from cotenant.control.scaling.utilisation import UtilisationScaling
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.units import WHOLE
from cotenant.planners import load_planner
from cotenant.sim.cloud import CloudKind, SimulatedCloud
from tests.control.scaling.contexts import problem

CAPACITY = 100.0  # requests/s of a device
KINDS = (Kind(name="gpu", count=6, price=2.0), Kind(name="other", count=2, price=1.0))
EVERY = 5.0  # seconds between observations
RELEASE_S = 20.0  # seconds until the provider hears of a release


def planned(devices: tuple[DeviceId, ...], rate: float, *, fill: bool) -> Plan:
    """Return a plan that uses the first devices, as many as the rate needs, or all."""
    used = devices if fill else devices[: -int(-rate // CAPACITY)]
    return Plan(
        planner="hand",
        devices=tuple(
            Device(
                id=device,
                partitions=(
                    Partition(
                        share=WHOLE,
                        placements=(Placement(model="a", batch=1, rate=rate / len(used), duty=0.01, latency=0.01),),
                    ),
                ),
            )
            for device in used
        ),
    )


class World:
    """Carries commands out in virtual time and checks at each that it makes sense.

    solve_s, roll_s: how long both take. fails: whether the n-th rollout fails.
    """

    def __init__(
        self,
        controller: PeriodicController,
        provider: DeviceProvider,
        devices: tuple[DeviceId, ...],
        *,
        solve_s: float = 0.5,
        roll_s: float = 2.0,
        fails: Callable[[int], bool] = lambda n: False,
    ) -> None:
        self.controller, self.provider = controller, provider
        self.now = 0.0
        self.there = set(devices)  # as the provider said
        self.plan = planned(devices, CAPACITY * len(devices), fill=True)
        self.commands: list[tuple[float, ControllerCommand]] = []
        self.offered = 0.0
        self._solve_s, self._roll_s, self._fails = solve_s, roll_s, fails
        self._agenda: list[tuple[float, int, ControllerEvent | Release]] = []
        self._order = itertools.count()
        self._solving = self._rolling = 0
        self._released: set[DeviceId] = set()
        self._rolls = 0
        self.tell(DevicesFound(devices))
        self.tell(Adopted(plan=self.plan, rates={"a": CAPACITY * len(devices)}))

    def tell(self, event: ControllerEvent) -> None:
        for command in self.controller.handle(event, self.now):
            self.commands.append((self.now, command))
            self._perform(command)

    def run(self, seconds: float, rate: Callable[[float], float]) -> None:
        end = self.now + seconds
        tick = self.now + EVERY
        while True:
            due = self._agenda[0][0] if self._agenda else end + 1
            self.now = min(tick, due, self.provider.due, end + 1)
            if self.now > end:
                self.now = end
                return
            for event in self.provider.news(self.now):
                self._provided(event)
            while self._agenda and self._agenda[0][0] <= self.now:
                self._finish(heapq.heappop(self._agenda)[2])
            if self.now >= tick:
                self._observe(rate(self.now))
                tick += EVERY

    def _observe(self, rate: float) -> None:
        self.offered = rate
        serving = [device.id for device in self.plan.devices if device.id in self.there]
        busy = min(1.0, rate / (CAPACITY * len(serving))) if serving else 0.0
        self.tell(Observed(seconds=EVERY, offered={"a": round(rate * EVERY)}, utilisation=busy))

    def _provided(self, event: ControllerEvent) -> None:
        match event:
            case DevicesFound(devices):
                assert not self.there & set(devices)
                self.there |= set(devices)
            case DevicesGone(devices):
                self.there -= set(devices)
                self._released -= set(devices)
        self.tell(event)

    def _perform(self, command: ControllerCommand) -> None:
        match command:
            case Solve(number=number, devices=devices, rates=rates, fill=fill):
                assert not self._solving and not self._rolling
                assert set(devices) <= self.there - self._released
                self._solving = number
                plan = planned(devices, rates["a"], fill=fill)
                self._later(self._solve_s, Solved(number=number, plan=plan))
            case Roll(number=number, plan=plan):
                assert not self._solving and not self._rolling
                assert not {device.id for device in plan.devices} & self._released
                self._rolling = number
                self._rolls += 1
                fails = self._fails(self._rolls) or not {device.id for device in plan.devices} <= self.there
                outcome = RolloutOutcome.ROLLED_BACK if fails else RolloutOutcome.COMPLETED
                self._next_plan = plan
                self._later(self._roll_s, RollEnded(number=number, outcome=outcome))
            case Acquire(_, count):
                assert count > 0
                self.provider.handle(command, self.now)
            case Release(devices):
                assert devices and set(devices) <= self.there and not set(devices) & self._released
                plans = [self.plan, self._next_plan] if self._rolling else [self.plan]
                assert not set(devices) & {device.id for plan in plans for device in plan.devices}
                self._released |= set(devices)
                self._later(RELEASE_S, command)

    def _finish(self, event: ControllerEvent | Release) -> None:
        match event:
            case Release():
                self.provider.handle(event, self.now)
                return
            case Solved():
                self._solving = 0
            case RollEnded(outcome=outcome):
                self._rolling = 0
                if outcome is RolloutOutcome.COMPLETED:
                    self.plan = self._next_plan
        self.tell(event)

    def _later(self, seconds: float, event: ControllerEvent | Release) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), event))

    def said(self, kind: type[ControllerCommand]) -> list[tuple[float, ControllerCommand]]:
        return [(time, command) for time, command in self.commands if isinstance(command, kind)]


class Wish:
    """A policy that wants what it is told to, and remembers what it was told."""

    horizon = 60.0

    def __init__(self, devices: Callable[[float], int]) -> None:
        self.devices = devices
        self.contexts: list[ScalingContext] = []

    def __call__(self, context: ScalingContext) -> dict[str, int]:
        self.contexts.append(context)
        return {"gpu": self.devices(context.now)}


def controller(policy: ScalingPolicy, *, fill: bool = False) -> PeriodicController:
    settings = PeriodicOptions(period=15.0, rates=LATEST, launch_seconds={"gpu": 30.0}, fill=fill)
    return PeriodicController(policy, problem({"a": 0.0}, *KINDS), settings)


def gpus(count: int) -> tuple[DeviceId, ...]:
    return tuple(DeviceId("gpu", index) for index in range(count))


def cloud(seed: int = 0, **lies: float) -> SimulatedCloud:
    gpu = CloudKind(kind="gpu", price=2.0, launch_seconds=30.0, quota=6, other="other", **lies)
    return SimulatedCloud([gpu, CloudKind(kind="other", price=1.0, quota=2)], seed=seed, used=gpus(1))


def test_policy_is_asked_every_period_of_what_was_seen() -> None:
    wish = Wish(lambda now: 1)
    world = World(controller(wish, fill=True), cloud(), gpus(1))
    world.run(60, lambda now: 50.0)
    assert [context.now for context in wish.contexts] == [15, 30, 45, 60]
    last = wish.contexts[-1]
    assert last.problem.rates == {"a": 50.0}
    assert last.ready == {"gpu": 1} and last.launching == {} and last.launch_seconds == {"gpu": 30.0}
    assert last.utilisation == 0.5
    assert [seen.time for seen in last.history] == [5.0 * n for n in range(1, 13)]
    assert [seen.wanted for seen in last.history if seen.wanted] == [{"gpu": 1, "other": 0}] * 3


def test_devices_that_are_wanted_come_and_are_used_and_go() -> None:
    world = World(controller(Wish(lambda now: 3 if now < 100 else 1), fill=True), cloud(), gpus(1))
    world.run(90, lambda now: 50.0)
    assert world.said(Acquire) == [(15.0, Acquire("gpu", 2))]
    assert world.plan.devices_used == 3
    world.run(60, lambda now: 50.0)
    assert [command for _, command in world.said(Release)] == [Release(gpus(3)[:2])]
    assert world.plan.devices_used == 1 and len(world.there) == 1


def test_devices_that_leave_run_until_the_new_plan_is_in_force() -> None:
    world = World(controller(Wish(lambda now: 2), fill=True), FixedProvider(gpus(4), gpus(4)), gpus(4))
    world.run(70, lambda now: 50.0)
    ((roll, _),) = world.said(Roll)
    assert world.said(Release) == [(roll + 2.0, Release(gpus(2)))]


def test_plan_is_made_for_rates_that_have_moved_and_only_then() -> None:
    world = World(controller(StaticScaling(devices={"gpu": 4})), FixedProvider(gpus(4), gpus(4)), gpus(4))
    world.run(300, lambda now: 90.0 if now <= 105 else 250.0)
    assert [(time, command.rates) for time, command in world.said(Solve) if isinstance(command, Solve)] == [
        (15.0, {"a": 90.0}),
        (120.0, {"a": pytest.approx(250.0)}),
    ]
    assert world.plan.devices_used == 3
    assert not world.said(Release)  # idle ones stay: they are wanted


def test_lost_device_is_replaced_at_once() -> None:
    world = World(controller(StaticScaling(devices={"gpu": 2}), fill=True), cloud(), gpus(1))
    world.run(62, lambda now: 50.0)
    assert world.plan.devices_used == 2
    world.there.discard(gpus(1)[0])
    world.tell(DevicesGone(gpus(1), "it died"))
    assert isinstance(world.commands[-1][1], Solve)
    world.run(60, lambda now: 50.0)
    assert {device.id for device in world.plan.devices} == world.there
    assert len(world.there) == 2


def test_devices_that_change_during_a_rollout_are_planned_for_at_its_end() -> None:
    fixed = FixedProvider(gpus(3), gpus(3))
    world = World(controller(StaticScaling(devices={"gpu": 3}), fill=True), fixed, gpus(3))
    world.plan = world.controller.plan = planned(gpus(3)[:1], CAPACITY, fill=True)
    world.run(16, lambda now: 50.0)
    assert isinstance(world.commands[-1][1], Roll)
    world.there.discard(gpus(3)[2])
    world.tell(DevicesGone(gpus(3)[2:], "it died"))
    assert isinstance(world.commands[-1][1], Roll)
    world.run(3, lambda now: 50.0)
    assert [time for time, _ in world.said(Solve)] == [15.0, 17.5]


def test_failed_rollout_is_tried_again_in_the_next_period() -> None:
    fixed = FixedProvider(gpus(2), gpus(2))
    world = World(controller(StaticScaling(devices={"gpu": 2})), fixed, gpus(2), fails=lambda n: n <= 2)
    world.run(70, lambda now: 50.0)
    assert [time for time, _ in world.said(Roll)] == [15.5, 30.5, 45.5]
    assert world.plan.devices_used == 1


def test_refused_devices_are_asked_for_again_in_the_next_period() -> None:
    fixed = FixedProvider(gpus(3), gpus(1))
    world = World(controller(StaticScaling(devices={"gpu": 5})), fixed, gpus(1))
    world.run(50, lambda now: 50.0)
    assert [command for _, command in world.said(Acquire)] == [Acquire("gpu", 4), Acquire("gpu", 2), Acquire("gpu", 2)]


def test_devices_that_never_come_are_given_up() -> None:
    world = World(controller(StaticScaling(devices={"gpu": 2})), cloud(silent_failure=1.0), gpus(1))
    world.run(200, lambda now: 50.0)
    assert [time for time, _ in world.said(Acquire)] == [15.0, 165.0]  # 3 · 30 s + 60 s later


def test_devices_of_a_kind_that_nobody_knows_go_back() -> None:
    world = World(controller(StaticScaling(devices={"gpu": 1})), FixedProvider([], []), gpus(1))
    stranger = DeviceId("stranger")
    world.there.add(stranger)
    world.tell(DevicesFound((stranger,)))
    assert world.commands[-1][1] == Release((stranger,))


def test_stale_answers_are_ignored() -> None:
    machine = controller(StaticScaling(devices={"gpu": 1}))
    assert machine.handle(Solved(number=7, plan=Plan(planner="late")), 0.0) == []
    assert machine.handle(RollEnded(number=7, outcome=RolloutOutcome.COMPLETED), 0.0) == []
    assert machine.handle(Observed(seconds=0.0, offered={"a": 3}), 1.0) == []
    assert machine.plan.planner == "none"


LIES = st.fixed_dictionaries(
    {
        name: st.sampled_from([0.0, 0.2])
        for name in ("failure", "silent_failure", "wrong_kind", "broken", "late", "launch_cv")
    }
    | {"lifetime": st.sampled_from([float("inf"), 200.0])}
)
POLICIES: dict[str, Callable[[], ScalingPolicy]] = {
    "static": lambda: StaticScaling(devices={"gpu": 3}),
    "utilisation": lambda: UtilisationScaling(kind="gpu", stabilisation=30.0),
    "hetsev": lambda: GreedyScaling(cool_down=30.0),
    "steps": lambda: Wish(lambda now: int(now // 40) % 5),
}


@settings(max_examples=60)
@given(
    lies=LIES,
    seed=st.integers(0, 1000),
    policy=st.sampled_from(list(POLICIES)),
    fill=st.booleans(),
    rates=st.lists(st.floats(0, 600), min_size=4, max_size=4),
    fails=st.sets(st.integers(1, 8)),
    solve_s=st.sampled_from([0.5, 25.0]),
)
def test_controller_keeps_its_promises_whatever_the_provider_does(
    lies: dict[str, float], seed: int, policy: str, fill: bool, rates: list[float], fails: set[int], solve_s: float
) -> None:
    """The world checks each command. In the end, with an honest provider, all that is wanted is there and in use."""
    provider = cloud(seed, **lies)
    machine = controller(POLICIES[policy](), fill=fill)
    world = World(machine, provider, gpus(1), fails=lambda n: n in fails, solve_s=solve_s)
    world.run(400, lambda now: rates[int(now // 100) % 4])
    provider.make_honest()
    final = 150.0
    machine.policy = StaticScaling(devices={"gpu": 2, "other": 0})
    world.run(600, lambda now: final)
    assert Counter(device.kind for device in world.there) == {"gpu": 2}
    assert {device.id for device in world.plan.devices} == world.there
    assert all(provider.works(device) for device in world.there)
    assert world.plan.rate("a") == pytest.approx(final)


def test_gpulets_loop_follows_a_wave() -> None:
    policy = IncrementalScaling(planner=load_planner("elastic"))
    options = PeriodicOptions(period=20.0, rates=LATEST)
    machine = PeriodicController(policy, problem({"a": 0.0}, KINDS[0]), options)
    world = World(machine, FixedProvider(gpus(6), gpus(1)), gpus(1))
    used = []
    for rate in (30.0, 90.0, 180.0, 90.0, 30.0):  # elastic counts on half of a device: a round may just be missed
        world.run(60, lambda now, rate=rate: rate)  # type: ignore[misc]
        used.append((world.plan.devices_used, len(world.there)))
    assert [there for _, there in used] == [1, 1, 2, 1, 1]


def test_acquisition_that_fails_later_is_no_longer_on_its_way() -> None:
    machine = controller(StaticScaling(devices={"gpu": 3}))
    machine.handle(DevicesFound(gpus(1)), 0.0)
    seen = Observed(seconds=15.0, offered={"a": 100})
    assert Acquire("gpu", 2) in machine.handle(seen, 15.0)
    assert not any(isinstance(it, Acquire) for it in machine.handle(seen, 30.0))
    machine.handle(AcquisitionFailed("gpu", 1, "no capacity"), 31.0)
    assert Acquire("gpu", 1) in machine.handle(seen, 45.0)
