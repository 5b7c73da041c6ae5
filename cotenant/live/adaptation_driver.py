"""Drive a controller on the event loop: tell it what happened in each period, and carry its commands out.

It decides nothing, and waits for nothing: a planner runs in a process of its own, /proc is read in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from cotenant.control.adaptation import (
    Acquire,
    AcquisitionFailed,
    Adopted,
    ControllerCommand,
    ControllerEvent,
    CorrectProfile,
    Release,
    Roll,
    RollEnded,
    Solve,
    Solved,
)
from cotenant.control.controller import Controller
from cotenant.control.controller_built import slo_targets
from cotenant.control.controller_status import Decision, decisions_since
from cotenant.control.provider import DeviceProvider
from cotenant.control.revision import RolloutOutcome
from cotenant.live.adaptation_statistics import AdaptationStatistics
from cotenant.live.deployment import Deployment
from cotenant.live.driver import Driver
from cotenant.live.event_pump import EventPump
from cotenant.live.foreign_load import ForeignLoad
from cotenant.live.observed_counts import ObservedCounts
from cotenant.live.profile_corrections import ProfileCorrections
from cotenant.live.rollout_driver import RolloutDriver
from cotenant.live.rollout_statistics import Past
from cotenant.live.serving_observer import ServingObserver
from cotenant.live.serving_state import ServingState
from cotenant.planners import Problem
from cotenant.planners.rates import at_rates

logger = logging.getLogger(__name__)

PERIOD = 0.5  # seconds between two observations
LATE = 2.0  # periods between two looks, beyond which the server stood still, or its machine did
CATCHING_UP = 2  # further looks, until which requests are read that waited meanwhile: nobody offers as many in a second


class Solver(Protocol):
    """Solve elsewhere: neither waits on the event loop, nor raises anything."""

    async def __call__(self, problem: Problem, solve: Solve) -> Solved: ...

    async def close(self) -> None:
        """End what it runs; an answer that is waited for comes at once."""
        ...


Log = Callable[[float, ControllerEvent, list[ControllerCommand]], None]


class AdaptationDriver:
    """Feed a controller from the event loop. `start` it once the first deployment is in force.

    log: told of each event and the commands that answer it, in order. foreign_load: None where nothing tells.
    corrections: where those of profiles are kept.
    """

    def __init__(
        self,
        controller: Controller,
        solver: Solver,
        state: ServingState,
        driver: Driver,
        observer: ServingObserver,
        rollouts: RolloutDriver,
        provider: DeviceProvider,
        *,
        foreign_load: ForeignLoad | None = None,
        clock: Callable[[], float] = time.monotonic,
        log: Log = lambda now, event, commands: None,
        period: float = PERIOD,
        corrections: ProfileCorrections | None = None,
    ) -> None:
        self.controller = controller
        self.statistics = AdaptationStatistics()
        self.known = state.deployment  # in force, as the controller has been told
        self._solver = solver
        self._state = state
        self._driver = driver
        self._rollouts = rollouts
        self._provider = provider
        self._foreign_load = foreign_load
        self._clock = clock
        self._log = log
        self._period = period
        self._corrections = ProfileCorrections() if corrections is None else corrections
        self._counter = ObservedCounts(driver, observer, rollouts.orchestrator)
        self._pump = EventPump(self._handle, self._perform, self._failed, clock)
        self._running = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._observed_at = self._looked_at = 0.0
        self._catching_up = 0  # looks to go
        self._stood_still = False  # before the last observation
        self._bases: dict[int, int | None] = {}  # number of a `Solve` → the revision that it starts from
        self._rolls: dict[int, tuple[Roll, float]] = {}  # revision → its `Roll`, and when it began
        self._told: Decision | None = None  # the last decision that was logged

    def start(self, rates: dict[str, float]) -> None:
        """Begin with the deployment in force. rates: requests/s that it was planned for, as in `Adopted`."""
        self._running = True
        self._rollouts.on_ended = self._rollout_ended
        self._observed_at = self._looked_at = self._clock()
        self._counter.take()
        self.feed(self._adopted(rates))
        self._timer = asyncio.get_running_loop().call_later(self._period, self._tick)

    async def stop(self) -> None:
        """Decide nothing any more. Rollouts under way go on."""
        self._running = False
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def feed(self, event: ControllerEvent) -> None:
        """Tell the controller, and do what it says; see `EventPump`."""
        if self._running:
            self._pump.feed(event)

    def _handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        begun = time.perf_counter()
        commands = self.controller.handle(event, now)
        self.statistics.decided(event, commands, time.perf_counter() - begun)
        self._log(now, event, commands)
        self._log_decisions()
        return commands

    def _failed(self, command: ControllerCommand, error: Exception) -> None:
        """Tell the controller of a command that failed, where it waits for what would have come of it."""
        reason = f"{type(error).__name__}: {error}"
        match command:
            case Solve(number=number):
                self.feed(Solved(number=number, error=reason))
            case Roll(number=number):
                self.feed(RollEnded(number=number, outcome=RolloutOutcome.REJECTED, reason=reason))
            case Acquire(kind=kind, count=count):
                self.feed(AcquisitionFailed(kind, count, reason))

    # Observing

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period, self._tick)
        self._tell_news()
        if self._foreign_load is None:
            self._observe(None)
        else:
            self._do(self._observe_foreign(self._foreign_load))

    def _tell_news(self) -> None:
        """Tell of devices that came or went."""
        for event in self._provider.news(self._clock()):
            self.feed(event)

    async def _observe_foreign(self, meter: ForeignLoad) -> None:
        self._observe(await asyncio.to_thread(meter.read, self._clock()))

    def _observe(self, foreign_load: float | None) -> None:
        now = self._clock()
        late, self._looked_at = now - self._looked_at > LATE * self._period, now
        if self._catching_up:
            self._catching_up -= 1
        elif late:
            self._catching_up = CATCHING_UP
        if self._catching_up:
            return
        seconds, self._observed_at = now - self._observed_at, now
        if seconds <= 0:
            return
        seen = self._counter.take(seconds, self.known.problem.rates)
        # What took long meanwhile is no fault of the plan's; where the server hardly ever runs in time, it may be.
        self._stood_still = seconds > LATE * self._period and not self._stood_still
        if self._stood_still:
            seen = msgspec.structs.replace(seen, latencies={}, stayed={}, within_target={})
        self.feed(msgspec.structs.replace(seen, foreign_load=foreign_load))

    # What it wants done

    def _perform(self, command: ControllerCommand, now: float) -> None:
        match command:
            case Solve():
                self._solve(command)
            case Roll():
                self._roll(command, now)
            case Acquire() | Release():
                self._provider.handle(command, now)
                self._tell_news()
            case CorrectProfile(model, factor, batches):
                # To measure it again would need whole shares of the devices that serve.
                self._corrections.correct(model, factor, batches, self._state.deployment.problem)

    def _solve(self, solve: Solve) -> None:
        base, desired = self._rollouts.desired
        if desired.plan != solve.current:
            # The controller is told of the other revision as soon as that is in force.
            self.feed(Solved(number=solve.number, error="another revision is on its way", outdated=True))
            return
        self._bases = {solve.number: base}
        self._do(self._answered(desired.problem, solve))

    async def _answered(self, problem: Problem, solve: Solve) -> None:
        begun = self._clock()
        solved = await self._solver(problem, solve)
        self.feed(msgspec.structs.replace(solved, seconds=self._clock() - begun))

    def _roll(self, roll: Roll, now: float) -> None:
        if change := self._state.repeated_change:
            reason = f"the {change} comes first: another plan was in its way already"
            self.feed(RollEnded(number=roll.number, outcome=RolloutOutcome.OUTDATED, reason=reason))
            return
        _, desired = self._rollouts.desired
        deployment = with_plan(desired, roll)
        number = self._rollouts.request(deployment, roll.reason, base=self._bases.pop(roll.number, None))
        self._rolls[number] = roll, now

    def _rollout_ended(self, past: Past) -> None:
        # Not within the rollout's own event: what follows may be another one.
        asyncio.get_running_loop().call_soon(self._tell_ended, past)

    def _tell_ended(self, past: Past) -> None:
        ended = past.ended
        number = ended.revision.number
        if ended.outcome is RolloutOutcome.COMPLETED:
            self.known = self._state.deployment
        if number in self._rolls:
            roll, since = self._rolls.pop(number)
            now = self._clock()
            self.statistics.rolled(past)
            self.feed(RollEnded(number=roll.number, outcome=ended.outcome, reason=ended.reason, seconds=now - since))
        elif ended.outcome is RolloutOutcome.COMPLETED:
            adopted = self._adopted(planned_rates(ended.revision.problem))
            self.feed(msgspec.structs.replace(adopted, targets=slo_targets(self._state.deployment.problem)))

    def _adopted(self, rates: dict[str, float]) -> Adopted:
        """Return what the deployment in force is, with the rates that it was made for."""
        deployment = self._state.deployment
        return Adopted(
            plan=deployment.plan,
            rates=rates,
            slowdowns=deployment.slowdowns,
            corrections=self._corrections.factors(deployment.problem),
        )

    def _do(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("adaptation missed a step: %s: %s", type(error).__name__, error)

    # For people

    def _log_decisions(self) -> None:
        for decision in decisions_since(self.controller.decisions, self._told):
            logger.info("adaptation: %s: %s", decision.action, decision.reason)
            self._told = decision


def planned_rates(problem: Problem | None) -> dict[str, float]:
    """Return the rates that a plan for a problem was made for; none where it was to serve as much as it could."""
    return dict(problem.rates) if problem is not None and problem.objective == "devices" else {}


def with_plan(deployment: Deployment, roll: Roll) -> Deployment:
    """Return a deployment with another plan, and the rates that this one was made for."""
    problem = deployment.problem
    rates = {name: roll.rates.get(name, 0.0) for name in problem.rates}
    return msgspec.structs.replace(
        deployment, plan=roll.plan, problem=at_rates(problem, rates), slowdowns=roll.slowdowns
    )
