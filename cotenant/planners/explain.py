"""Why a plan is as it is: what binds each placement, why a model is not served, and what a little more would buy.

A placement is explained by the next smaller legal share. The rest of its device stays as it is, and conditions are
lifted one by one until the smaller share would do: what has to be lifted is what binds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from cotenant.core import mig
from cotenant.core.alike import Alike, alike
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Partition, Plan
from cotenant.core.units import show_count, show_memory, show_names, show_rate, show_seconds, show_share
from cotenant.planners import Problem
from cotenant.planners.capacity import Cut, curve, footprint, housed, partitions, saturate
from cotenant.planners.forecast import forecast

# Of a smaller share. share: there is none, or none that lies beside the others. memory: its memory is too small.
# target: not even single requests are done in time. rate: it does not keep up, however long requests may wait. both:
# it keeps up only in batches that take too long. chance: it would do for evenly spaced requests, not for random ones.
# other: it would do but for another model of the partition. room: it would do, so the rest is to spare.
Bind = Literal["share", "memory", "target", "rate", "both", "chance", "other", "room"]
# Of a model that is not served. unknown: nothing was measured. time: no share is fast enough.
Cause = Literal["unknown", "time", "memory", "capacity"]

MORE_TIME = 0.01  # seconds
PROBES = 4  # models whose targets are tried one by one
LITTLE = 0.005  # of a scale, which `solve` finds no closer, or of what is paid or missing
ENDLESS = 1 << 62  # bytes; where memory is no question
NEVER = 1e9  # seconds; a target that is none


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """One placement, on each of `count` devices that are alike.

    target_used: the worst case as a part of the target. rate_used: the rate as a part of what the partition carries.
    memory_used: what all workers of the device need, as a part of its memory; None where that is no question.
    """

    partition: str
    count: int
    share: int
    model: str
    rate: float
    target_used: float
    rate_used: float
    memory_used: float | None
    binds: Bind
    why: str


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is not served, or not wholly. rate: requests/s that are missing. nearest: the least target, in
    seconds, that a whole device can hold for it; None where that is not what is wrong."""

    model: str
    rate: float
    cause: Cause
    nearest: float | None
    why: str


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """What the same planner makes of a little more. devices, cost_per_hour, scale, unserved: of that plan."""

    more: str
    devices: int
    cost_per_hour: float | None
    scale: float
    unserved: float
    buys: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    placements: tuple[Explained, ...]
    unserved: tuple[Missing, ...]
    gains: tuple[Gain, ...] = ()


def explain(plan: Plan, problem: Problem) -> Explanation:
    """Of a plan that violates nothing. `gains` is left to who has time to plan again."""
    lacks = [_missing(problem, plan, model, rate) for model, rate in plan.unserved.items()]
    if problem.objective == "rate":
        # Less than the rates is served of all models alike; what matters is who keeps all others from being served.
        lacks = [lack for lack in lacks if plan.scale == 0 and lack.cause != "capacity"]
    return Explanation(
        placements=tuple(each for group in alike(plan) for each in _explained(group, plan, problem)),
        unserved=tuple(lacks),
    )


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
        if abs(after.scale - before.scale) <= LITTLE * before.scale:
            proven = after.bound is not None and not before.split and after.bound <= before.scale * (1 + LITTLE)
            return "nothing: even then no plan serves more" if proven else _unproven(after)
        change = f", {after.scale / before.scale - 1:+.1%}".replace("%", " %") if before.scale else ""
        return f"{after.scale:.3g} x the rates instead of {before.scale:.3g} x{change}"
    missing, left = sum(before.unserved.values()), sum(after.unserved.values())
    if abs(left - missing) > LITTLE * missing:
        devices = f"on {show_count(after.devices_used, 'device')}"
        return (
            f"all is served, {devices}"
            if not left
            else f"{show_rate(left)} requests/s unserved instead of {show_rate(missing)}"
        )
    if after.cost_per_hour is not None and before.cost_per_hour is not None:
        was, will, little = before.cost_per_hour, after.cost_per_hour, LITTLE
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


# Why a placement has its share


