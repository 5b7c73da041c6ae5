"""Compute what relaxing a constraint would gain: plan again with one more device, more memory, or looser targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import show_count, show_rate
from cotenant.planners import Problem
from cotenant.planners.explain.placement import UNLIMITED_MEMORY

if TYPE_CHECKING:
    from cotenant.planners.explain import Explanation

EXTRA_TIME = 0.01  # seconds
MAX_MODEL_PROBES = 4  # models whose targets are loosened one at a time
SCALE_TOLERANCE = 0.005  # relative tolerance of equality for scales, costs and unserved rates


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """Compare a plan under relaxed constraints with the plan before.

    more: what was relaxed, in words. devices, cost_per_hour, scale, unserved (requests/s): of the new plan. buys: what
    it gains, in words.
    """

    more: str
    devices: int
    cost_per_hour: float | None
    scale: float
    unserved: float
    buys: str


def probes(explanation: Explanation, problem: Problem) -> list[tuple[str, Problem]]:
    """Return relaxed problems, each with what was relaxed, in words."""
    relaxed = [
        (f"one more {kind.name}", _with_kind(problem, kind, count=kind.count + 1))
        for kind in problem.fleet
        if kind.count is not None
    ]
    relaxed += [
        (f"twice the memory on {kind.name}", _with_kind(problem, kind, memory=2 * kind.memory))
        for kind in problem.fleet
        if kind.memory < UNLIMITED_MEMORY and kind.geometry is None  # the memory of an instance comes with its size
    ]
    more = f"{EXTRA_TIME * 1e3:.0f} ms more"
    relaxed.append((f"{more} for every target", _slower(problem, [model.name for model in problem.models])))
    tightest = sorted(explanation.placements, key=lambda placement: -placement.target_used)
    too_slow = [model.model for model in explanation.unserved if model.cause == "time"]
    limited = [one.model for one in tightest if one.bottleneck in ("target", "both", "arrivals")]
    names = dict.fromkeys(too_slow + limited)
    return relaxed + [(f"{more} for {name}", _slower(problem, [name])) for name in list(names)[:MAX_MODEL_PROBES]]


def gain(more: str, before: Plan, after: Plan) -> Gain:
    """Compare a plan under relaxed constraints with the one before.

    after: with the SLOs of applications split as before, so that its bound holds for that split alone.
    """
    return Gain(
        more=more,
        devices=after.devices_used,
        cost_per_hour=after.cost_per_hour,
        scale=after.scale,
        unserved=sum(after.unserved.values()),
        buys=_buys(before, after),
    )


def _buys(before: Plan, after: Plan) -> str:
    if before.objective == "rate":
        if abs(after.scale - before.scale) <= SCALE_TOLERANCE * before.scale:
            proven = (
                after.bound is not None and not before.split and after.bound <= before.scale * (1 + SCALE_TOLERANCE)
            )
            return "nothing: even then no plan serves more" if proven else _unproven(after)
        change = f", {after.scale / before.scale - 1:+.1%}".replace("%", " %") if before.scale else ""
        return f"{after.scale:.3g} x the rates instead of {before.scale:.3g} x{change}"
    missing, left = sum(before.unserved.values()), sum(after.unserved.values())
    if abs(left - missing) > SCALE_TOLERANCE * missing:
        devices = f"on {show_count(after.devices_used, 'device')}"
        return (
            f"everything is served, {devices}"
            if not left
            else f"{show_rate(left)} requests/s unserved instead of {show_rate(missing)}"
        )
    if after.cost_per_hour is not None and before.cost_per_hour is not None:
        old, new, tolerance = before.cost_per_hour, after.cost_per_hour, SCALE_TOLERANCE
        text = f"{new:.2f} per hour instead of {old:.2f}"
    else:
        old, new, tolerance = before.devices_used, after.devices_used, 0.0
        text = f"{show_count(after.devices_used, 'device')} instead of {before.devices_used}"
    if abs(new - old) <= tolerance * old:
        proven = after.bound is not None and not before.split and not left and after.bound >= old * (1 - tolerance)
        return f"nothing: even then no plan needs less than {_size(before)}" if proven else _unproven(after)
    return text if new < old else f"nothing: {text}"


def _unproven(after: Plan) -> str:
    return "nothing" if after.bound is None else "nothing found; not proven"


def _size(plan: Plan) -> str:
    if plan.cost_per_hour is not None:
        return f"{plan.cost_per_hour:.2f} per hour"
    return show_count(plan.devices_used, "device")


def _with_kind(problem: Problem, kind: Kind, **changes: int) -> Problem:
    fleet = tuple(msgspec.structs.replace(other, **changes) if other is kind else other for other in problem.fleet)
    return msgspec.structs.replace(problem, fleet=fleet)


def _slower(problem: Problem, names: Sequence[str]) -> Problem:
    models = tuple(
        msgspec.structs.replace(model, slo=model.slo + EXTRA_TIME) if model.name in names else model
        for model in problem.models
    )
    return msgspec.structs.replace(problem, models=models)
