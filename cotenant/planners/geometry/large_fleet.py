"""Large fleets: the integer program settles what the relaxation leaves open (program.py)."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import numpy as np

from cotenant.core.plan import Plan
from cotenant.planners.geometry.context import FEW, PlanningContext
from cotenant.planners.geometry.cutting_patterns import CuttingPattern
from cotenant.planners.geometry.device_assembly import assemble_devices
from cotenant.planners.geometry.modes import Mode, ModeCatalog
from cotenant.planners.geometry.program import MilpInstance, MilpSolution, solve_milp
from cotenant.planners.geometry.rate_fitting import fitted_plan, raised_rates
from cotenant.planners.geometry.small_fleet import REPAIRS

Mix = tuple[list[tuple[Mode, int]], list[tuple[CuttingPattern, int]]]

MIXED = 100  # modes of several models that the program may choose from
LEAST = 0.05  # seconds that the program gets when no time is left: it must have some plan


class SolverBudget:
    """Seconds that are left for the program, over all menus, by its own account of what it took."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds


def solve_large_fleet(
    space: PlanningContext, menu: ModeCatalog, clock: SolverBudget, *, scale: bool
) -> Generator[Plan, None, bool]:
    """What the program answers; where models come short of it, once more with more asked for them.

    scale: whether it is asked for the largest multiple of the rates. Returns whether all came to what they should.
    """
    wanted = space.rates.copy()
    for _ in range(REPAIRS):
        mix = _find(space, menu, space.ask(scale=scale, rates=wanted), clock)
        if mix is None:
            return False
        plan = fitted_plan(space, menu, assemble_devices(*mix, space.rooms, space.standing))
        yield plan
        lacking = raised_rates(space, plan)
        if lacking is None:
            return True
        if scale != space.scale:
            return False
        wanted *= lacking
    return False


def _find(space: PlanningContext, menu: ModeCatalog, ask: MilpInstance, clock: SolverBudget) -> Mix | None:
    """Modes and cuttings, and how many of each; None where nothing serves what is asked."""
    ones = space.ones(menu)
    relaxed = space.linear(ask, ones)
    if relaxed is None:
        return None
    chosen = _mixed(space, menu, ask, ones, relaxed)
    places = [(place.slot, place.models) for device in space.standing for place in device.places]
    # Most of a large fleet is as the relaxation has it; the question is the rest.
    each: list[Mode | CuttingPattern] = [*ones, *space.cuttings]
    numbers = zip(each, [*relaxed.modes, *relaxed.cuttings], strict=True)
    answer, took = solve_milp(
        ask,
        space.slots,
        space.cuttings,
        chosen,
        clip=ask.rates * (relaxed.value if ask.scale else 1.0),
        favour=[n for n, mode in enumerate(chosen) if (mode.slot, mode.models) in set(places)],
        stays=1 + len(places),
        least={one: max(0, math.floor(n + 1e-6) - 1) for one, n in numbers},
        gap=1e-3,
        nodes=200,
        seconds=max(clock.left, LEAST),
    )
    clock.left -= took
    if answer is None:
        return None
    return (
        [(mode, int(n)) for mode, n in zip(chosen, answer.modes, strict=True) if n > 0],
        [(cutting, int(n)) for cutting, n in zip(space.cuttings, answer.cuttings, strict=True) if n > 0],
    )


def _mixed(
    space: PlanningContext, menu: ModeCatalog, ask: MilpInstance, ones: Sequence[Mode], relaxed: MilpSolution
) -> list[Mode]:
    """Of a large fleet: modes of one model that are near what the relaxation pays, and the best of several."""

    def worth(mode: Mode) -> float:
        value = sum(relaxed.worth[i] * rate for i, rate in zip(mode.models, mode.rates, strict=True))
        price = float(relaxed.price[mode.slot])
        return value / price if price > 0 else 1.0

    near = [mode for mode in ones if worth(mode) >= 0.9]
    rest = ask.rates * (relaxed.value if ask.scale else 1.0)
    for mode, n in zip(ones, relaxed.modes, strict=True):
        rest[mode.models[0]] -= math.floor(n + 1e-6) * mode.rates[0]
    several = menu.fills(space.planned, relaxed.worth, np.maximum(rest, 0.0))
    if len(space.names) <= FEW:
        several += menu.pairs(space.planned)
    return near + sorted(several, key=worth, reverse=True)[:MIXED]
