"""Plan pairs of models that share a device, each chosen for the highest total throughput, as KACE does.

KACE (2024), chapters 4 and 5: of the workloads that wait, the first is the target and gets a device; of the others, the
one is put beside it with which both together are predicted to reach the highest throughput, relative to each one's
alone. Its rivals choose by one feature of the candidates: the least memory (`colocate-memcap`), the highest utilisation
of multiprocessors (`colocate-sm`), the least of memory bandwidth (`colocate-mem`). At most two share a device.

Where the paper differs:

- both of its workloads may use the whole device; here it is divided between the two, in the way with the highest
  predicted throughput that serves both rates within their targets, where the second has as little or as much of what
  the first leaves as it can;
- it predicts the sum from kernel metrics of samples of this cluster; a problem has an interference predictor, whose
  slowdowns give the sum (`cotenant colocate --policy kace` does as KACE does);
- its workloads have no rates: here a rate beyond a device is split into equal parts, and models wait in the problem's
  order;
- kinds of devices are tried in order of price; what does not fit is unserved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.capacity import DeviceDraft, PartitionDraft, batched_partitions, fits_device
from cotenant.planners.cluster import fits
from cotenant.planners.colocate import SetScore, rank_by_prediction, rank_by_rule
from cotenant.planners.kind_by_kind import Instance, plan_kind_by_kind, split_into_instances
from cotenant.predictors import Load

# Returns how a policy scores the candidates for a target.
Policy = Callable[[Problem, Load], SetScore]


class Pair(msgspec.Struct, frozen=True):
    """Describe two workloads on one device: how it is divided, and the loads with their batches, the target first."""

    cuts: list[PartitionDraft]
    loads: tuple[Load, Load]
    throughput: float


def plan(problem: Problem) -> Plan:
    """Plan pairs by predicted total throughput."""
    return _plan(problem, "colocate", _by_prediction)


def plan_by_memory(problem: Problem) -> Plan:
    """Plan pairs by the least memory. Raises PlanError for profiles without memory."""
    return _plan(problem, "colocate-memcap", lambda asked, _: rank_by_rule("memcap", asked.profiles))


def plan_by_sm(problem: Problem) -> Plan:
    """Plan pairs by the highest utilisation of multiprocessors. Raises PlanError for profiles without it."""
    return _plan(problem, "colocate-sm", lambda asked, _: rank_by_rule("sm", asked.profiles))


def plan_by_dram(problem: Problem) -> Plan:
    """Plan pairs by the least utilisation of memory bandwidth. Raises PlanError for profiles without it."""
    return _plan(problem, "colocate-mem", lambda asked, _: rank_by_rule("mem", asked.profiles))


def _by_prediction(problem: Problem, target: Load) -> SetScore:
    return rank_by_prediction(target, problem.interference, problem.profiles, "relative")


def _plan(problem: Problem, name: str, policy: Policy) -> Plan:
    return plan_kind_by_kind(problem, name, lambda kind, rates: _place(problem, kind, rates, policy))


def _place(problem: Problem, kind: Kind, rates: Mapping[str, float], policy: Policy) -> list[DeviceDraft]:
    waiting = [
        each
        for model, rate in rates.items()
        for each in split_into_instances(problem, kind, model, rate, kind.cuts[-1])
    ]
    least = {each: _least_share(problem, kind, each) for each in dict.fromkeys(waiting)}
    pairs: dict[tuple[Instance, Instance], Pair | None] = {}
    devices: list[DeviceDraft] = []
    while waiting and (kind.count is None or len(devices) < kind.count):
        target = waiting.pop(0)
        scored: list[tuple[float, Instance, Pair]] = []
        for candidate in dict.fromkeys(waiting):
            if (target, candidate) not in pairs:
                pairs[target, candidate] = _divide(problem, kind, target, candidate, least)
            pair = pairs[target, candidate]
            score = None if pair is None else policy(problem, pair.loads[0])((pair.loads[1],))
            if pair is not None and score is not None:
                scored.append((score, candidate, pair))
        if scored:
            _, candidate, pair = max(scored, key=lambda choice: choice[0])
            waiting.remove(candidate)
            devices.append(DeviceDraft(kind, pair.cuts))
        elif fits(problem, alone := DeviceDraft(kind, [PartitionDraft(kind.cuts[-1], {target.model: target.rate})])):
            devices.append(alone)
    return devices


def _divide(
    problem: Problem, kind: Kind, target: Instance, candidate: Instance, least: Mapping[Instance, int]
) -> Pair | None:
    """Divide a device between two workloads, for the highest predicted throughput; None where no division serves
    both. least: the share (‰) that each needs alone.

    For each share of the target, the candidate gets the least of the rest that serves both, or all of it.
    """
    if kind.max_partitions == 1:
        return None
    best: Pair | None = None
    for share in kind.cuts[kind.cuts.index(least[target]) :]:
        rest = [cut for cut in kind.cuts if least[candidate] <= cut <= WHOLE - share]
        smallest = next(
            (pair for other in rest if (pair := _pair(problem, kind, target, share, candidate, other))), None
        )
        if smallest is None:
            continue
        whole = _pair(problem, kind, target, share, candidate, rest[-1])
        best = max((pair for pair in (best, smallest, whole) if pair is not None), key=_preference)
    return best


def _pair(problem: Problem, kind: Kind, target: Instance, share: int, candidate: Instance, other: int) -> Pair | None:
    """Return two workloads on these shares (‰) of a device; None where a target is missed."""
    cuts = [
        PartitionDraft(share, {target.model: target.rate}),
        PartitionDraft(other, {candidate.model: candidate.rate}),
    ]
    made = batched_partitions(problem, kind, cuts)
    if made is None:
        return None
    one, two = (Load(p.model, kind.name, p.batch, cut.share) for cut in made for p in cut.placements)
    reached = _by_prediction(problem, one)((two,))
    return Pair(cuts, (one, two), -math.inf if reached is None else reached)


def _preference(pair: Pair) -> tuple[float, int]:
    """Return what decides between divisions: the predicted throughput, then how much of the device is used."""
    return pair.throughput, sum(cut.share for cut in pair.cuts)


def _least_share(problem: Problem, kind: Kind, instance: Instance) -> int:
    """Return the least share (‰) that serves a workload alone; it came from the largest, which does."""
    cuts = kind.cuts[:-1]
    draft = {instance.model: instance.rate}
    return next((cut for cut in cuts if fits_device(problem, kind, [PartitionDraft(cut, draft)])), kind.cuts[-1])
