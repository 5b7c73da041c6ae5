"""Decide when to plan anew and for what, when to go over to a plan, and how many devices to have.

One controller serves the simulator and the live server: events in, commands out (`control.adaptation`). It never
waits, reads no clock and solves nothing. Every `Solve` is answered by `Solved` and every `Roll` by `RollEnded`; at most
one of either is under way, and what happens meanwhile is judged once it has ended, by the rates of then.

A plan is made anew for one of these reasons, the first that holds:

- a device that it uses is gone, or one that was launched for it is there;
- a model is offered more than its plan sustains, beyond chance (`RateMonitor`), or is forecast to be before another
  plan could be in force (`RateForecast`, `LeadTime`);
- batches take longer than predicted, or no longer as long as they did, for a while (`SlowdownMonitor`);
- an SLO is missed though neither is the case: then models that fall short are planned for with more headroom;
- a rate may have risen beyond the plan: the plan that is made then waits until it surely has;
- rates have been lower for a whole cool-down, and fewer devices might do, or serve what was short.

Profiles that batches do not keep to on a quiet machine are corrected (`ProfileMonitor`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from cotenant.control.adaptation import (
    Acquire,
    AcquisitionFailed,
    Adopted,
    Cause,
    ControllerCommand,
    ControllerEvent,
    CorrectProfile,
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
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.controller_status import ControllerStatus, Decision, ModelState, served_rates
from cotenant.control.cooldown import Cooldown
from cotenant.control.held_devices import HeldDevices
from cotenant.control.lead_time import LeadTime
from cotenant.control.model_watch import MAX_HEADROOM, ModelWatch
from cotenant.control.model_watches import Horizon, ModelWatches
from cotenant.control.next_plan import Need, Ready, Rolling, Solving
from cotenant.control.provider import DeviceOffer
from cotenant.control.revision import RolloutOutcome
from cotenant.core.identity import DeviceId
from cotenant.core.plan import Plan
from cotenant.core.units import show_count, show_rate

HEADROOM_STEP = 1.15  # factor on the headroom of a model whose SLO is missed
OUTDATED = 1.1  # a rate so many times what a new plan sustains makes that plan outdated before it is in force
MAX_INTERVAL = 30.0  # seconds between two observations, beyond which counts say nothing about rates
WORTH_MOVING = 0.95  # of the price in force, at most, for which a plan is moved to that serves no more


class Controller:
    """Feed it events in the order of time; perform what it answers, in order.

    devices: those that are there at the beginning. targets: by model, the fraction of requests that must meet its
    target. offers: of the provider of further devices, for how long a launch takes until one was timed.
    """

    def __init__(
        self,
        devices: Iterable[DeviceId],
        targets: dict[str, float],
        options: ControllerOptions | None = None,
        offers: Iterable[DeviceOffer] = (),
    ) -> None:
        self.options = options or ControllerOptions()
        self._targets = dict(targets)
        self._plan: Plan | None = None
        self._planned: dict[str, float] = {}  # requests/s that the plan in force was made for, or found to serve
        self._sustained: dict[str, float] = {}
        self._limits: dict[str, float] = {}  # beyond which to plan anew; more than is sustained where devices are short
        self._slowdowns: dict[str, float] = {}  # that the plan in force counts with
        self._short = ""
        self._unmet = 0.0  # when more was offered than the plan in force sustains, or that plan came into force
        self._watches = ModelWatches(self.options)
        self._cooldown = Cooldown(self.options.cooldown, self.options.longest_cooldown)
        self._lead = LeadTime(self.options.lead, max([offer.launch_seconds for offer in offers], default=0.0))
        limits = self.options.launch_timeout, self.options.retry, self.options.longest_retry
        self._held = HeldDevices(devices, self._lead, *limits)
        self._next: Solving | Ready | Rolling | None = None  # how far the next plan has come; None: there is none
        self._numbers = 0
        self._urgent = ""  # a reason that does not wait to settle
        self._postponed = ""  # such a reason, of which nothing came
        self._not_before = 0.0
        self._failures = 0  # in a row
        self._decisions: deque[Decision] = deque(maxlen=64)

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        """Decide what to do about an event at the time `now`, in seconds of any monotonic clock."""
        commands: list[ControllerCommand] = []
        match event:
            case Observed():
                if 0 < event.seconds <= MAX_INTERVAL:  # else a clock jumped, or the machine slept
                    self._observe(event, now)
                    commands += self._corrected(event, now)
            case Adopted():
                self._adopt(event, now)
            case Solved():
                self._solved(event, now, commands)
            case RollEnded():
                self._roll_ended(event, now, commands)
            case DevicesFound(devices):
                self._found(devices, now)
            case DevicesGone(devices, reason):
                self._gone(devices, reason)
            case AcquisitionFailed(kind, count, reason):
                self._refused(kind, count, reason, now)
        for kind, count in self._held.overdue(now).items():
            self._refused(kind, count, "the provider has not answered", now)
        if self._plan is not None and not isinstance(self._next, Solving | Rolling):
            self._decide(now, commands)
        if self._held.ask_again(now):
            self._acquire(now, commands)
        return commands

    # Watching

    def _observe(self, seen: Observed, now: float) -> None:
        # What is planned now has to do until the plan after it is in force.
        horizon = Horizon(ahead=self._lead.total + self._lead.plan, since=now - self._cooldown_seconds)
        self._watches.observe(seen, self._planned, horizon, now)
        if any(watch.estimate.rate > self._sustained.get(name, 0.0) for name, watch in self._watches):
            self._unmet = now

    def _corrected(self, seen: Observed, now: float) -> list[CorrectProfile]:
        """Return corrections of profiles that batches do not keep to, with nothing else to blame."""
        corrections = self._watches.corrections(seen, self._slowdowns)
        for name, found in corrections.items():
            reason = f"{found.batches} batches on a quiet machine took so many times as long as profiled"
            self._note(now, f"correct the profile of {name} by × {found.factor:.3g}", reason)
        return [CorrectProfile(name, found.factor, found.batches) for name, found in corrections.items()]

    # What others decide

    def _adopt(self, adopted: Adopted, now: float) -> None:
        plan, rates = adopted.plan, adopted.rates
        # The last rate of a model that is not served any more would stay for ever: nobody offers it to a plan.
        self._watches.keep(rates.keys() | {name for name, rate in plan.rates().items() if rate})
        self._plan = plan
        self._planned = dict(rates)
        self._sustained = served_rates(plan, rates, plan.rates())
        self._limits = plan.rates() | {name: max(rate, plan.rate(name)) for name, rate in rates.items()}
        self._slowdowns = dict(adopted.slowdowns)
        self._targets |= adopted.targets
        self._short = ""
        # Unless it turns out to be back with this plan.
        self._postponed = self._postponed or self._held.describe_lost(plan)
        if isinstance(self._next, Ready):
            self._next = None
        self._held.wanted = None
        self._not_before = now + self.options.settle
        for name, rate in rates.items():
            # What was expected is believed for a cool-down.
            self._watches[name].raise_peak(now, rate, now - self._cooldown_seconds)
        for name, factor in adopted.corrections.items():
            self._watches[name].profile.factor = factor
        self._watches.forget_batches()

    def _found(self, devices: tuple[DeviceId, ...], now: float) -> None:
        if fresh := self._held.found(devices, now):
            self._urgent = f"{', '.join(fresh)} can be used"

    def _gone(self, devices: tuple[DeviceId, ...], reason: str) -> None:
        used = {device.id for device in self._plan.devices} if self._plan is not None else set()
        gone = self._held.gone(devices)
        if used & set(gone):
            self._urgent = f"{', '.join(gone)} is gone" + (f": {reason}" if reason else "")

    # Deciding

    def _decide(self, now: float, commands: list[ControllerCommand]) -> None:
        if now < self._not_before and not self._urgent:
            return
        need, ready = self._need(now), self._next
        assert ready is None or isinstance(ready, Ready)
        self._next = None
        if need is None:
            if ready is not None:
                self._note(now, "discard the plan", "rates seemed to have risen by chance")
        elif ready is not None and need.cause is Cause.RATE:
            self._accept(ready, now, commands, certain=need.certain)
        else:
            self._urgent = self._postponed = ""
            self._solve(need, now, commands)

    def _need(self, now: float) -> Need | None:
        if urgent := self._urgent or self._postponed:
            return Need(Cause.DEVICES, urgent, SolveStep.REPLAN)
        suspected = self._exceeding(self.options.suspected_threshold)
        if suspected and (exceeded := self._exceeding(self.options.changed_threshold)):
            return Need(Cause.RATE, "; ".join(map(self._describe_excess, exceeded)))
        machine = self._watches.machine
        if machine.drifted and (machine.ratio > 1.0 or any(s > 1.0 for s in self._slowdowns.values())):
            return Need(Cause.LATENCY, f"batches of all models take {machine.ratio:.2g} × as long as predicted")
        if drifted := self._watches.drifted(self._slowdowns):
            each = (f"batches of {name} take {ratio:.2g} × as long as predicted" for name, ratio in drifted.items())
            return Need(Cause.LATENCY, "; ".join(each))
        missed = [name for name, watch in self._watches if watch.attainment.missed(self._targets.get(name, 0.99))]
        if missed and not self._short:
            # A plan is made anyway: those that fall short of their targets, be it by chance, get more as well.
            for name, watch in self._watches:
                if watch.attainment.falls_short(self._targets.get(name, 0.99)):
                    watch.headroom = min(watch.headroom * HEADROOM_STEP, MAX_HEADROOM)
            return Need(Cause.SLO, f"SLO violated: {', '.join(missed)}")
        if suspected:
            return Need(Cause.RATE, "; ".join(map(self._describe_excess, suspected)), certain=False)
        if doubtful := self._doubtful():
            why = f"{', '.join(doubtful)} may be as fast as others by now: no batch has told for a while"
            return Need(Cause.LATENCY, why, SolveStep.REPLAN)
        if self._could_save(now):
            return Need(Cause.SAVING, "rates have been lower for a cool-down", SolveStep.REPLAN)
        return None

    def _exceeding(self, threshold: float) -> list[str]:
        """Return the models of which more is offered than the plan in force serves, by a change that exceeds a
        threshold."""
        return [name for name, watch in self._watches if self._exceeds(name, watch, threshold)]

    def _exceeds(self, name: str, watch: ModelWatch, threshold: float) -> bool:
        """Tell whether more is offered of a model than the plan in force serves, or will be. threshold: log-likelihood
        ratio beyond which a rate has changed."""
        limit, estimate = self._limits.get(name, 0.0) * (1 + self.options.tolerance), watch.estimate
        beyond = max(watch.expected, watch.bursts.needed) > limit
        if estimate.before is None:
            return beyond or estimate.exceeds(limit, self.options.threshold)
        # The window was chosen for its change, and chance makes one that looks like that sooner than in any other. But
        # where the rate has surely changed, whether it exceeds the plan needs no proof of its own, which takes longer.
        rose = estimate.rate > limit and estimate.rose(threshold, self.options.idle_rate)
        return beyond or rose or estimate.exceeds(limit, threshold)

    @property
    def _cooldown_seconds(self) -> float:
        """Seconds for which devices are kept that are not needed: longer where others take long to come."""
        launching = min(self.options.keep_launches * self._lead.launch, self.options.longest_cooldown)
        return max(self._cooldown.seconds, launching)

    def _doubtful(self) -> dict[str, float]:
        """Return the models that are left out for being slow, where that may be over, each with what to count with."""
        assert self._plan is not None
        if not (doubtful := self._watches.doubtful(self._slowdowns)):
            return {}
        # Without batches of what is served, hardly anybody asks for it; and an application runs none of its own.
        served = self._plan.rates().keys() | self._plan.split.keys()
        return {name: slowdown for name, slowdown in doubtful.items() if name not in served}

    def _could_save(self, now: float) -> bool:
        """Whether fewer devices might do, or what is left unserved might now be served."""
        assert self._plan is not None
        short = self._short or self._plan.unserved
        if self._plan.devices_used <= 1 and self._plan.cost_per_hour is None and not short:
            return False
        if self._short and self._plan.unserved and now - self._unmet >= self.options.short_cooldown:
            return True  # what is offered is served by now, and some models were left little for it
        planned = {name: rate for name, rate in self._planned.items() if rate > self.options.idle_rate}
        since = now - (self.options.short_cooldown if self._short else self._cooldown_seconds)
        peaks = {name: self._peak(name, since) for name in planned}
        fall = self.options.short_fall if short else self.options.fall
        lower = sum(peaks.values()) < (1 - fall) * sum(planned.values())
        return lower or any(peak < (1 - self.options.fall_alone) * planned[name] for name, peak in peaks.items())

    def _peak(self, name: str, since: float) -> float:
        watch = self._watches[name]
        return max(watch.peak(since), watch.demand, self.options.idle_rate)

    def _solve(self, need: Need, now: float, commands: list[ControllerCommand]) -> None:
        assert self._plan is not None
        self._numbers += 1
        # Models without a rate, such as one just loaded, keep a place though nobody has asked for them yet.
        names = sorted(
            self._planned.keys()
            | self._plan.rates().keys()
            | self._plan.split.keys()
            | {name for name, watch in self._watches if watch.estimate.rate}
        )
        counted = self._slowdowns | (doubtful := self._doubtful())
        for name in doubtful:  # should it be as slow as before, it is tried again later and later
            self._watches[name].pause.tried()
        slowdowns = {name: round(counted.get(name, 1.0) * self._watches.slowdown(name), 3) for name in names}
        solve = Solve(
            number=self._numbers,
            rates={name: self._peak(name, now - self._cooldown_seconds) for name in names},
            offered={name: self._watches[name].estimate.rate for name in names},
            slowdowns={name: slowdown for name, slowdown in slowdowns.items() if slowdown > 1.0},
            current=self._plan,
            devices=tuple(sorted(self._held.kept(now))),
            launching=self._held.launches(),
            step=need.step,
            bursts=any(watch.bursts.needed for _, watch in self._watches),
            cause=need.cause,
            reason=need.reason,
        )
        self._next = Solving(solve, now, need.certain)
        self._note(now, "plan again", need.reason)
        commands.append(solve)

    # What comes of it

    def _solved(self, solved: Solved, now: float, commands: list[ControllerCommand]) -> None:
        solving = self._next
        if not isinstance(solving, Solving) or solving.asked.number != solved.number:
            return  # late, or twice
        self._next, asked = None, solving.asked
        if asked.current != self._plan:
            self._note(now, "discard the plan", "another has come into force meanwhile")
            self._postpone(asked)
            return
        if solved.plan is None:
            self._postpone(asked)
            self._short = solved.short
            self._held.wanted = solved.devices or self._held.wanted
            self._acquire(now, commands)
            self._fail(now, "no plan", solved.error, again=solved.outdated)
            return
        certain = solving.certain or bool(self._exceeding(self.options.changed_threshold))
        self._accept(Ready(asked, solved, solving.since), now, commands, certain=certain)

    def _accept(self, ready: Ready, now: float, commands: list[ControllerCommand], *, certain: bool) -> None:
        """Go over to a plan, or have it wait until it is certain that rates have risen. That takes as long as another
        observation or two, and so does the search, so that both are done at once."""
        asked, solved, _ = ready
        assert solved.plan is not None
        if self._is_outdated(solved, asked):
            self._note(now, "discard the plan", f"rates have risen beyond it within {solved.seconds:.1f} s")
            self._postpone(asked)
            return  # they are a reason of their own, where the plan in force does not serve them
        if not certain:
            self._next = ready
            return
        self._short = solved.short
        self._held.wanted = solved.devices or None
        self._acquire(now, commands)
        if solved.step is SolveStep.KEEP or not self._is_worth_it(solved.plan, asked.cause):
            self._in_force(asked, solved, now)
            self._note(now, "keep the plan", "it serves these rates" if solved.step is SolveStep.KEEP else "no gain")
            self._release(now, commands)
            return
        self._next = Rolling(*ready)
        verb = "retune" if solved.step is SolveStep.RETUNE else "roll out"
        devices = show_count(solved.plan.devices_used, "device")
        action = f"{verb} a plan of {devices}, solved in {solved.seconds:.2f} s"
        self._note(now, action, asked.reason)
        rates = asked.rates | solved.rates
        commands.append(Roll(solved.number, solved.plan, rates, asked.reason, _slowdowns(asked, solved)))

    def _is_outdated(self, solved: Solved, asked: Solve) -> bool:
        """Tell whether rates have risen beyond a plan while it was made, though another could serve them."""
        if solved.short:
            return False
        return any(
            watch.estimate.exceeds(OUTDATED * max(solved.sustained.get(name, 0.0), asked.rates.get(name, 0.0)), 10.0)
            for name, watch in self._watches
        )

    def _is_worth_it(self, plan: Plan, cause: Cause) -> bool:
        """Tell whether a plan differs from the one in force and, where that serves as well, costs less."""
        assert self._plan is not None
        if plan.devices == self._plan.devices:
            return False
        if cause is not Cause.SAVING or self._plan.unserved:
            return True
        now_cost, then_cost = self._plan.cost_per_hour, plan.cost_per_hour
        if now_cost is not None and then_cost is not None:
            return then_cost < WORTH_MOVING * now_cost
        return plan.devices_used < self._plan.devices_used

    def _in_force(self, asked: Solve, solved: Solved, now: float) -> None:
        self._failures = 0
        self._unmet = now
        self._planned = asked.rates | solved.rates
        self._sustained = served_rates(solved.plan or asked.current, self._planned, solved.sustained)
        # What cannot be served is no reason to plan for it again and again.
        self._limits = {
            name: max(rate, self._planned[name], solved.sustained.get(name, 0.0)) for name, rate in asked.rates.items()
        }
        slowdowns = _slowdowns(asked, solved)
        if self._slowdowns != slowdowns or not solved.slowed:
            self._slowdowns = slowdowns
            self._watches.forget_batches()
        self._watches.forget_attainment()
        # What leaves nobody served will do so again in a moment.
        self._not_before = now + (self.options.settle if solved.slowed else self.options.short_cooldown)

    def _roll_ended(self, ended: RollEnded, now: float, commands: list[ControllerCommand]) -> None:
        rolling = self._next
        if not isinstance(rolling, Rolling) or rolling.solved.number != ended.number:
            return
        self._next = None
        if ended.outcome is not RolloutOutcome.COMPLETED:
            again = ended.outcome in (RolloutOutcome.OUTDATED, RolloutOutcome.SUPERSEDED)
            self._postpone(rolling.asked)
            self._fail(now, f"the rollout was {ended.outcome}", ended.reason, again=again)
            return
        self._lead.in_force(rolling.since, now)
        assert rolling.solved.plan is not None
        self._plan = rolling.solved.plan
        self._urgent = self._urgent or self._held.describe_lost(self._plan)
        self._in_force(rolling.asked, rolling.solved, now)
        self._watches.forget_batches()
        self._note(now, f"in force after {ended.seconds:.2f} s", rolling.asked.reason)
        self._release(now, commands)

    def _postpone(self, asked: Solve) -> None:
        """Keep the reason of a solution of which nothing came, where nothing would bring it up again: devices that came
        or went are told of once."""
        if asked.cause is Cause.DEVICES:
            self._postponed = asked.reason

    def _fail(self, now: float, action: str, reason: str, *, again: bool = False) -> None:
        """Note what failed, and wait. again: it failed for what others do, and may well succeed once that is over."""
        delay = min(self.options.retry * (1 if again else 2.0 ** min(self._failures, 64)), self.options.longest_retry)
        self._failures += not again
        self._not_before = now + delay
        self._note(now, f"{action}; try again in {delay:g} s", reason)

    # Devices

    def _acquire(self, now: float, commands: list[ControllerCommand]) -> None:
        for kind, count in self._held.acquire(now).items():
            self._note(now, f"acquire {count} x {kind}", "the rates need them")
            self._cooldown.wanted(now)
            commands.append(Acquire(kind, count))

    def _refused(self, kind: str, count: int, reason: str, now: float) -> None:
        if self._held.refused(kind, count, now):
            self._fail(now, f"{count} x {kind} cannot be had", reason)
        else:  # plans do not wait for what has been refused before
            self._note(now, f"{count} x {kind} still cannot be had", reason)

    def _release(self, now: float, commands: list[ControllerCommand]) -> None:
        used = {device.id for device in self._plan.devices} if self._plan is not None else set(self._held.devices)
        if surplus := self._held.release(used, now):
            self._note(now, f"release {', '.join(surplus)}", "the rates do not need them")
            self._cooldown.released(now)
            commands.append(Release(tuple(surplus)))

    # For people

    @property
    def decisions(self) -> Sequence[Decision]:
        """The latest decisions, oldest first."""
        return self._decisions

    def _note(self, now: float, action: str, reason: str) -> None:
        self._decisions.append(Decision(time=now, action=action, reason=reason))

    def _describe_excess(self, name: str) -> str:
        excess = self._watches[name].describe_excess(name, self._limits.get(name, 0.0))
        return f"{excess}, and its plan sustains {show_rate(self._sustained.get(name, 0.0))}/s"

    def status(self) -> ControllerStatus:
        """Return what it knows and what it is at."""
        match self._next:
            case Rolling(asked):
                activity, reason = "rolling out", asked.reason
            case Solving(asked):
                activity, reason = "solving", asked.reason
            case _:
                activity, reason = "watching", ""
        return ControllerStatus(
            activity=activity,
            reason=reason,
            short=self._short,
            models={
                name: ModelState(
                    offered=watch.estimate.rate,
                    planned=self._planned.get(name, 0.0 if self._plan is None else self._plan.rate(name)),
                    sustained=self._sustained.get(name, 0.0),
                    slowdown=self._slowdowns.get(name, 1.0),
                    observed_slowdown=watch.slowdown.ratio,
                    attainment=watch.attainment.value,
                )
                for name, watch in self._watches
            },
            devices=tuple(sorted(self._held.devices)),
            launching=self._held.launches(),
            foreign_load=self._watches.foreign_load,
            observed_slowdown=self._watches.machine.ratio,
            decisions=tuple(self._decisions),
        )

    def invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself. Tests call this after every event."""
        self._held.invariants()


def _slowdowns(asked: Solve, solved: Solved) -> dict[str, float]:
    """Return the slowdowns that a plan counts with."""
    return dict(asked.slowdowns) if solved.slowed else {}
