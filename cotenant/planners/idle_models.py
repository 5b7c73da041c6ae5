"""Give models that nobody asks for now a place in a plan, where that costs the others nothing.

A model without a place rejects its first requests, until a plan for them is in force. So a plan that is too tight for
what idle models might be asked for still keeps as many of them as fit, if need be for less; and one that serves
nothing, since nothing is asked for or nobody can serve it, keeps them on one device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import msgspec

from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Plan
from cotenant.planners import Problem
from cotenant.planners.capacity import PartitionDraft, batched_partitions, with_totals
from cotenant.planners.local_search import attainment_shortfall, drafts_of, with_partitions

LEAST = 1e-3  # of the lightest model's work: what has no place for so little has none at all
PRECISION = 1.1  # a search ends once the least work that is too much is at most this many times what is given


def with_idle_models(plan: Plan, problem: Problem) -> Plan:
    """Return the plan with those models placed that have a rate (requests/s) in `problem` and no place in `plan`.

    The ones with the least work come first, each in the first partition or free share that holds it without any model
    falling further short of its attainment; of a plan without devices, on the first kind that does. Where some do not
    fit at their rates, none gets more work than lets as many as can have a place; what is left of the rates is
    unserved. problem: without applications.
    """
    work = {name: _work(problem, name) for name, rate in problem.rates.items() if rate and not plan.rate(name)}
    if not work:
        return with_totals(plan, problem)
    high = max(work.values())
    best = _with_work(plan, problem, work, high)
    if _placed(best, work) < len(work):
        low = LEAST * min((seconds for seconds in work.values() if seconds), default=0.0)
        least = _with_work(plan, problem, work, low)
        if (most := _placed(least, work)) > _placed(best, work):
            best = least
            while high > PRECISION * low:
                level = math.sqrt(low * high)
                made = _with_work(plan, problem, work, level)
                if _placed(made, work) >= most:
                    best, low = made, level
                else:
                    high = level
    return with_totals(best, problem)


def _with_work(plan: Plan, problem: Problem, work: dict[str, float], most: float) -> Plan:
    """Return the plan with as many models as fit, each for no more than so much work. work: of each at its rate."""
    rates = {name: problem.rates[name] * min(1.0, most / seconds) for name, seconds in work.items() if seconds}
    asked = msgspec.structs.replace(problem, rates=problem.rates | rates)
    for name in sorted(work, key=lambda name: (work[name], name)):
        plan = _with_model(plan, asked, name) or plan
    return plan


def _placed(plan: Plan, names: Collection[str]) -> int:
    return sum(1 for name in names if plan.rate(name))


def _work(problem: Problem, name: str) -> float:
    """Return the seconds/s for which a whole device is busy with a model's requests, one by one, on its best kind."""
    seconds = [
        profile.latency(1, profile.shares[-1]) for (model, _), profile in problem.profiles.items() if model == name
    ]
    return problem.rates[name] * min(seconds, default=0.0)


def _with_model(plan: Plan, problem: Problem, name: str) -> Plan | None:
    allowed = attainment_shortfall(plan, problem)
    for base, index in _places(plan, problem):
        device = base.devices[index]
        kind = problem.kind(device.kind)
        for drafts in _extended(device, kind, name, problem.rates[name]):
            partitions = batched_partitions(problem, kind, drafts, full=True)
            if partitions is None:
                continue
            candidate = with_partitions(base, index, partitions)
            shortfall = attainment_shortfall(candidate, problem)
            if name not in shortfall and all(amount <= allowed.get(other, 0.0) for other, amount in shortfall.items()):
                return candidate
    return None


def _places(plan: Plan, problem: Problem) -> Iterator[tuple[Plan, int]]:
    """Yield the devices of a plan, as the plan and their index; of an empty plan, one empty device of each kind."""
    for index in range(len(plan.devices)):
        yield plan, index
    if not plan.devices:
        for kind in problem.fleet:
            yield msgspec.structs.replace(plan, devices=(Device(id=DeviceId(kind.name), partitions=()),)), 0


def _extended(device: Device, kind: Kind, name: str, rate: float) -> Iterator[list[PartitionDraft]]:
    """Yield the partitions of a device with one model more: on a free share, the smallest first, or in one of them."""
    full = kind.max_partitions is not None and len(device.partitions) >= kind.max_partitions
    for share in sorted(share for share in kind.cuts if share <= device.free and not full):
        yield [*drafts_of(device), PartitionDraft(share, {name: rate})]
    for index in range(len(device.partitions)):
        drafts = drafts_of(device)
        drafts[index].rates[name] = rate
        yield drafts
