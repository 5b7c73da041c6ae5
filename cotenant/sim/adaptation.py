"""Drive a controller in a simulated run: it is told what happened in each period, and its commands are carried out.

It decides nothing. A solver is asked at once and answers after the time that it is given to take, since how long it
really takes differs from machine to machine, and a run has to give the same for the same seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

import msgspec

from cotenant.control.adaptation import (
    Acquire,
    Adopted,
    ControllerCommand,
    ControllerEvent,
    CorrectProfile,
    DevicesFound,
    DevicesGone,
    Release,
    Roll,
    RollEnded,
    Solve,
    Solved,
)
from cotenant.control.events import RolloutEnded
from cotenant.control.observed_totals import ModelTotals, ObservedTotals
from cotenant.control.provider import DeviceProvider, FixedProvider
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.plan import Plan
from cotenant.core.request import Request
from cotenant.measure.ledger import OutcomeLedger
from cotenant.sim.workers import Workers

Solver = Callable[[Solve], Solved]


class ControllerMachine(Protocol):
    """Decides; see `control.controller.Controller`."""

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]: ...


class Adaptation(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is controlled.

    provider: of further devices; by default there are none. works: whether a device that it gave is really there;
    nothing starts on one that is not. solve_seconds: that a solver takes, whatever it really takes; None: what it says.
    period: seconds between two observations. rates: that the first plan counts with; None: the problem's. log: told of
    each event and the commands that answer it, in order.
    """

    controller: ControllerMachine
    solver: Solver
    provider: DeviceProvider = msgspec.field(default_factory=lambda: FixedProvider(()))
    works: Callable[[DeviceId], bool] = lambda device: True
    solve_seconds: float | None = 0.5
    period: float = 0.5
    rates: dict[str, float] | None = None
    log: Callable[[float, ControllerEvent, list[ControllerCommand]], None] = lambda now, event, commands: None


class AdaptationDriver:
    """Carry out a controller's commands on simulated workers, and tell it what comes of them.

    ledgers: of outcomes, by model. until: end of the run in seconds; nothing is observed from then on.
    """

    def __init__(
        self, adaptation: Adaptation, workers: Workers, ledgers: Mapping[str, OutcomeLedger], until: float
    ) -> None:
        self.arrived: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()
        self.busy: dict[LaneId, float] = {}  # seconds of batches since the last observation
        self._adaptation = adaptation
        self._workers = workers
        self._ledgers = ledgers
        self._until = until
        self._seen = ObservedTotals()
        self._seen_at = 0.0
        self._rolls: dict[int, tuple[int, float]] = {}  # revision → number of the `Roll`, and when it began
        self._early: dict[int, RolloutEnded] = {}  # rollouts that ended while they were requested
        workers.on_rollout_ended = self._rollout_ended
        workers.on_devices_lost = lambda lost, reason, now: self._feed(DevicesGone(lost, reason), now)
        workers.on_device_restored = lambda device, now: self._feed(DevicesFound((device,)), now)

    def start(self, plan: Plan, rates: Mapping[str, float]) -> None:
        """Begin with a plan that was made for these rates."""
        self._workers.at(0.0, partial(self._feed, Adopted(plan=plan, rates=dict(rates))))
        self._workers.at(self._adaptation.period, self._observe)
        self._listen()

    def count(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Count requests as they arrive."""
        arrived, rows = self.arrived, self._rows
        for request in requests:
            yield request
            arrived[request.model] += 1  # only now: a run asks for a request before its time has come
            rows[request.model] += request.size

    def _observe(self, now: float) -> None:
        if now + self._adaptation.period < self._until:
            self._workers.at(now + self._adaptation.period, self._observe)
        totals = {name: self._totals(name, ledger) for name, ledger in self._ledgers.items()}
        seconds, self._seen_at = now - self._seen_at, now
        seen = self._seen.observe(totals, seconds, self._workers.orchestrator)
        self._feed(msgspec.structs.replace(seen, utilisation=self._utilisation(seconds)), now)

    def _totals(self, name: str, ledger: OutcomeLedger) -> ModelTotals:
        return ModelTotals(
            arrived=self.arrived[name],
            rows=self._rows[name],
            ended=ledger.arrived,
            stayed=ledger.stayed,
            within_target=ledger.within_target,
            batches=ledger.batches,
            predicted=ledger.predicted,
            observed=ledger.observed,
        )

    def _utilisation(self, seconds: float) -> float:
        """Return the part of the allocated share that ran batches. One that began in the period counts as a whole."""
        shares = self._workers.shares()
        busy = sum(shares.get(lane, 0.0) * min(took, seconds) for lane, took in self.busy.items())
        self.busy.clear()
        allocated = sum(shares.values()) * seconds
        return min(1.0, busy / allocated) if allocated else 0.0

    def _feed(self, event: ControllerEvent, now: float) -> None:
        commands = self._adaptation.controller.handle(event, now)
        self._adaptation.log(now, event, commands)
        for command in commands:
            self._perform(command, now)

    def _perform(self, command: ControllerCommand, now: float) -> None:
        adaptation = self._adaptation
        match command:
            case Solve():
                solved = adaptation.solver(command)
                seconds = solved.seconds if adaptation.solve_seconds is None else adaptation.solve_seconds
                answer = msgspec.structs.replace(solved, seconds=seconds)
                self._workers.at(now + seconds, partial(self._feed, answer))
            case Roll():
                self._roll(command, now)
            case Acquire() | Release():
                adaptation.provider.handle(command, now)
                self._listen()
            case CorrectProfile():
                pass  # profiles are the world's own here

    def _listen(self) -> None:
        """Hear the provider's news when they are due, until the run ends; to ask too often is harmless."""
        due = self._adaptation.provider.due
        if due < self._until:  # a cloud that takes devices away, and is asked for others, has news for ever
            self._workers.at(due, self._hear)

    def _hear(self, now: float) -> None:
        for event in self._adaptation.provider.news(now):
            match event:
                case DevicesFound(devices):
                    there = {device for device in devices if self._adaptation.works(device)}
                    self._workers.restore(there, now)
                    self._workers.lose(set(devices) - there, "there is no such device", now)
                case DevicesGone(devices, reason):
                    self._workers.lose(devices, reason, now)
            self._feed(event, now)
        self._listen()

    def _roll(self, roll: Roll, now: float) -> None:
        revision = self._workers.request(roll.plan, roll.reason, now)
        self._rolls[revision] = roll.number, now
        ended = self._early.pop(revision, None)
        if ended is not None:
            self._rollout_ended(ended, now)

    def _rollout_ended(self, ended: RolloutEnded, now: float) -> None:
        revision = ended.revision.number
        if revision not in self._rolls:
            self._early[revision] = ended
            return
        number, since = self._rolls.pop(revision)
        # Not within the rollout's own event: what follows may be another one.
        answer = RollEnded(number=number, outcome=ended.outcome, reason=ended.reason, seconds=now - since)
        self._workers.at(now, partial(self._feed, answer))
