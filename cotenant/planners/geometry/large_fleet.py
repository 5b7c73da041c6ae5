"""Plan large fleets: round the relaxation down, and let the integer program place the rest (program.py)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import numpy as np

from cotenant.core.plan import Plan
from cotenant.planners.geometry.context import MAX_MODELS_FOR_PAIRS, PlanningContext
from cotenant.planners.geometry.cutting_patterns import CuttingPattern
from cotenant.planners.geometry.device_assembly import assemble_devices
from cotenant.planners.geometry.modes import Mode, ModeCatalog
from cotenant.planners.geometry.program import MilpInstance, MilpSolution, solve_milp
from cotenant.planners.geometry.rate_fitting import demand_multipliers, fitted_plan
from cotenant.planners.geometry.small_fleet import MAX_REPAIRS

Mix = tuple[list[tuple[Mode, int]], list[tuple[CuttingPattern, int]]]

MAX_MIXED_MODES = 100  # modes of several models in the program
MIN_SOLVER_SECONDS = 0.05  # for the program when no time is left: some plan is needed


class SolverBudget:
    """Count the solver seconds left for all catalogs together, by the solver's own account."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds


def solve_large_fleet(
    context: PlanningContext, catalog: ModeCatalog, budget: SolverBudget, *, maximize_scale: bool
) -> Generator[Plan, None, bool]:
    """Yield plans from the program; where models come short, solve again with more demand for them.

    maximize_scale: solve for the largest multiple of the rates. Returns whether no model came short.
    """
    demand = context.rates.copy()
    for _ in range(MAX_REPAIRS):
        mix = _solve_mix(context, catalog, context.instance(maximize_scale=maximize_scale, rates=demand), budget)
        if mix is None:
            return False
        plan = fitted_plan(context, catalog, assemble_devices(*mix, context.memory_limits, context.current_devices))
        yield plan
        multipliers = demand_multipliers(context, plan)
        if multipliers is None:
            return True
        if maximize_scale != context.maximize_scale:
            return False
        demand *= multipliers
    return False


def _solve_mix(
    context: PlanningContext, catalog: ModeCatalog, instance: MilpInstance, budget: SolverBudget
) -> Mix | None:
    """Return modes and patterns with how many of each; None where the instance is infeasible."""
    singles = context.planning_modes(catalog)
    relaxation = context.solve_relaxation(instance, singles)
    if relaxation is None:
        return None
    chosen = _promising_modes(context, catalog, instance, singles, relaxation)
    partitions = [each for device in context.current_devices for each in device.partitions]
    current = {(partition.slot, partition.models) for partition in partitions}
    # All but one of each column's whole number in the relaxation are fixed.
    columns: list[Mode | CuttingPattern] = [*singles, *context.patterns]
    numbers = zip(columns, [*relaxation.modes, *relaxation.patterns], strict=True)
    solution, seconds_used = solve_milp(
        instance,
        context.slots,
        context.patterns,
        chosen,
        demand=instance.rates * (relaxation.value if instance.maximize_scale else 1.0),
        preferred=[n for n, mode in enumerate(chosen) if (mode.slot, mode.models) in current],
        max_preferred=1 + len(partitions),
        lower_bounds={column: max(0, math.floor(n + 1e-6) - 1) for column, n in numbers},
        gap=1e-3,
        nodes=200,
        seconds=max(budget.left, MIN_SOLVER_SECONDS),
    )
    budget.left -= seconds_used
    if solution is None:
        return None
    return (
        [(mode, int(n)) for mode, n in zip(chosen, solution.modes, strict=True) if n > 0],
        [(pattern, int(n)) for pattern, n in zip(context.patterns, solution.patterns, strict=True) if n > 0],
    )


def _promising_modes(
    context: PlanningContext,
    catalog: ModeCatalog,
    instance: MilpInstance,
    singles: Sequence[Mode],
    relaxation: MilpSolution,
) -> list[Mode]:
    """Return the single-model modes of small reduced cost in the relaxation, and the best modes of several models."""

    def value_to_price(mode: Mode) -> float:
        value = sum(relaxation.demand_duals[i] * rate for i, rate in zip(mode.models, mode.rates, strict=True))
        price = float(relaxation.slot_duals[mode.slot])
        return value / price if price > 0 else 1.0

    near_optimal = [mode for mode in singles if value_to_price(mode) >= 0.9]
    rest_demand = instance.rates * (relaxation.value if instance.maximize_scale else 1.0)
    for mode, n in zip(singles, relaxation.modes, strict=True):
        rest_demand[mode.models[0]] -= math.floor(n + 1e-6) * mode.rates[0]
    several = catalog.knapsack_modes(context.planning_slots, relaxation.demand_duals, np.maximum(rest_demand, 0.0))
    if len(context.names) <= MAX_MODELS_FOR_PAIRS:
        several += catalog.pair_modes(context.planning_slots)
    return near_optimal + sorted(several, key=value_to_price, reverse=True)[:MAX_MIXED_MODES]
