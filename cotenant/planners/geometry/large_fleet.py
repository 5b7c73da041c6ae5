"""Large fleets: the integer program settles what the relaxation leaves open (program.py)."""

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

MAX_MIXED_MODES = 100  # modes of several models that the program may choose from
MIN_SOLVER_SECONDS = 0.05  # seconds that the program gets when no time is left: it must have some plan


class SolverBudget:
    """Seconds that are left for the program, over all menus, by its own account of what it took."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds


def solve_large_fleet(
    context: PlanningContext, catalog: ModeCatalog, clock: SolverBudget, *, scale: bool
) -> Generator[Plan, None, bool]:
    """What the program answers; where models come short of it, once more with more asked for them.

    scale: whether it is asked for the largest multiple of the rates. Returns whether all came to what they should.
    """
    wanted = context.rates.copy()
    for _ in range(MAX_REPAIRS):
        mix = _find(context, catalog, context.instance(scale=scale, rates=wanted), clock)
        if mix is None:
            return False
        plan = fitted_plan(context, catalog, assemble_devices(*mix, context.memory_limits, context.current_devices))
        yield plan
        lacking = demand_multipliers(context, plan)
        if lacking is None:
            return True
        if scale != context.maximize_scale:
            return False
        wanted *= lacking
    return False


def _find(context: PlanningContext, catalog: ModeCatalog, instance: MilpInstance, clock: SolverBudget) -> Mix | None:
    """Modes and cuttings, and how many of each; None where nothing serves what is asked."""
    ones = context.planning_modes(catalog)
    relaxation = context.solve_relaxation(instance, ones)
    if relaxation is None:
        return None
    chosen = _mixed(context, catalog, instance, ones, relaxation)
    places = [(place.slot, place.models) for device in context.current_devices for place in device.places]
    # Most of a large fleet is as the relaxation has it; the question is the rest.
    each: list[Mode | CuttingPattern] = [*ones, *context.patterns]
    numbers = zip(each, [*relaxation.modes, *relaxation.patterns], strict=True)
    answer, took = solve_milp(
        instance,
        context.slots,
        context.patterns,
        chosen,
        clip=instance.rates * (relaxation.value if instance.scale else 1.0),
        favour=[n for n, mode in enumerate(chosen) if (mode.slot, mode.models) in set(places)],
        stays=1 + len(places),
        least={one: max(0, math.floor(n + 1e-6) - 1) for one, n in numbers},
        gap=1e-3,
        nodes=200,
        seconds=max(clock.left, MIN_SOLVER_SECONDS),
    )
    clock.left -= took
    if answer is None:
        return None
    return (
        [(mode, int(n)) for mode, n in zip(chosen, answer.modes, strict=True) if n > 0],
        [(pattern, int(n)) for pattern, n in zip(context.patterns, answer.patterns, strict=True) if n > 0],
    )


def _mixed(
    context: PlanningContext,
    catalog: ModeCatalog,
    instance: MilpInstance,
    ones: Sequence[Mode],
    relaxation: MilpSolution,
) -> list[Mode]:
    """Of a large fleet: modes of one model that are near what the relaxation pays, and the best of several."""

    def worth(mode: Mode) -> float:
        value = sum(relaxation.demand_duals[i] * rate for i, rate in zip(mode.models, mode.rates, strict=True))
        price = float(relaxation.slot_duals[mode.slot])
        return value / price if price > 0 else 1.0

    near = [mode for mode in ones if worth(mode) >= 0.9]
    rest = instance.rates * (relaxation.value if instance.scale else 1.0)
    for mode, n in zip(ones, relaxation.modes, strict=True):
        rest[mode.models[0]] -= math.floor(n + 1e-6) * mode.rates[0]
    several = catalog.knapsack_modes(context.planning_slots, relaxation.demand_duals, np.maximum(rest, 0.0))
    if len(context.names) <= MAX_MODELS_FOR_PAIRS:
        several += catalog.pair_modes(context.planning_slots)
    return near + sorted(several, key=worth, reverse=True)[:MAX_MIXED_MODES]
