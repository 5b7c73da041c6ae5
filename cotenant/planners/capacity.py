"""Compute the rate that a partition sustains: the arithmetic that every planner and the check share.

A partition works in rounds. In a round each of its models runs one batch, so a round lasts D = Σ L_m(b_m). It keeps up
while b_m / D ≥ r_m, and a request that just missed its batch waits one round and then its own batch, so the target is
met while D + L_m(b_m) ≤ SLO_m (docs/concepts.md; alone on a partition that is gpulet's 2 · L(b) ≤ SLO).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import msgspec

from cotenant.core import mig
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.predictors import Load

ROUNDING_TOLERANCE = 1e-9  # relative tolerance of equality for sums of floats (rates, rows, seconds)

# Maximum batch over the mean rows of a round, and the maximum fraction of the sustainable rate that this may cost the
# other models of the partition.
BURST_FACTOR = 3.0
MAX_BURST_COST = 0.05


class RoundShare(msgspec.Struct, frozen=True):
    """Describe one model's part of a round. curve: seconds of batches 1, 2, …, slowdown included; rate: requests/s."""

    curve: Sequence[float]
    rate: float
    slo: float


def latency_curve(problem: Problem, model: str, kind: str, share: int, procs: int = 1) -> tuple[float, ...]:
    """Return the seconds of batches 1, 2, … up to the largest, alone on a share (‰); () where nothing was profiled."""
    profile = problem.profile(model, kind)
    if profile is None:
        return ()
    return profile.curve(share, procs)[: problem.model(model).max_batch]


@lru_cache(1 << 14)
def max_throughput_batch(curve: tuple[float, ...], slo: float) -> tuple[int, float]:
    """Return the batch that sustains most alone on a partition within `slo`, and its requests/s; (0, 0.0) if none."""
    batch, rate = 0, 0.0
    for rows, latency in enumerate(curve, 1):
        if 2 * latency > slo:
            break
        if rows / latency >= rate:
            batch, rate = rows, rows / latency
    return batch, rate


def largest_slowdown(curve: Sequence[float], rate: float, slo: float) -> float:
    """Return the slowdown up to which a model alone on a partition keeps up within its target; 0 where it never does.

    It is the largest f for which some batch b has b ≥ rate · f · L(b) and 2 · f · L(b) ≤ slo, as `smallest_batches`
    asks of one model.
    """
    limits = (
        min(rows / (rate * latency * (1 - ROUNDING_TOLERANCE)) if rate else math.inf, slo / (2 * latency))
        for rows, latency in enumerate(curve, 1)
    )
    return max(limits, default=0.0)


def knee_share(most: Mapping[int, float]) -> int:
    """Return the share (‰) with the best return for a model: gpulet's p_eff (section 4.3, Figures 4 and 9).

    most: requests/s by share, ascending. As in the paper's program it is the upper end of the step from one legal share
    to the next that adds most per share, among those that add at least 5 %; the smallest share where none does. Unlike
    there, the step to the whole device counts too.
    """
    shares = list(most)
    steps = [(most[b] - most[a]) / (b - a) if most[b] >= 1.05 * most[a] else 0.0 for a, b in pairwise(shares)]
    steepest = max(steps, default=0.0)
    return shares[steps.index(steepest) + 1] if steepest else shares[0]


def smallest_batches(works: Sequence[RoundShare]) -> tuple[int, ...] | None:
    """Return the smallest batches that keep up within every target; None where none do.

    Longer rounds need larger batches and larger batches make longer rounds, so the smallest batches that keep up are
    the least fixed point of b_m = ⌈r_m · D(b)⌉. Every other choice is at least as large in each model, and the targets
    only get harder with it: if these batches do not hold them, none do.
    """
    batches = [1] * len(works)
    if any(not work.curve for work in works):
        return None
    length = sum(work.curve[0] for work in works)
    while True:
        grew = False
        for i, work in enumerate(works):
            if length + work.curve[batches[i] - 1] > work.slo:
                return None
            need = math.ceil(work.rate * length * (1 - ROUNDING_TOLERANCE))
            if need > len(work.curve):
                return None
            if need > batches[i]:
                batches[i] = need
                grew = True
        if not grew:
            return tuple(batches)
        length = sum(work.curve[batch - 1] for work, batch in zip(works, batches, strict=True))


