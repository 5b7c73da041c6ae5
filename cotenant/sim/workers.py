"""What becomes of workers in a simulated run: failures strike, plans change, and what starts takes its time.

A change of plan is made as the server makes it: workers of new partitions start beside the old ones, and when all are
up they take over at one moment, and the old ones drain. New ones that cannot come up, or for which a device has no
memory beside the old, leave the plan as it was. Changes are made one after the other; of those that come meanwhile, the
last is next. That the old and the new workers slow each other while both are there is not modelled.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from heapq import heappop, heappush
from typing import Protocol

from cotenant.core.plan import Plan
from cotenant.errors import ConfigError, PlanError
from cotenant.runtime.events import ApplicationSpec, Applied, Died, Event, LaneSpec, Ready, Woke
from cotenant.runtime.lane_assignment import LaneAssignment, LaneMatcher
from cotenant.workload.failures import Failure

# What happens at a moment: events, each made only once the one before it was handled.
Step = Callable[[float], Iterable[Event]]


class ScalingPolicy(Protocol):
    """Looks at the rates now and then, and may ask for another plan. period: seconds from one look to the next."""

    @property
    def period(self) -> float: ...

    def observe(self, rates: Mapping[str, float], now: float) -> Plan | None:
        """rates: requests/s of each model that ended since the last look. None: the plan is to stay."""


class Workers:
    """What happens to workers, as the events of `sim.loop.play`; give it all that is to happen, then ask for `events`.

    lanes: what `lanes_of` makes of a plan; wholes: what `specs_of` does. opened: told of lanes before they run
    anything. startup: seconds from the start of a lane's worker until it is warm. Those of the first plan are warm from
    the beginning. crowded: which device has no room for the workers of all these lanes at once, in words; empty where
    each has.
    """

    def __init__(
        self,
        plan: Plan,
        lanes: Callable[[Plan], Iterable[LaneSpec]],
        opened: Callable[[Mapping[str, LaneAssignment]], None],
        startup: Callable[[LaneAssignment], float],
        wholes: Callable[[Plan], tuple[ApplicationSpec, ...]] = lambda plan: (),
        crowded: Callable[[Iterable[LaneAssignment]], str] = lambda lanes: "",
    ) -> None:
        self.layout = LaneMatcher()
        self._lanes = lanes
        self._wholes = wholes
        self._applications = wholes(plan)  # of the plan in force
        self._opened = opened
        self._startup = startup
        self._crowded = crowded
        self._failures: list[Failure] = []
        self._deaths: Counter[str] = Counter()  # by lane: news of a worker that died meanwhile is stale
        self._next: dict[str, LaneAssignment] | None = None  # the lanes that are to take over
        self._coming = self._applications  # the applications then
        self._due: dict[str, float] = {}  # when those of them that start are up
        self._asked: tuple[Plan, bool] | None = None  # what comes after that, and whether it must
        self._agenda: list[tuple[float, int, Step]] = []
        self._order = itertools.count()
        self.layout.lanes = self.layout.match(plan, lanes(plan))
        self._at(0.0, self._begin)

    def fail(self, failures: Iterable[Failure]) -> None:
        """Raises ConfigError for a failure of what the first plan has not."""
        for failure in failures:
            if not any(failure.hits(name) for name in self.layout.lanes):
                there = ", ".join(self.layout.lanes) or "none"
                raise ConfigError(
                    f"a failure of {', '.join(failure.parts)}: no partition is there; the plan has {there}"
                )
            self._at(failure.time, partial(self._fail, failure))

    def change(self, changes: Iterable[tuple[float, Plan]]) -> None:
        """At that time the workers of that plan begin to start. `events` raises PlanError where there is no memory for
        them beside those of the plan before; what a control asks for does not happen then."""
        for time, plan in changes:
            self._at(time, partial(self._change, plan, True))

    def control(self, control: ScalingPolicy, ended: Callable[[], Mapping[str, int]], until: float) -> None:
        """ended: how many requests have ended so far, by model. until: no look at that time or later."""
        before = dict(ended())

        def look(now: float) -> Iterator[Event]:
            yield Woke("", now)  # to nobody: when it has been handled, all that came before this moment has been, too
            counts = dict(ended())
            rates = {name: (count - before[name]) / control.period for name, count in counts.items()}
            before.update(counts)
            plan = control.observe(rates, now)
            if now + control.period < until:
                self._at(now + control.period, look)
            if plan is not None:
                yield from self._change(plan, False, now)

        self._at(control.period, look)

    def events(self) -> Iterator[tuple[float, Event]]:
        while self._agenda:
            now, _, step = heappop(self._agenda)
            for event in step(now):
                yield now, event

    def _at(self, time: float, step: Step) -> None:
        heappush(self._agenda, (time, next(self._order), step))

    def _begin(self, now: float) -> Iterator[Event]:
        self._opened(self.layout.lanes)
        yield self._applied(self.layout.lanes)
        for name in self.layout.lanes:
            yield Ready(name)

    def _applied(self, lanes: Mapping[str, LaneAssignment]) -> Applied:
        return Applied(tuple(lane.spec for lane in lanes.values()), self._applications)

    def _up(self, lane: str, now: float) -> float:
        """When a worker that begins to start now is up: not before what has failed is there again."""
        ends = (it.time + it.back for it in self._failures if it.hits(lane) and it.covers(now))
        return max(ends, default=now) + self._startup(self.layout.lanes.get(lane) or (self._next or {})[lane])

    # Failures

    def _fail(self, failure: Failure, now: float) -> Iterator[Event]:
        self._failures.append(failure)
        for name in filter(failure.hits, self._due):
            self._due[name] = self._up(name, now)
        for name in filter(failure.hits, list(self.layout.lanes)):
            self._deaths[name] += 1
            yield Died(name, f"{', '.join(failure.parts)} failed")
            up = self._up(name, now)
            if up < math.inf:
                self._at(up, partial(self._returned, name, self._deaths[name]))

    def _returned(self, name: str, deaths: int, now: float) -> Iterator[Event]:
        if self._deaths[name] == deaths:
            yield Ready(name)

    # Plans

    def _change(self, plan: Plan, must: bool, now: float) -> Iterator[Event]:
        if self._next is not None:
            self._asked = plan, must
            return
        wanted = self.layout.match(plan, self._lanes(plan))
        fresh = {name: lane for name, lane in wanted.items() if name not in self.layout.lanes}
        crowded = self._crowded((self.layout.lanes | fresh).values())
        if crowded and must:
            raise PlanError(f"the plan cannot change after {now:g} s: {crowded}; go there by a plan with fewer workers")
        if not crowded:
            self._next, self._coming = wanted, self._wholes(plan)
            self._due = {name: self._up(name, now) for name in fresh}
            yield from self._take_over(now)

    def _take_over(self, now: float) -> Iterator[Event]:
        """When all that start are up; if that is not now, it is looked at again then."""
        up = max(self._due.values(), default=now)
        if now < up < math.inf:
            self._at(up, self._take_over)
            return
        wanted, fresh = self._next, list(self._due)
        self._next, self._due = None, {}
        if wanted is not None and up < math.inf:
            self._opened({name: wanted[name] for name in fresh})
            self._applications = self._coming
            yield self._applied(self.layout.lanes | {name: wanted[name] for name in fresh})
            for name in fresh:
                yield Ready(name)
            self.layout.lanes = wanted
            self._opened(wanted)  # not before: a lane that stays may have had larger batches until now
            yield self._applied(wanted)
        asked, self._asked = self._asked, None
        if asked is not None:
            yield from self._change(*asked, now)