def _explained(group: Alike, plan: Plan, problem: Problem) -> Iterator[Explained]:
    device = group.device
    kind = problem.kind(device.kind)
    need = sum(_need(problem, kind, cut) for cut in device.partitions)
    for slot, partition in enumerate(device.partitions):
        binds = _binds(problem, plan, kind, device, slot)
        for placement in partition.placements:
            bind, why = binds[placement.model]
            yield Explained(
                partition=f"{group.name}/{slot}",
                count=group.count,
                share=partition.share,
                model=placement.model,
                rate=placement.rate,
                target_used=(placement.duty + placement.latency) / problem.model(placement.model).slo,
                rate_used=placement.rate * placement.duty / (placement.procs * placement.batch),
                memory_used=None if kind.memory >= ENDLESS else need / kind.memory,
                binds=bind,
                why=why,
            )


def _need(problem: Problem, kind: Kind, cut: Partition) -> int:
    return sum(it.procs * footprint(problem, kind.name, it.model, it.batch) for it in cut.placements)


def _binds(problem: Problem, plan: Plan, kind: Kind, device: Device, slot: int) -> dict[str, tuple[Bind, str]]:
    """By model of one partition, what keeps it from a smaller share."""
    partition = device.partitions[slot]
    names = [placement.model for placement in partition.placements]
    smaller = max((cut for cut in kind.cuts if cut < partition.share), default=None)
    if smaller is None:
        return dict.fromkeys(names, ("share", "none is smaller"))
    less = show_share(smaller)

    def made(
        *, on: Kind = kind, timeless: Sequence[str] = (), idle: Sequence[str] = ()
    ) -> tuple[Partition, ...] | None:
        cuts = [_cut(it, smaller if i == slot else it.share, idle) for i, it in enumerate(device.partitions)]
        return partitions(_timeless(problem, timeless), on, cuts)

    def each(bind: Bind, why: str, lifted: Callable[[Sequence[str]], bool]) -> dict[str, tuple[Bind, str]]:
        """That for the models that stand in the way even with it lifted for all others; where none does, for all."""
        guilty = [name for name in names if not lifted([other for other in everyone if other != name])] or names
        return {name: (bind, why) if name in guilty else _shares_with(guilty) for name in names}

    everyone = [placement.model for it in device.partitions for placement in it.placements]
    if (anew := made()) is not None:
        return _by_chance(problem, plan, device, anew, names, less)
    if made(on=_boundless(kind)) is not None:
        if kind.geometry is not None and not mig.fit(
            kind.geometry, [(share, 0) for share in _shares(device, slot, smaller)]
        ):
            return dict.fromkeys(names, ("share", f"{less}: no such instance fits beside the others"))
        need = show_memory(_need(problem, kind, partition))
        return dict.fromkeys(names, ("memory", f"{less}: no room for {need}"))
    free = _boundless(kind)
    if made(on=free, idle=everyone) is None:
        why = f"{less}: too slow"
        return each("target", why, lambda others: made(on=free, idle=everyone, timeless=others) is not None)
    if made(on=free, timeless=everyone) is None:
        why = f"{less}: falls behind"
        return each("rate", why, lambda others: made(on=free, timeless=everyone, idle=others) is not None)
    why = f"{less}: keeps up, but late"
    return each("both", why, lambda others: made(on=free, idle=others, timeless=others) is not None)


def _by_chance(
    problem: Problem, plan: Plan, device: Device, anew: tuple[Partition, ...], names: Sequence[str], less: str
) -> dict[str, tuple[Bind, str]]:
    """A smaller share that evenly spaced requests would do with."""
    changed = msgspec.structs.replace(device, partitions=anew)
    devices = tuple(changed if it is device else it for it in plan.devices)
    before, after = (forecast(it, problem).models for it in (plan, msgspec.structs.replace(plan, devices=devices)))
    broken = {
        name: f"{less}: {after[name].attainment * 100:.1f} % in time"
        for name in after
        if after[name].attainment < min(problem.model(name).attainment, before[name].attainment)
    }
    if not broken:
        return dict.fromkeys(names, ("room", f"{less}: would do"))
    guilty = [name for name in names if name in broken]
    if not guilty:
        return dict.fromkeys(names, ("other", f"{less}: {show_names(list(broken))} too slow"))
    return {name: ("chance", broken[name]) if name in broken else _shares_with(guilty) for name in names}


def _shares_with(guilty: Sequence[str]) -> tuple[Bind, str]:
    return "other", f"beside {show_names(guilty)}"


def _cut(partition: Partition, share: int, idle: Sequence[str]) -> Cut:
    return Cut(
        share,
        {it.model: 0.0 if it.model in idle else it.rate for it in partition.placements},
        {it.model: it.procs for it in partition.placements},
    )


