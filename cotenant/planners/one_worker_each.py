"""Give each model one partition, with the share of a device that its work is of all work there.

That is what serves models best whose rates nobody knows: none waits for another's batch, none has several workers. The
planners of the papers need rates, and give shares that just do for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners.candidates import with_provenance
from cotenant.planners.capacity import (
    DeviceDraft,
    PartitionDraft,
    RoundShare,
    batched_partitions,
    build_plan,
    latency_curve,
    median_slowdown,
    smallest_batches,
)
from cotenant.planners.problem import Problem

SOURCE = "one worker for each model"
MIN_GAIN = 0.99  # of its latency, at most, for which a model gets more of a device


def one_worker_each(problem: Problem, planner: str) -> Plan | None:
    """Return a plan with one partition for each model; None where targets, rates or memory do not allow it.

    planner: whose plan it is said to be.
    """
    drafts = [
        DeviceDraft(kind=kind, cuts=[])
        for kind in problem.fleet
        for _ in range(min(len(problem.models), 1 if kind.count is None else kind.count))
    ]
    placed = _spread(problem, drafts)
    if placed is None:
        return None
    for draft, names in zip(drafts, placed, strict=True):
        shares = _shares(problem, draft.kind, names)
        if shares is None:
            return None
        draft.cuts = [PartitionDraft(shares[name], {name: problem.rates[name]}) for name in names]
        if batched_partitions(problem, draft.kind, draft.cuts) is None:
            return None
    return with_provenance(build_plan(problem, planner, [draft for draft in drafts if draft.cuts]), source=SOURCE)


def _spread(problem: Problem, drafts: Sequence[DeviceDraft]) -> list[list[str]] | None:
    """Return the models of each device: the largest first, each where it leaves the least work. None where some model
    has no profile."""
    loads = [0.0] * len(drafts)
    placed: list[list[str]] = [[] for _ in drafts]

    def work(name: str, kind: Kind) -> float:
        return _work(problem, name, kind.name, kind.cuts[-1])

    kinds = {draft.kind.name: draft.kind for draft in drafts}.values()
    names = [name for name, rate in problem.rates.items() if rate > 0]
    for name in sorted(names, key=lambda name: -max((work(name, kind) for kind in kinds), default=0.0)):
        known = [i for i, draft in enumerate(drafts) if latency_curve(problem, name, draft.kind.name, WHOLE)]
        if not known:
            return None
        best = min(known, key=lambda i: loads[i] + work(name, drafts[i].kind))
        loads[best] += work(name, drafts[best].kind)
        placed[best].append(name)
    return [sorted(names) for names in placed]


def _work(problem: Problem, name: str, kind: str, share: int) -> float:
    """Return the part of its time for which a model keeps a share (‰) busy, one row at a time; 0 without a profile."""
    curve = latency_curve(problem, name, kind, share)
    return problem.rates[name] * curve[0] if curve else 0.0


def _shares(problem: Problem, kind: Kind, names: Sequence[str]) -> Mapping[str, int] | None:
    """Return a legal share for each model of one device: at least what its target and rate ask for, and of the rest the
    next step to whoever is busiest. None where that is more than the whole."""
    least = {name: _least_share(problem, name, kind) for name in names}
    shares = {name: share for name, share in least.items() if share is not None}
    if len(shares) < len(names) or sum(shares.values()) > WHOLE:
        return None
    growing = set(names)
    while growing:
        name = max(sorted(growing), key=lambda name: _work(problem, name, kind.name, shares[name]))
        larger = next((cut for cut in kind.cuts if cut > shares[name]), WHOLE + 1)
        now = _work(problem, name, kind.name, shares[name])
        fits = sum(shares.values()) - shares[name] + larger <= WHOLE
        if fits and _work(problem, name, kind.name, larger) < now * MIN_GAIN:
            shares[name] = larger
        else:
            growing.discard(name)
    return shares


def _least_share(problem: Problem, name: str, kind: Kind) -> int | None:
    slo = problem.model(name).slo
    for share in kind.cuts:
        slowdown = median_slowdown(problem, name, kind, share)
        curve = [slowdown * latency for latency in latency_curve(problem, name, kind.name, share)]
        if smallest_batches([RoundShare(curve, problem.rates[name], slo)]) is not None:
            return share
    return None