def max_scale_batches(works: Sequence[RoundShare]) -> tuple[int, ...] | None:
    """Return the batches that sustain the largest multiple of the rates within every target; None where none keep up.

    Real arrivals come in bursts, and the dispatcher fills a batch only as far as requests wait: what a larger batch
    adds is room. From the smallest batches on, the model that limits the multiple must grow for it to grow.
    """
    best = smallest_batches(works)
    if best is None:
        return None
    curves, rates, slos = [w.curve for w in works], [w.rate for w in works], [w.slo for w in works]
    batches = list(best)
    took = [curve[batch - 1] for curve, batch in zip(curves, batches, strict=True)]
    most = 0.0
    while True:  # as `_holds` and `_multiples` say, in one go: decisions of milliseconds depend on it
        length = sum(took)
        if any(length + own > slo for own, slo in zip(took, slos, strict=True)):
            return best
        multiple, limiting = math.inf, 0
        for i, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
            least = rate * length
            if least and batch / least < multiple:
                multiple, limiting = batch / least, i
        if multiple > most * (1 + ROUNDING_TOLERANCE):
            most, best = multiple, tuple(batches)
        if batches[limiting] == len(curves[limiting]):
            return best
        batches[limiting] += 1
        took[limiting] = curves[limiting][batches[limiting] - 1]


def headroom_batches(works: Sequence[RoundShare]) -> tuple[int, ...] | None:
    """Return `max_scale_batches`, with larger batches for bursts of models whose rows cost next to nothing.

    A model with short batches among long ones gets many requests in a round, and more than the average in many.
    """
    batches = max_scale_batches(works)
    if batches is None:
        return None
    least = max(1.0, min(_multiples(works, batches)) * (1 - MAX_BURST_COST))
    for i, work in enumerate(works):
        while batches[i] < len(work.curve) and _multiples(works, batches)[i] < BURST_FACTOR:
            larger = _grown(batches, i)
            if not _holds(works, larger) or min(_multiples(works, larger)) < least:
                break
            batches = larger
    return batches


def _holds(works: Sequence[RoundShare], batches: Sequence[int]) -> bool:
    length = sum(work.curve[batch - 1] for work, batch in zip(works, batches, strict=True))
    return all(length + work.curve[batch - 1] <= work.slo for work, batch in zip(works, batches, strict=True))


def _multiples(works: Sequence[RoundShare], batches: Sequence[int]) -> list[float]:
    """Return the multiple of its rate that each model sustains in such rounds."""
    length = sum(work.curve[batch - 1] for work, batch in zip(works, batches, strict=True))
    rows = [work.rate * length for work in works]  # 0 for a rate next to nothing
    return [batch / least if least else math.inf for least, batch in zip(rows, batches, strict=True)]


def _grown(batches: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*batches[:index], batches[index] + 1, *batches[index + 1 :])


def slowdown(problem: Problem, victim: Load, colocated: Sequence[Sequence[Load]]) -> float:
    """Return the slowdown of a batch by the other partitions of its device, each running its worst model."""

    def alone_with(load: Load) -> float:
        return problem.interference.slowdown(victim, (load,))

    if not colocated:
        return 1.0
    worst = [max(loads, key=alone_with) if len(loads) > 1 else loads[0] for loads in colocated if loads]
    return problem.interference.slowdown(victim, worst)


