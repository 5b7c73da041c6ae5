"""Validate one problem's plans by simulation, and record the results."""

from __future__ import annotations

import msgspec

from cotenant.core.plan import Device, Plan
from cotenant.core.provenance import Validation
from cotenant.planners import Problem
from cotenant.planners.applications import Split
from cotenant.planning.stage_timer import StageTimer
from cotenant.sim.plan_validation import RUNS, SimulatedSlos, simulate_slos

# A search for the largest rate validates many plans: each is simulated once, and one that misses exactly as much as
# allowed fails with this probability; the search has others. The plan that is returned passes the full validation.
SEARCH_RUNS = 1
SEARCH_CHANCE = 0.2


class Validator:
    """Simulate plans of a problem, given the split of its applications' targets."""

    def __init__(self, problem: Problem, split: Split, timer: StageTimer) -> None:
        self._problem = problem
        self._split = split
        self._timer = timer
        self._quick: dict[tuple[Device, ...], bool] = {}  # planners often arrive at the same plan
        self._full: dict[tuple[Device, ...], SimulatedSlos] = {}
        self._plans = self._runs = 0

    def passes_quickly(self, plan: Plan, scaled: Problem) -> bool:
        """Return whether a plan passes one simulation. scaled: the problem at the plan's rates, which say as much."""
        if plan.devices not in self._quick:
            with self._timer.stage("validation"):
                result = simulate_slos(
                    msgspec.structs.replace(plan, split=self._split),
                    self._problem,
                    runs=SEARCH_RUNS,
                    chance=SEARCH_CHANCE,
                    all_verdicts=False,
                )
            self._count(result)
            self._quick[plan.devices] = result.passed
        return self._quick[plan.devices]

    def validate(self, plan: Plan, *, all_verdicts: bool = True) -> SimulatedSlos:
        """Return the result of a plan's full validation. all_verdicts: of `simulate_slos`."""
        with self._timer.stage("validation"):
            result = simulate_slos(
                msgspec.structs.replace(plan, split=self._split), self._problem, runs=RUNS, all_verdicts=all_verdicts
            )
        self._count(result)
        self._full[plan.devices] = result
        return result

    def record(self, plan: Plan) -> Validation | None:
        """Return the record of a plan's full validation; None where it had none."""
        result = self._full.get(plan.devices)
        if result is None:
            return None
        return Validation(
            passed=result.passed,
            seeds=result.seeds,
            requests=result.requests,
            plans=self._plans,
            runs=self._runs,
            worst=result.worst,
        )

    def _count(self, result: SimulatedSlos) -> None:
        self._plans += 1
        self._runs += len(result.seeds)
