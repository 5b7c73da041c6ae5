"""What a little more would buy: the same planner, asked with one more device, more memory, or more time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import show_count, show_rate
from cotenant.planners import Problem
from cotenant.planners.explain.placement import ENDLESS

if TYPE_CHECKING:
    from cotenant.planners.explain import Explanation

MORE_TIME = 0.01  # seconds
PROBES = 4  # models whose targets are tried one by one
SCALE_TOLERANCE = 0.005  # relative: by which scales, costs or unserved rates may differ and be equal


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """What the same planner makes of a little more. devices, cost_per_hour, scale, unserved: of that plan."""

    more: str
    devices: int
    cost_per_hour: float | None
    scale: float
    unserved: float
    buys: str


def probes(explanation: Explanation, problem: Problem) -> list[tuple[str, Problem]]:
    """The same problem with a little more of something, in words."""
    found = [
        (f"one more {kind.name}", _with_kind(problem, kind, count=kind.count + 1))
        for kind in problem.fleet
        if kind.count is not None
    ]
    found += [
        (f"twice the memory on {kind.name}", _with_kind(problem, kind, memory=2 * kind.memory))
        for kind in problem.fleet
        if kind.memory < ENDLESS and kind.geometry is None  # the memory of an instance comes with its size
    ]
    more = f"{MORE_TIME * 1e3:.0f} ms more"
    found.append((f"{more} for every target", _slower(problem, [model.name for model in problem.models])))
    tight = sorted(explanation.placements, key=lambda it: -it.target_used)
    late = [it.model for it in explanation.unserved if it.cause == "time"]
    names = dict.fromkeys(late + [it.model for it in tight if it.binds in ("target", "both", "chance")])
    return found + [(f"{more} for {name}", _slower(problem, [name])) for name in list(names)[:PROBES]]


def gain(more: str, before: Plan, after: Plan) -> Gain:
    """after: for targets of applications that are split as before, so what it proves is proven of that split alone."""
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
            f"all is served, {devices}"
            if not left
            else f"{show_rate(left)} requests/s unserved instead of {show_rate(missing)}"
        )
    if after.cost_per_hour is not None and before.cost_per_hour is not None:
        was, will, little = before.cost_per_hour, after.cost_per_hour, SCALE_TOLERANCE
        text = f"{will:.2f} per hour instead of {was:.2f}"
    else:
        was, will, little = before.devices_used, after.devices_used, 0.0
        text = f"{show_count(after.devices_used, 'device')} instead of {before.devices_used}"
    if abs(will - was) <= little * was:
        proven = after.bound is not None and not before.split and not left and after.bound >= was * (1 - little)
        return f"nothing: even then no plan does with less than {_now(before)}" if proven else _unproven(after)
    return text if will < was else f"nothing: {text}"


def _unproven(after: Plan) -> str:
    return "nothing" if after.bound is None else "nothing that was found; not proven"


def _now(plan: Plan) -> str:
    if plan.cost_per_hour is not None:
        return f"{plan.cost_per_hour:.2f} per hour"
    return show_count(plan.devices_used, "device")


def _with_kind(problem: Problem, kind: Kind, **changes: int) -> Problem:
    fleet = tuple(msgspec.structs.replace(it, **changes) if it is kind else it for it in problem.fleet)
    return msgspec.structs.replace(problem, fleet=fleet)


def _slower(problem: Problem, names: Sequence[str]) -> Problem:
    models = tuple(
        msgspec.structs.replace(model, slo=model.slo + MORE_TIME) if model.name in names else model
        for model in problem.models
    )
    return msgspec.structs.replace(problem, models=models)
