"""When to plan anew, and for what: rates that are seen now and then in, plans out.

gpulet, section 4.5 and Algorithm 2, with the numbers of its published program: rates are smoothed, and planned for with
some room, since they may rise until the next look and the new workers have to start. A plan is made anew when what it
should be made for has moved away from what it was made for, sooner upwards than downwards. How many devices that takes
is for the planner to say: the paper's Algorithm 2 asks it for one more until it succeeds.

A scaler reads no clock and starts nothing, so that the same one decides in a simulated run and live
(`sim.workers.ScalingPolicy`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners import Planner, Problem


class ScalingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How quickly a scaler follows. Rates are in requests/s, of each model.

    period: seconds from one look to the next. weight: of the latest look in the smoothed rate.
    ahead: seconds for which a rise is taken to go on as it is. The paper does not look ahead; but a rate that was seen
    is half a period old on average, a smoothed one (1 - weight) / weight periods older, and a plan that is made now is
    in force from when its workers are up until the next one's are.
    room: times the smoothed rate, what is planned for; little_room: the same below `little`, where chance is larger.
    A plan is made anew when that is above what the last was made for by `rise` of it or by `rise_by`, or below it by
    `fall` of it.
    """

    period: float = 20.0
    weight: float = 0.5
    ahead: float = 0.0
    room: float = 1.2
    little_room: float = 1.5
    little: float = 125.0
    rise: float = 0.05
    rise_by: float = 10.0
    fall: float = 0.1


class Scaler:
    """plan: in force, or on its way. target: by model, what it was made for. estimate: the smoothed rates."""

    def __init__(self, problem: Problem, planner: Planner, plan: Plan, policy: ScalingOptions | None = None) -> None:
        """planner: such as `cotenant.planning.plan`. plan: the one in force at the beginning, made for the problem's
        rates."""
        self.policy = policy or ScalingOptions()
        self.plan = plan
        self.target = dict(problem.rates)
        self.estimate: dict[str, float] = {}
        self._rise: dict[str, float] = {}  # of the smoothed rates, requests/s in a second, smoothed alike
        self._problem = problem
        self._planner = planner

    @property
    def period(self) -> float:
        return self.policy.period

    def observe(self, rates: Mapping[str, float], now: float) -> Plan | None:
        """rates: requests/s of each model since the last look. The plan to go over to, or None: all stays as it is.

        What no plan can serve is left `unserved` by the plan that serves most.
        """
        weight = self.policy.weight
        for name in self.target:
            # What applications make is among what a model is seen to get, and planners add it themselves.
            made = sum(rates.get(it.name, 0.0) * it.uses(name) for it in self._problem.applications)
            seen = max(rates.get(name, 0.0) - made, 0.0)
            before = self.estimate.get(name, seen)
            self.estimate[name] = weight * seen + (1 - weight) * before
            rise = (self.estimate[name] - before) / self.policy.period
            self._rise[name] = weight * rise + (1 - weight) * self._rise.get(name, 0.0)
        ahead = self.policy.ahead
        wanted = {name: self._room(rate + ahead * max(0.0, self._rise[name])) for name, rate in self.estimate.items()}
        if not any(self._moved(rate, self.target[name]) for name, rate in wanted.items()):
            return None
        self.target = wanted
        asked = msgspec.structs.replace(self._problem, rates=wanted, current=self.plan)
        plan = self._planner(asked)
        if plan.devices == self.plan.devices:
            return None
        self.plan = plan
        return plan

    def rolled_back(self, plan: Plan) -> None:
        """Plan anew at the next look: the last plan did not come into force, and this one still is."""
        self.plan = plan
        self.target = dict.fromkeys(self.target, 0.0)

    def _room(self, rate: float) -> float:
        return rate * (self.policy.little_room if rate < self.policy.little else self.policy.room)

    def _moved(self, rate: float, planned: float) -> bool:
        up = min(planned * self.policy.rise, self.policy.rise_by)
        return rate > planned + up or rate < planned * (1 - self.policy.fall)