def _shares(device: Device, slot: int, smaller: int) -> list[int]:
    return [smaller if i == slot else it.share for i, it in enumerate(device.partitions)]


def _timeless(problem: Problem, names: Sequence[str]) -> Problem:
    if not names:
        return problem
    models = tuple(
        msgspec.structs.replace(model, slo=NEVER) if model.name in names else model for model in problem.models
    )
    return msgspec.structs.replace(problem, models=models)


def _boundless(kind: Kind) -> Kind:
    return msgspec.structs.replace(kind, memory=ENDLESS, geometry=None)


# Why a model is not served


def _missing(problem: Problem, plan: Plan, name: str, rate: float) -> Missing:
    def because(cause: Cause, why: str, nearest: float | None = None) -> Missing:
        return Missing(model=name, rate=rate, cause=cause, nearest=nearest, why=why)

    model = problem.model(name)
    fastest = [(seconds[:1], kind) for kind in problem.fleet for _, seconds in _whole(problem, name, kind)]
    known = [(seconds[0], kind) for seconds, kind in fastest if seconds and math.isfinite(seconds[0])]
    if not known:
        return because(
            "unknown", "it was measured on no share of any of these devices; measure it with `cotenant profile`"
        )
    latency, kind = min(known, key=lambda it: it[0])
    if 2 * latency > model.slo:
        nearest = 2 * latency
        return because(
            "time",
            f"a single request takes {show_seconds(latency)} on {show_share(kind.cuts[-1])} of {kind.name}, the fastest"
            f" there is, and one that just missed a batch waits as long again: the nearest target that would work is"
            f" {show_seconds(nearest)}, {show_seconds(model.slo)} is asked for",
            nearest,
        )
    quick = {kind.name for seconds, kind in known if 2 * seconds <= model.slo}
    able = [kind for kind in problem.fleet if kind.name in quick]
    housing = [kind for kind in able if housed(kind, [(kind.cuts[-1], footprint(problem, kind.name, name, 1))])]
    if not housing:
        need, room = min((footprint(problem, kind.name, name, 1), kind.memory) for kind in able)
        return because("memory", f"a worker of it needs {show_memory(need)}, a device has {show_memory(room)}")
    for group in alike(plan):
        if (kind := problem.kind(group.device.kind)) in housing and _only_memory(problem, kind, group.device, name):
            worker = show_memory(footprint(problem, kind.name, name, 1))
            taken = show_memory(sum(_need(problem, kind, cut) for cut in group.device.partitions))
            return because(
                "memory",
                f"{show_share(group.device.free)} of {group.name} are free, but {taken} of {show_memory(kind.memory)}"
                f" of memory are taken, and a worker needs {worker}",
            )
    most, kind = max(
        (
            (workers * saturate(seconds, model.slo)[1], kind)
            for kind in housing
            for workers, seconds in _whole(problem, name, kind)
        ),
        key=lambda it: it[0],
    )
    used_up = sum(device.kind == kind.name for device in plan.devices)
    taken = "" if kind.count is None else f", and {used_up} of {kind.count} are in use"
    return because(
        "capacity",
        f"no room is left: a whole {kind.name} carries {show_rate(most)} requests/s of it within its target{taken}",
    )


def _whole(problem: Problem, model: str, kind: Kind) -> list[tuple[int, tuple[float, ...]]]:
    """Numbers of workers that the model was measured with, and the seconds of its batches on the largest share then."""
    profile = problem.profile(model, kind.name)
    numbers = sorted({point.procs for point in profile.points}) if profile is not None else []
    return [(workers, curve(problem, model, kind.name, kind.cuts[-1], workers)) for workers in numbers]


def _only_memory(problem: Problem, kind: Kind, device: Device, model: str) -> bool:
    """Whether what is free of a device would serve the model, if its memory did."""
    share = max((cut for cut in kind.cuts if cut <= device.free), default=None)
    if share is None or (kind.max_partitions is not None and len(device.partitions) >= kind.max_partitions):
        return False
    cuts = [*(_cut(it, it.share, ()) for it in device.partitions), Cut(share, {model: 0.0})]
    if kind.geometry and mig.fit(kind.geometry, [(cut.share, 0) for cut in cuts]) is None:
        return False
    return partitions(problem, kind, cuts) is None and partitions(problem, _boundless(kind), cuts) is not None