def median_slowdown(problem: Problem, model: str, kind: Kind, share: int) -> float:
    """Return the median slowdown of a model on a share (‰) over the other models of the problem.

    Both run their largest batches within their targets, the other on the rest of the device. Planners assume it until
    they know which models are co-located; `batched_partitions` then computes the actual slowdown.
    """
    rest = max((cut for cut in kind.cuts if cut <= WHOLE - share), default=0)
    if not problem.interference.interferes or rest == 0:
        return 1.0

    def load(name: str, share: int) -> Load | None:
        batch, _ = max_throughput_batch(latency_curve(problem, name, kind.name, share), problem.model(name).slo)
        return Load(name, kind.name, batch, share) if batch else None

    victim = load(model, share)
    others = [load(name, rest) for name, rate in problem.rates.items() if rate > 0 and name != model]
    if victim is None:
        return 1.0
    slowdowns = sorted(problem.interference.slowdown(victim, (other,)) for other in others if other is not None)
    return slowdowns[len(slowdowns) // 2] if slowdowns else 1.0


class PartitionDraft(msgspec.Struct):
    """Describe a partition while it is being planned.

    rates: requests/s by model. procs: workers of a model, where not 1. batches: by model, where the planner decides on
    them itself.
    """

    share: int
    rates: dict[str, float]
    procs: dict[str, int] = {}
    batches: dict[str, int] = {}


class DeviceDraft(msgspec.Struct):
    """A device while it is being planned; `count` of them that are alike."""

    kind: Kind
    cuts: list[PartitionDraft]
    count: int = 1

    @property
    def free(self) -> int:
        return WHOLE - sum(cut.share for cut in self.cuts)


def batched_partitions(
    problem: Problem, kind: Kind, cuts: Sequence[PartitionDraft], *, full: bool = False
) -> tuple[Partition, ...] | None:
    """Return the partitions of one device with batches that meet every target under co-location and fit its memory.

    None where there are none. full: the batches with the most headroom, rather than the smallest ones.

    Slowdowns and batches depend on each other: assumed slowdowns only rise from one iteration to the next, until they
    cover those that result.
    """
    choose = headroom_batches if full else smallest_batches
    procs = [[cut.procs.get(model, 1) for model in cut.rates] for cut in cuts]
    curves = [
        [latency_curve(problem, model, kind.name, cut.share, n) for model, n in zip(cut.rates, own, strict=True)]
        for cut, own in zip(cuts, procs, strict=True)
    ]
    slow = [[1.0] * len(cut.rates) for cut in cuts]
    for _ in range(20):
        chosen: list[tuple[int, ...]] = []
        for cut, own, workers, factors in zip(cuts, curves, procs, slow, strict=True):
            works = [
                RoundShare(
                    known if factor == 1 else [factor * latency for latency in known],
                    rate / n,
                    problem.model(model).slo,
                )
                for (model, rate), known, n, factor in zip(cut.rates.items(), own, workers, factors, strict=True)
            ]
            batches = choose(works)
            if batches is None:
                return None
            chosen.append(batches)
        loads = [
            [Load(model, kind.name, batch, cut.share) for model, batch in zip(cut.rates, batches, strict=True)]
            for cut, batches in zip(cuts, chosen, strict=True)
        ]
        actual = [
            [slowdown(problem, victim, loads[:i] + loads[i + 1 :]) for victim in own] for i, own in enumerate(loads)
        ]
        if all(a <= s for own, factors in zip(actual, slow, strict=True) for a, s in zip(own, factors, strict=True)):
            break
        slow = [[max(a, s) for a, s in zip(own, old, strict=True)] for own, old in zip(actual, slow, strict=True)]
    else:
        return None
    latencies = [
        [factor * known[batch - 1] for factor, known, batch in zip(factors, own, batches, strict=True)]
        for batches, own, factors in zip(chosen, curves, actual, strict=True)
    ]
    return _built(problem, kind, cuts, chosen, latencies)


def partitions_with_batches(
    problem: Problem, kind: Kind, cuts: Sequence[PartitionDraft], chosen: Sequence[Sequence[int]]
) -> tuple[Partition, ...] | None:
    """Return the partitions of one device with these batches; None where they miss a target or exceed memory."""
    loads = [
        [Load(model, kind.name, batch, cut.share) for model, batch in zip(cut.rates, batches, strict=True)]
        for cut, batches in zip(cuts, chosen, strict=True)
    ]
    latencies = []
    for i, (cut, own) in enumerate(zip(cuts, loads, strict=True)):
        procs = [cut.procs.get(load.model, 1) for load in own]
        beside = loads[:i] + loads[i + 1 :]
        took = [
            slowdown(problem, load, beside)
            * latency_curve(problem, load.model, kind.name, cut.share, n)[load.batch - 1]
            for load, n in zip(own, procs, strict=True)
        ]
        duty = sum(took)
        for load, latency, n in zip(own, took, procs, strict=True):
            late = duty + latency > problem.model(load.model).slo
            if late or n * load.batch < cut.rates[load.model] * duty * (1 - ROUNDING_TOLERANCE):
                return None
        latencies.append(took)
    return _built(problem, kind, cuts, chosen, latencies)


def _built(
    problem: Problem,
    kind: Kind,
    cuts: Sequence[PartitionDraft],
    chosen: Sequence[Sequence[int]],
    latencies: Sequence[Sequence[float]],
) -> tuple[Partition, ...] | None:
    """Return the partitions of one device with these batches and latencies; None where memory or MIG placements forbid
    it."""
    made = tuple(
        Partition(
            share=cut.share,
            placements=tuple(
                Placement(
                    model=model,
                    batch=batch,
                    rate=rate,
                    duty=sum(own),
                    latency=latency,
                    procs=cut.procs.get(model, 1),
                )
                for (model, rate), batch, latency in zip(cut.rates.items(), batches, own, strict=True)
            ),
        )
        for cut, batches, own in zip(cuts, chosen, latencies, strict=True)
    )
    needs = [
        (cut.share, sum(p.procs * footprint(problem, kind.name, p.model, p.batch) for p in cut.placements))
        for cut in made
    ]
    return made if fits_memory(kind, needs) else None


def fits_memory(kind: Kind, needs: Sequence[tuple[int, int]]) -> bool:
    """Return whether a device has the memory, and the MIG placements, for partitions of (share in ‰, bytes)."""
    if sum(need for _, need in needs) > kind.memory:
        return False
    return kind.geometry is None or mig.placements_fit(kind.geometry, needs) is not None


def footprint(problem: Problem, kind: str, model: str, batch: int) -> int:
    """Return the bytes of one worker; 0 where the model was not profiled."""
    profile = problem.profile(model, kind)
    return 0 if profile is None else profile.memory(batch)


def fits_device(problem: Problem, kind: Kind, cuts: Sequence[PartitionDraft]) -> bool:
    return batched_partitions(problem, kind, cuts) is not None


def sorted_by_price(fleet: Sequence[Kind]) -> list[Kind]:
    """Return the kinds, cheapest first; those without a price last, in their order."""
    return sorted(fleet, key=lambda kind: math.inf if kind.price is None else kind.price)


def build_plan(problem: Problem, planner: str, bins: Sequence[DeviceDraft]) -> Plan:
    """Return the plan of these device drafts, each of which must be feasible, with its totals."""
    numbers: dict[str, int] = {}
    devices = []
    for bin_ in bins:
        if not any(cut.rates for cut in bin_.cuts):
            continue
        made = _partitions(problem, bin_)
        assert made is not None, "a planner combined partitions that do not fit"
        first = numbers.get(bin_.kind.name, 0)
        numbers[bin_.kind.name] = first + bin_.count
        devices += [Device(id=DeviceId(bin_.kind.name, first + n), partitions=made) for n in range(bin_.count)]
    return with_totals(Plan(planner=planner, objective="devices", devices=tuple(devices)), problem)


def _partitions(problem: Problem, draft: DeviceDraft) -> tuple[Partition, ...] | None:
    """Return the partitions of a device, with the planner's batches or those with the most headroom."""
    if all(cut.batches for cut in draft.cuts):
        chosen = [[cut.batches[model] for model in cut.rates] for cut in draft.cuts]
        return partitions_with_batches(problem, draft.kind, draft.cuts, chosen)
    return batched_partitions(problem, draft.kind, draft.cuts, full=True) or batched_partitions(
        problem, draft.kind, draft.cuts
    )


def with_totals(plan: Plan, problem: Problem) -> Plan:
    """Return the plan with its `unserved` rates, its scale and its cost for a problem."""
    carried = plan.rates()
    served = {model: carried.get(model, 0.0) for model in problem.rates}
    unserved = {
        model: asked - served[model]
        for model, asked in problem.rates.items()
        if asked - served[model] > ROUNDING_TOLERANCE * asked
    }
    scale = min((served[model] / asked for model, asked in problem.rates.items() if asked), default=1.0)
    if abs(scale - 1) <= ROUNDING_TOLERANCE:
        scale = 1.0
    prices = [problem.kind(device.kind).price for device in plan.devices]
    cost = None if all(price is None for price in prices) else sum(price or 0.0 for price in prices)
    return msgspec.structs.replace(plan, unserved=unserved, scale=scale, cost_per_hour=cost)
