"""Choose the demo's rates: some of what the machine can do, however fast it is, and less where others use it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import msgspec

from cotenant.app.plan_cache import load_plan, plan_key, store_plan
from cotenant.app.problem import work_of
from cotenant.config import Settings
from cotenant.core.plan import Plan
from cotenant.core.profile import slowed_profiles
from cotenant.core.units import show_rate, show_seconds
from cotenant.errors import ConfigError
from cotenant.planners import Problem
from cotenant.planners.rates import at_scale
from cotenant.planning import plan as plan_problem
from cotenant.sim.plan_validation import simulate_slos

# Part of the devices' time that the requests of the demo take, one row at a time: the rest is for the server itself,
# for the program that sends the requests, for others, and for chance.
DEMO_WORK = 0.3


FRACTIONS = (0.75, 0.5, 0.25)  # of those rates, tried in turn where a plan for them would miss an SLO
TIME_LIMIT = 1.0  # seconds of the planner's search
SLOWDOWN_STEP = 1.05  # factor between slowdowns that plans are made for


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the demo's problem and plan. fraction: of the rates of a quiet machine that it is made for. missed: what
    could not be kept at all of them, a line each."""

    problem: Problem
    plan: Plan
    fraction: float = 1.0
    missed: tuple[str, ...] = ()


def plan_demo_once(problem: Problem, settings: Settings, slowdowns: Mapping[str, float]) -> DemoPlan:
    """Plan as `plan_demo` does, or return what an earlier run of the same demo on the same machine found. settings: of
    the server, which the problem is of. slowdowns: rounded up, as no two measurements of a busy machine agree."""
    slowdowns = {model: _rounded_up(slowdown) for model, slowdown in slowdowns.items()}
    asked = (settings.planner, settings.interference, dict(slowdowns))
    key = plan_key(problem, "demo", *asked, DEMO_WORK, FRACTIONS, TIME_LIMIT)
    if (text := load_plan(key)) is not None:
        with contextlib.suppress(msgspec.DecodeError, ConfigError):
            found = msgspec.json.decode(text, type=_Found)
            plan = Plan.from_json(bytes(found.plan))
            scaled = at_scale(_asked(problem, slowdowns), found.fraction)
            return DemoPlan(problem=scaled, plan=plan, fraction=found.fraction, missed=found.missed)
    made = plan_demo(problem, settings.planner, slowdowns)
    found = _Found(plan=msgspec.Raw(made.plan.to_json()), fraction=made.fraction, missed=made.missed)
    store_plan(key, msgspec.json.encode(found))
    return made


def _rounded_up(slowdown: float) -> float:
    """Return the next power of SLOWDOWN_STEP."""
    exponent = math.log(slowdown, SLOWDOWN_STEP)
    return round(SLOWDOWN_STEP ** math.ceil(exponent - 1e-9), 3)


class _Found(msgspec.Struct, forbid_unknown_fields=True):
    """What is kept of a `DemoPlan`; the rest follows from the problem."""

    plan: msgspec.Raw
    fraction: float
    missed: tuple[str, ...]


def plan_demo(problem: Problem, planner: str, slowdowns: Mapping[str, float]) -> DemoPlan:
    """Plan for rates in the proportions of the problem's that take DEMO_WORK of the devices; for less where that would
    miss an SLO.

    slowdowns: of batches by other programs, by model.
    """
    asked = _asked(problem, slowdowns)
    missed: tuple[str, ...] = ()
    for fraction in (1.0, *FRACTIONS):
        scaled = at_scale(asked, fraction)
        # Tighter targets are tried where that may help; beside other programs it takes long, and seldom does.
        plan = plan_problem(scaled, planner, validate=not slowdowns)
        found = _missed(plan, scaled)
        missed = missed or found
        if not found:
            break
    return DemoPlan(problem=scaled, plan=plan, fraction=fraction, missed=missed)


def _asked(problem: Problem, slowdowns: Mapping[str, float]) -> Problem:
    """Return the problem at all of the demo's rates, with batches as slow as they are now."""
    return msgspec.structs.replace(
        at_scale(problem, DEMO_WORK / work_of(problem, problem.rates)),
        profiles=slowed_profiles(problem.profiles, slowdowns),
        time_limit=TIME_LIMIT,
        bounded=False,
    )


def _missed(plan: Plan, problem: Problem) -> tuple[str, ...]:
    """Say which SLOs a plan misses in the simulator, or does not even try to keep."""
    simulated = simulate_slos(plan, problem)
    lines = []
    for model in problem.models:
        target = show_seconds(model.slo)
        if plan.unserved.get(model.name):
            lines.append(
                f"{model.name}: no share is left that serves {show_rate(problem.rates[model.name])}/s in {target}"
            )
        elif shortfall := simulated.shortfall.get(model.name):
            attained = 100 * (model.attainment - shortfall)
            lines.append(f"{model.name}: {attained:.1f} % of {show_rate(problem.rates[model.name])}/s within {target}")
    return tuple(lines)
