"""Size a fleet for a workload: plan for it, simulate the plan, and plan for more where an SLO is violated."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cotenant.core.plan import Plan
from cotenant.measure.report import Report
from cotenant.planners import Problem
from cotenant.planning.pipeline import plan as plan_problem
from cotenant.sim.capacity import LoadLevel, SimulationTask, attainment_at, run_simulation
from cotenant.workload import Workload

RATE_FACTORS = (1.0, 1.02, 1.05, 1.1, 1.2)  # of the workload's rates: planned for in turn until every SLO is met


class SizingTask(msgspec.Struct, frozen=True, kw_only=True):
    """Size a fleet of these kinds, as many devices of each as needed, for `growth` times a workload.

    problem: with the rates of the workload at a growth of 1. seeds: of the runs, of `seconds` each, in which a plan
    must meet every SLO.
    """

    problem: Problem
    workload: Workload
    planner: str
    growth: float
    kinds: tuple[str, ...]
    seconds: float
    seeds: tuple[int, ...]

    def grown_problem(self, rate_factor: float = 1.0) -> Problem:
        """Return the problem of `rate_factor` times the grown workload, with no limit on the devices."""
        fleet = tuple(
            msgspec.structs.replace(kind, count=None) for kind in self.problem.fleet if kind.name in self.kinds
        )
        rates = {name: rate * self.growth * rate_factor for name, rate in self.problem.rates.items()}
        return msgspec.structs.replace(self.problem, fleet=fleet, rates=rates, objective="devices", current=None)


class SizingResult(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the plan that a fleet was sized by. level: what models attain under the grown workload."""

    growth: float
    kinds: tuple[str, ...]
    plan: Plan
    level: LoadLevel

    @property
    def serves(self) -> bool:
        return not self.plan.unserved and self.level.slos_met


def size_fleet(task: SizingTask) -> SizingResult:
    """Return the plan with the fewest devices, or the least cost, that meets every SLO over all seeds.

    Where no plan does, the last that was tried.
    """
    problem, workload = task.grown_problem(), task.workload.scaled(task.growth)
    for rate_factor in RATE_FACTORS:
        plan = plan_problem(task.grown_problem(rate_factor), task.planner)
        reports: list[Report] = []
        for seed in task.seeds:
            run = SimulationTask(problem=problem, plan=plan, workload=workload, seconds=task.seconds, seed=seed)
            reports.append(run_simulation(run))
            last = rate_factor == RATE_FACTORS[-1]
            if not last and not plan.unserved and not all(row.slo_met for row in reports[-1].models):
                break  # one run is enough to reject a plan while a larger one can be tried
        result = SizingResult(growth=task.growth, kinds=task.kinds, plan=plan, level=attainment_at(1.0, reports))
        if plan.unserved or (result.serves and len(reports) == len(task.seeds)):
            break
    return result


def cheapest_result(results: Sequence[SizingResult]) -> SizingResult | None:
    """Return the result that serves all at the least cost, or with the fewest devices where not all have a price."""
    serving = [result for result in results if result.serves]
    if any(result.plan.cost_per_hour is None for result in serving):
        return min(serving, key=lambda result: result.plan.devices_used)
    return min(serving, key=lambda result: (result.plan.cost_per_hour or 0.0, result.plan.devices_used), default=None)
