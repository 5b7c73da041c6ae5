"""Autoscaling policy: decide from observed request rates when to replan, and for which rates.

gpulet, section 4.5 and Algorithm 2, with the numbers of its published program: rates are smoothed, and planned for with
headroom, since they may rise until the next observation and the new workers have to start. A new plan is made when the
rates to plan for have moved away from those of the last plan, with a smaller threshold for rises than for falls. The
planner decides how many devices that takes: the paper's Algorithm 2 asks it for one more until it succeeds.

A scaler reads no clock and starts nothing, so that the same one decides in a simulated run and live
(`sim.workers.ScalingPolicy`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners import Planner, Problem


class ScalingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Configure how quickly a scaler follows the rates, which are in requests/s of each model.

    period: seconds between observations. weight: of the latest observation in the smoothed rate. ahead: seconds by
    which a rise is extrapolated. The paper does not extrapolate; but an observed rate is half a period old on average,
    a smoothed one (1 - weight) / weight periods older, and a plan made now is in force from when its workers are ready
    until those of the next are. room: factor on the smoothed rate to plan for; little_room: the same below `little`,
    where random variation is larger. A plan is made anew when that is above what the last was made for by `rise` of it
    or by `rise_by`, or below it by `fall` of it.
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
    """Decide when to replan. plan: in force, or requested. target: by model, the rates that it was made for. estimate:
    the smoothed rates."""

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
        """Return the next plan, or None to keep the present one. rates: requests/s of each model since the last
        observation.

        What no plan can serve is left `unserved` by the plan that serves most.
        """
        weight = self.policy.weight
        for name in self.target:
            # Models see the requests of applications too, which planners add themselves.
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
        """Hear that the last plan did not come into force, and replan at the next observation."""
        self.plan = plan
        self.target = dict.fromkeys(self.target, 0.0)

    def _room(self, rate: float) -> float:
        return rate * (self.policy.little_room if rate < self.policy.little else self.policy.room)

    def _moved(self, rate: float, planned: float) -> bool:
        up = min(planned * self.policy.rise, self.policy.rise_by)
        return rate > planned + up or rate < planned * (1 - self.policy.fall)
