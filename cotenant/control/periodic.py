"""A controller that asks an autoscaling policy every so often: the loops of the papers and of other autoscalers.

It speaks as the main controller does (`control.adaptation`), so that one driver runs both. Where that one follows
events, this one looks at the clock: every period the policy says how many devices are wanted, devices are acquired and
released accordingly, and a plan is made where rates or devices have changed. In between it does what cannot wait: it
plans for devices that have come, and again where some are gone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

import msgspec

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
    SolveStep,
)
from cotenant.control.revision import RolloutOutcome
from cotenant.control.scaling.context import Observation, ScalingContext, ScalingPolicy
from cotenant.control.scaling.rates import TargetRateOptions, TargetRates
from cotenant.core.identity import DeviceId
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem


class PeriodicOptions(msgspec.Struct, frozen=True, kw_only=True):
    """period: seconds from one decision to the next. rates: how those to plan for follow from those observed. fill:
    plans use all devices that are kept, for as much as they serve; otherwise the fewest, for the rates alone.

    launch_seconds: by kind, until a device can be used. launch_timeout: seconds after which a device that was asked for
    is not expected any more, beyond three times its launch.
    """

    period: float
    rates: TargetRateOptions = TargetRateOptions()
    fill: bool = False
    launch_seconds: dict[str, float] = {}
    launch_timeout: float = 60.0


class _Launch(msgspec.Struct, frozen=True):
    kind: str
    given_up: float  # when it is not expected any more


class PeriodicController:
    """Feed it events in the order of time; perform what it answers, in order.

    It begins with no plan: tell it of one by `Adopted`. At most one `Solve` or one `Roll` is under way at any time.

    devices: those that are there from the beginning, with those of the plan that it is told of. problem: models,
    profiles and interference, and the kinds that there may be, with their prices and the most of each; rates come from
    what is observed.
    """

    def __init__(
        self, policy: ScalingPolicy, problem: Problem, options: PeriodicOptions, devices: Iterable[DeviceId] = ()
    ) -> None:
        self.policy = policy
        self.options = options
        self.plan = Plan(planner="none")
        self.wanted: dict[str, int] = {}  # by the policy, when it was last asked
        self._problem = problem
        self._kinds = {kind.name for kind in problem.fleet}
        self._rates = TargetRates(options.rates)
        self._ready = set(devices)
        self._leaving: set[DeviceId] = set()  # ready ones that are to be released
        self._released: set[DeviceId] = set()  # asked to, and still there
        self._launches: list[_Launch] = []
        self._history: deque[Observation] = deque()
        self._offered: Counter[str] = Counter()  # since the last decision
        self._since: float | None = None  # the last decision
        self._numbers = 0
        self._solving: Solve | None = None
        self._rolling: Roll | None = None
        self._planned: dict[str, float] = {}  # rates that the plan in force was made for; empty: to be made again
        self._planned_devices: frozenset[DeviceId] = frozenset()

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        """Decide what to do about an event at the time `now`, in seconds of any monotonic clock."""
        match event:
            case Observed():
                return self._observed(event, now)
            case Adopted(plan=plan, rates=rates):
                self.plan, self._planned = plan, dict(rates)
                self._ready |= {device.id for device in plan.devices}
                self._planned_devices = frozenset(self._kept())
                return []
            case Solved():
                return self._solved(event)
            case RollEnded():
                return self._roll_ended(event)
            case DevicesFound(devices):
                return self._found(devices)
            case DevicesGone(devices):
                return self._gone(devices)
            case AcquisitionFailed(kind, count):
                for _ in range(count):
                    self._forget_launch(kind)
                return []

    # Every period

    def _observed(self, seen: Observed, now: float) -> list[ControllerCommand]:
        if seen.seconds <= 0:
            return []
        if self._since is None:
            self._since = now - seen.seconds
        self._offered.update(seen.offered)
        self._history.append(self._observation(seen, now))
        while self._history[0].time < now - self.policy.horizon and len(self._history) > 1:
            self._history.popleft()
        # Half an interval early rather than one late: times are sums of floats, and timers are late by a little.
        if now - self._since < self.options.period - seen.seconds / 2:
            return []
        return self._decide(now)

    def _observation(self, seen: Observed, now: float) -> Observation:
        allocated = sum(partition.share for device in self.plan.devices for partition in device.partitions)
        ready = len(self._ready)
        names = {*self._rates.estimate, *seen.offered, *(model.name for model in self._problem.models)}
        return Observation(
            time=now,
            seconds=seen.seconds,
            rates={name: seen.offered.get(name, 0) / seen.seconds for name in names},
            utilisation=seen.utilisation * allocated / (WHOLE * ready) if ready else 0.0,
            concurrency={name: float(count) for name, count in seen.waiting.items()},
            ready=self._counts(self._ready),
        )

    def _decide(self, now: float) -> list[ControllerCommand]:
        seconds = now - (self._since or 0.0)
        names = self._history[-1].rates
        self._rates.observe({name: self._offered[name] / seconds for name in names}, seconds)
        self._offered.clear()
        self._since = now
        self._launches = [launch for launch in self._launches if launch.given_up > now]
        self.wanted = self._ask_policy(now)
        self._history[-1] = msgspec.structs.replace(self._history[-1], wanted=self.wanted)
        commands = self._scale(now)
        return commands + self._replan("the rates or the devices have changed")

    def _ask_policy(self, now: float) -> dict[str, int]:
        problem = msgspec.structs.replace(self._problem, rates=self._known(self._rates.wanted()))
        context = ScalingContext(
            now=now,
            problem=problem,
            plan=self.plan,
            ready=self._counts(self._kept()),
            launching=dict(Counter(launch.kind for launch in self._launches)),
            launch_seconds=self.options.launch_seconds,
            history=tuple(self._history),
        )
        answer = self.policy(context)
        return {
            kind: int(max(0, min(answer.get(kind, context.allocated(kind)), context.limit(kind))))
            for kind in self._kinds
        }

    def _known(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Return the rates of models and applications that the problem has; others are not served, and not planned."""
        names = {model.name for model in self._problem.models} | {each.name for each in self._problem.applications}
        return {name: rate for name, rate in rates.items() if name in names}

    # Devices

    def _counts(self, devices: Iterable[DeviceId]) -> dict[str, int]:
        return dict(Counter(device.kind for device in devices))

    def _kept(self) -> set[DeviceId]:
        return self._ready - self._leaving

    def _scale(self, now: float) -> list[ControllerCommand]:
        """Acquire what is missing; choose what is to leave, and release of it what is not used."""
        commands: list[ControllerCommand] = []
        launching = Counter(launch.kind for launch in self._launches)
        used = {device.id for device in self.plan.devices}
        for kind, wanted in sorted(self.wanted.items()):
            kept = sorted(device for device in self._kept() if device.kind == kind)
            staying = sorted(
                (device for device in self._leaving - self._released if device.kind == kind),
                key=lambda each: each not in used,
            )
            while staying and len(kept) + launching[kind] < wanted:  # sooner than another is launched
                self._leaving.discard(staying[0])
                kept.append(staying.pop(0))
            missing = wanted - len(kept) - launching[kind]
            if missing > 0:
                commands.append(Acquire(kind, missing))
                seconds = self.options.launch_seconds.get(kind, 0.0)
                given_up = now + 3 * seconds + self.options.launch_timeout
                self._launches += [_Launch(kind, given_up)] * missing
            for device in sorted(kept, key=lambda each: (each in used, each))[: max(0, len(kept) - wanted)]:
                self._leaving.add(device)
        return commands + self._release()

    def _release(self) -> list[ControllerCommand]:
        """Release what leaves and runs nothing, neither in the plan in force nor in the one under way."""
        plans = [self.plan] + ([self._rolling.plan] if self._rolling else [])
        used = {device.id for plan in plans for device in plan.devices}
        going = tuple(sorted(self._leaving - used - self._released))
        self._released.update(going)
        return [Release(going)] if going else []

    def _found(self, devices: tuple[DeviceId, ...]) -> list[ControllerCommand]:
        for device in devices:
            self._ready.add(device)
            self._forget_launch(device.kind)
            if device.kind not in self._kinds:  # nothing is known to run there
                self._leaving.add(device)
        return self._release() + (self._replan("devices have come") if self._since is not None else [])

    def _gone(self, devices: tuple[DeviceId, ...]) -> list[ControllerCommand]:
        gone = set(devices) & self._ready
        self._ready -= gone
        self._leaving -= gone
        self._released -= gone
        if not gone & {device.id for device in self.plan.devices}:
            return []
        return self._replan("devices are gone")

    def _forget_launch(self, kind: str) -> None:
        for i, launch in enumerate(self._launches):
            if launch.kind == kind:
                del self._launches[i]
                return

    # Plans

    def _replan(self, reason: str) -> list[ControllerCommand]:
        """Solve where the plan was made for other rates or devices, and nothing is under way."""
        wanted = self._known(self._rates.wanted())
        kept = frozenset(self._kept())
        if self._solving or self._rolling or not wanted:
            return []
        if kept == self._planned_devices and not self._rates.moved(wanted, self._planned):
            return []
        if not kept and not self.plan.devices:
            return []
        self._numbers += 1
        self._solving = Solve(
            number=self._numbers,
            rates=wanted,
            offered=self._known(self._rates.estimate),
            current=self.plan,
            devices=tuple(sorted(kept)),
            launching=dict(Counter(launch.kind for launch in self._launches)),
            step=SolveStep.REPLAN,
            fill=self.options.fill,
            reason=reason,
        )
        return [self._solving]

    def _solved(self, answer: Solved) -> list[ControllerCommand]:
        asked = self._solving
        if asked is None or answer.number != asked.number:
            return []
        self._solving = None
        plan = answer.plan
        if plan is None or not {device.id for device in plan.devices} <= self._ready - self._released:
            self._planned = {}  # again in the next period
            self._planned_devices = frozenset(asked.devices)
            return self._settle()
        if plan.devices == self.plan.devices:
            self._planned, self._planned_devices = asked.rates, frozenset(asked.devices)
            return self._settle()
        self._rolling = Roll(number=asked.number, plan=plan, rates=asked.rates, reason=asked.reason)
        self._planned_devices = frozenset(asked.devices)
        return [self._rolling]

    def _roll_ended(self, ended: RollEnded) -> list[ControllerCommand]:
        rolled = self._rolling
        if rolled is None or ended.number != rolled.number:
            return []
        self._rolling = None
        if ended.outcome is RolloutOutcome.COMPLETED:
            self.plan, self._planned = rolled.plan, rolled.rates
        else:
            self._planned = {}  # again in the next period
        return self._settle()

    def _settle(self) -> list[ControllerCommand]:
        """Release what is not needed any more, and plan again at once where devices have changed meanwhile."""
        changed = frozenset(self._kept()) != self._planned_devices
        return self._release() + (self._replan("devices have come or are gone") if changed else [])
