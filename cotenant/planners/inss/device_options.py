"""Prepare good ways to use a device: which partitions, which model on each, with which batch, and what that sustains.

An option does not depend on rates: a partition runs the batch that sustains most within its target under co-location,
so it serves any rate up to that. Whether a set of options serves given rates is then a matter of sums, some
microseconds for thousands of them; making them takes seconds for a kind, once for a problem.

Which options are good depends on what other devices leave to serve. So many such demands are drawn at random, and each
cutting pattern of the device is filled for each of them, partition by partition, with the model, or the two that share
it in time, whose demand it serves most of. The best patterns of each demand are kept.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations
from typing import Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement
from cotenant.core.profile import Profiles
from cotenant.core.units import WHOLE
from cotenant.planners.capacity import (
    PartitionDraft,
    fits_memory,
    footprint,
    latency_curve,
    partitions_with_batches,
    slowdown,
)
from cotenant.planners.problem import Problem
from cotenant.predictors import Interference, Load

MAX_CUTS = 20  # shares of a kind that are used, the others left out evenly
MAX_PATTERNS = 700  # cutting patterns of a device
DEMANDS, FILLED = 2000, 8_000_000  # demands drawn, and at most demands times patterns times contents
LEAST_DEMANDS = 200
KEPT = 4  # patterns for each demand
MAX_FILLINGS, MAX_OPTIONS = 6000, 3000  # for each kind: tried, and kept of them
WORKER_COST = 0.005  # of its value, that a pattern is worth less for each worker
# Percent of a round that the first of two models may have, and the part of what they sustain alone that two together
# sustain at least: where targets leave room for small batches only, sharing in time wastes much.
ROUND_PARTS, LEAST_TOGETHER = (20, 40, 60, 80), 0.8
ROUNDS = 10  # of the search for batches
MAX_PAIRED_MODELS = 20  # beyond which none share a partition: there are four ways for every two
SAMPLED = 300  # fillings that tell what co-location leaves of each model

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Value = TypeVar("Value")
Content = tuple[tuple[int, int], ...]  # of a partition: one model or two, and the percent of a round that each has
Filling = tuple[tuple[int, Content], ...]  # share (‰) and content of each partition, the largest share first


class Options(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Hold the options of a fleet's kinds.

    partitions: by option, with the rate that each placement sustains. kinds: the index of its kind, by option;
    capacities: requests/s, by option and model; workers: by option. sizes: what a device of the best kind
    sustains of each model alone, requests/s.
    """

    partitions: tuple[tuple[Partition, ...], ...]
    kinds: Ints
    capacities: Floats
    workers: Ints
    sizes: Floats

    def of_kind(self, kind: int) -> tuple[int, NDArray[np.float32]]:
        """Return the first option of a kind, and what all of them sustain, by model and option."""
        return self._by_kind.get(kind, (0, np.empty((len(self.sizes), 0), dtype=np.float32)))

    @functools.cached_property
    def _by_kind(self) -> dict[int, tuple[int, NDArray[np.float32]]]:
        found = {}
        for kind in np.unique(self.kinds).tolist():
            own = np.flatnonzero(self.kinds == kind)
            found[kind] = int(own[0]), np.ascontiguousarray(self.capacities[own].T, dtype=np.float32)
        return found


def options_of(problem: Problem) -> Options:
    """Return the options of a problem's fleet; from memory where models, profiles, interference and fleet are the same
    values as before."""
    fleet = tuple(msgspec.structs.replace(kind, count=None, price=None) for kind in problem.fleet)
    return _options(problem.models, fleet, _Same(problem.profiles), _Same(problem.interference))


def capacities_of(partitions: Sequence[Partition], models: Sequence[str]) -> Floats:
    """Return the requests/s that partitions sustain of each model. Their rates are not looked at."""
    sums = dict.fromkeys(models, 0.0)
    for partition in partitions:
        for placement in partition.placements:
            sums[placement.model] += placement.procs * placement.batch / placement.duty
    return np.array(list(sums.values()))


def sustained_partitions(problem: Problem, kind: Kind, filling: Filling) -> tuple[Partition, ...] | None:
    """Return the partitions of one device with the batches that sustain most; None where a model meets its target with
    no batch, or memory does not suffice.

    A slowdown that was assumed only rises, until it covers the one that results.
    """
    curves = [
        [_curve(problem, problem.models[model].name, kind.name, share) for model, _ in content]
        for share, content in filling
    ]
    rounds = [_round(problem, content) for _, content in filling]
    slow = [[1.0] * len(content) for _, content in filling]
    for _ in range(ROUNDS):
        batches = [
            [curve.best_within(most / factor) for curve, most, factor in zip(own, longest, factors, strict=True)]
            for own, longest, factors in zip(curves, rounds, slow, strict=True)
        ]
        if not all(all(own) for own in batches):
            return None
        loads = [
            [
                Load(problem.models[model].name, kind.name, batch, share)
                for (model, _), batch in zip(content, own, strict=True)
            ]
            for (share, content), own in zip(filling, batches, strict=True)
        ]
        actual = [[slowdown(problem, load, loads[:i] + loads[i + 1 :]) for load in own] for i, own in enumerate(loads)]
        if all(a <= s for own, old in zip(actual, slow, strict=True) for a, s in zip(own, old, strict=True)):
            break
        slow = [[max(a, s) for a, s in zip(own, old, strict=True)] for own, old in zip(actual, slow, strict=True)]
    else:
        return None
    needs = [
        (own[0].share, sum(footprint(problem, kind.name, load.model, load.batch) for load in own)) for own in loads
    ]
    if not fits_memory(kind, needs):
        return None
    latencies = [
        [factor * curve.seconds[load.batch - 1] for load, curve, factor in zip(own, known, factors, strict=True)]
        for own, known, factors in zip(loads, curves, actual, strict=True)
    ]
    return tuple(_partition(own, took) for own, took in zip(loads, latencies, strict=True))


def partitions_in_force(problem: Problem, kind: Kind, device: Device) -> tuple[Partition, ...] | None:
    """Return a device's partitions with what they sustain, without models that have no rate; None where they are not
    legal any more.

    Partitions of one worker get the batches that sustain most. On a device where several models share a partition in
    time, batches stay: which are best depends on the rates.
    """
    drafts, batches = [], []
    for partition in device.partitions:
        asked = [p for p in partition.placements if problem.rates.get(p.model)]
        if partition.share not in kind.cuts:
            return None
        if asked:
            drafts.append(
                PartitionDraft(partition.share, {p.model: 0.0 for p in asked}, {p.model: p.procs for p in asked})
            )
            batches.append([p.batch for p in asked])
    if not drafts or sum(draft.share for draft in drafts) > WHOLE:
        return None
    names = [model.name for model in problem.models]
    if all(list(draft.procs.values()) == [1] for draft in drafts):
        return sustained_partitions(
            problem, kind, tuple((draft.share, _alone(names.index(next(iter(draft.rates))))) for draft in drafts)
        )
    if any(
        not latency_curve(problem, model, kind.name, draft.share, procs)[batch - 1 : batch]
        for draft, own in zip(drafts, batches, strict=True)
        for (model, procs), batch in zip(draft.procs.items(), own, strict=True)
    ):
        return None
    return partitions_with_batches(problem, kind, drafts, batches)


def cutting_patterns(kind: Kind) -> list[tuple[int, ...]]:
    """Return the ways to cut a device of which no more partition fits into the rest, largest share first; of fewer
    shares where there would be too many."""
    shares = MAX_CUTS
    while True:
        cuts = _thinned(kind.cuts, shares)
        found: list[tuple[int, ...]] = []
        for pattern in _patterns(kind, cuts, ()):
            found.append(pattern)
            if len(found) > MAX_PATTERNS:
                break
        else:
            return found
        shares -= 2


class _Same(msgspec.Struct, Generic[Value], frozen=True):
    """Make a value comparable by identity, and keep it alive meanwhile."""

    value: Value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


class _Curve(msgspec.Struct, frozen=True):
    """Hold the seconds of batches 1, 2, … alone, and the batch with the best throughput among the first n."""

    seconds: tuple[float, ...]
    longest: tuple[float, ...]  # of batches up to each
    best: tuple[int, ...]

    def best_within(self, seconds: float) -> int:
        """Return the batch that sustains most of those that take at most so long; 0 where none does."""
        return self.best[bisect_right(self.longest, seconds)]


@functools.lru_cache(1 << 12)
def _best_batches(seconds: tuple[float, ...]) -> _Curve:
    best, most = [0], 0.0
    for batch, latency in enumerate(seconds, 1):
        best.append(batch if batch / latency >= most else best[-1])
        most = max(most, batch / latency)
    return _Curve(seconds, tuple(accumulate(seconds, max)), tuple(best))


def _curve(problem: Problem, model: str, kind: str, share: int) -> _Curve:
    return _best_batches(latency_curve(problem, model, kind, share))


def _alone(model: int) -> Content:
    return ((model, 100),)


def _round(problem: Problem, content: Content) -> list[float]:
    """Return the seconds that a batch of each model of a partition may take: its part of the longest round D that with
    a batch of any of them is within its target, D · (1 + part) ≤ SLO."""
    longest = min(problem.models[model].slo / (1 + percent / 100) for model, percent in content)
    return [longest * percent / 100 for _, percent in content]


def _partition(loads: Sequence[Load], latencies: Sequence[float]) -> Partition:
    """Return a partition with the rates that it sustains."""
    duty = sum(latencies)
    return Partition(
        share=loads[0].share,
        placements=tuple(
            Placement(model=load.model, batch=load.batch, rate=load.batch / duty, duty=duty, latency=latency)
            for load, latency in zip(loads, latencies, strict=True)
        ),
    )


@functools.lru_cache(8)
def _options(
    models: tuple[Model, ...], fleet: tuple[Kind, ...], profiles: _Same[Profiles], interference: _Same[Interference]
) -> Options:
    problem = Problem(models=models, rates={}, fleet=fleet, profiles=profiles.value, interference=interference.value)
    names = [model.name for model in models]
    partitions: list[tuple[Partition, ...]] = []
    kinds: list[int] = []
    sizes = np.zeros(len(models))
    for index, kind in enumerate(fleet):
        made: dict[Filling, tuple[Partition, ...]] = {}
        for filling in _fillings(problem, kind):
            # Where memory does not suffice, or a model misses its target beside others, with fewer partitions.
            while filling and filling not in made:
                built = sustained_partitions(problem, kind, filling)
                if built is not None:
                    made[filling] = built
                else:
                    filling = filling[:-1]
        kept = _undominated(tuple(made.values()), names)[:MAX_OPTIONS]
        partitions += kept
        kinds += [index] * len(kept)
        sizes = np.maximum(sizes, _sustained_alone(problem, kind, kind.cuts[-1]))
    capacities = np.array([capacities_of(each, names) for each in partitions]).reshape(-1, len(models))
    sizes = np.maximum(sizes, capacities.max(axis=0, initial=0.0))
    return Options(
        tuple(partitions),
        np.array(kinds, dtype=np.int64),
        capacities,
        np.array([sum(len(part.placements) for part in each) for each in partitions], dtype=np.int64),
        sizes,
    )


def _undominated(options: Sequence[tuple[Partition, ...]], names: Sequence[str]) -> list[tuple[Partition, ...]]:
    """Return the options of a kind of which no other sustains as much of every model, and more of one."""
    capacities = np.array([capacities_of(each, names) for each in options]).reshape(-1, len(names))
    kept = []
    for option, own in zip(options, capacities, strict=True):
        as_much = capacities[(capacities >= own).all(axis=1)]
        if not (as_much > own).any():
            kept.append(option)
    return kept


class _Uses(msgspec.Struct, frozen=True):
    """Hold what a partition of one share may run. models: the two of each content, the same twice where it is alone;
    rates: requests/s that each sustains alone on the device, 0 for the second of one."""

    contents: list[Content]
    models: tuple[Ints, Ints]
    rates: tuple[Floats, Floats]


def _sustained_alone(problem: Problem, kind: Kind, share: int) -> Floats:
    """Return the requests/s that models sustain alone, by model."""
    curves = [_curve(problem, model.name, kind.name, share) for model in problem.models]
    batches = [curve.best_within(model.slo / 2) for curve, model in zip(curves, problem.models, strict=True)]
    rates = [batch and batch / curve.seconds[batch - 1] for curve, batch in zip(curves, batches, strict=True)]
    return np.array(rates, dtype=float)


def _uses(problem: Problem, kind: Kind, share: int) -> _Uses:
    """Return what a partition of a share may run: a model, or two that share it in time where that wastes little."""
    most = _sustained_alone(problem, kind, share)
    able = np.flatnonzero(most).tolist()
    contents = [_alone(model) for model in able]
    rates = [(float(most[model]), 0.0) for model in able]
    for first, second in combinations(able if len(able) <= MAX_PAIRED_MODELS else (), 2):
        curves = [_curve(problem, problem.models[model].name, kind.name, share) for model in (first, second)]
        for percent in ROUND_PARTS:
            content = (first, percent), (second, 100 - percent)
            batches = [
                curve.best_within(seconds) for curve, seconds in zip(curves, _round(problem, content), strict=True)
            ]
            if not all(batches):
                continue
            duty = sum(curve.seconds[batch - 1] for curve, batch in zip(curves, batches, strict=True))
            if batches[0] / most[first] + batches[1] / most[second] >= LEAST_TOGETHER * duty:
                contents.append(content)
                rates.append((batches[0] / duty, batches[1] / duty))
    return _Uses(
        contents,
        (
            np.array([content[0][0] for content in contents], dtype=np.int64),
            np.array([content[-1][0] for content in contents], dtype=np.int64),
        ),
        (np.array([own for own, _ in rates]), np.array([own for _, own in rates])),
    )


def _fillings(problem: Problem, kind: Kind) -> list[Filling]:
    """Return the patterns of a kind with what they run, those that suit most demands first."""
    patterns = cutting_patterns(kind)
    uses = {
        share: _uses(problem, kind, share) for share in sorted({share for pattern in patterns for share in pattern})
    }
    alone = np.zeros(len(problem.models))
    for share in uses:
        alone = np.maximum(alone, _sustained_alone(problem, kind, share))
    if not alone.any():
        return []
    found = _suitable(patterns, uses, alone, np.ones(len(alone)))
    if problem.interference.interferes:  # a second time, with what co-location leaves of each model
        sums = np.zeros((2, len(alone)))
        for filling in found[:SAMPLED]:
            for partition, (share, content) in zip(
                sustained_partitions(problem, kind, filling) or (), filling, strict=False
            ):
                use = uses[share]
                index = use.contents.index(content)
                for placement, (model, _), rates in zip(partition.placements, content, use.rates, strict=False):
                    sums[:, model] += placement.rate, rates[index]
        slowed = np.where(sums[1] > 0, sums[0] / np.maximum(sums[1], 1e-9), 1.0)
        found = _suitable(patterns, uses, alone * slowed, slowed)
    return found


def _suitable(
    patterns: Sequence[tuple[int, ...]], uses: dict[int, _Uses], whole: Floats, slowed: Floats
) -> list[Filling]:
    """Return the patterns that serve most of demands drawn at random, and what each partition runs.

    uses: by share. whole: what a device sustains of each model, requests/s; slowed: the part that co-location leaves.
    """
    contents = max(len(use.contents) for use in uses.values())
    count = int(np.clip(FILLED // (len(patterns) * contents), LEAST_DEMANDS, DEMANDS))
    rng = np.random.default_rng(0)
    worth = np.where(whole > 0, 1 / np.maximum(whole, 1e-9), 0.0) * np.exp(
        0.2 * rng.standard_normal((count, len(whole)))
    )
    spread = rng.choice((0.2, 0.5, 1.0), (count, 1))
    parts = rng.gamma(np.broadcast_to(spread, (count, len(whole))))
    demand = whole * parts / np.maximum(parts.sum(axis=1, keepdims=True), 1e-9) * rng.uniform(0.4, 2.5, (count, 1))
    worths = {share: [worth[:, models] for models in use.models] for share, use in uses.items()}
    values = np.zeros((len(patterns), count))
    chosen: list[list[Ints]] = []
    rows = np.arange(count)
    for n, pattern in enumerate(patterns):
        left, picked, workers = demand.copy(), [], np.zeros(count)
        for share in pattern:
            use = uses[share]
            if not use.contents:
                picked.append(np.full(count, -1))
                continue
            gains = np.zeros((count, len(use.contents)))
            for models, rates, own in zip(use.models, use.rates, worths[share], strict=True):
                most = rates * slowed[models]
                # What nobody asks for counts a little, so that no partition is left empty.
                gains += own * (np.minimum(left[:, models], most) + 1e-3 * most)
            content = gains.argmax(axis=1)
            values[n] += gains[rows, content]
            for models, rates in zip(use.models, use.rates, strict=True):
                model = models[content]
                left[rows, model] = np.maximum(0.0, left[rows, model] - (rates * slowed[models])[content])
            workers += 1 + (use.rates[1][content] > 0)
            picked.append(content)
        values[n] *= 1 - WORKER_COST * workers
        chosen.append(picked)
    best = np.argsort(-values, axis=0, kind="stable")[:KEPT]
    times: Counter[Filling] = Counter()
    for row in rows.tolist():
        for n in best[:, row].tolist():
            filling = [
                (share, uses[share].contents[content])
                for share, content in zip(patterns[n], (each[row] for each in chosen[n]), strict=True)
                if content >= 0
            ]
            times[tuple(sorted(filling, key=lambda part: (-part[0], part[1])))] += 1
    return [filling for filling, _ in times.most_common(MAX_FILLINGS)]


def _patterns(kind: Kind, cuts: Sequence[int], chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the patterns that begin with these shares."""
    full = True
    if len(chosen) < (kind.max_partitions or WHOLE):
        for share in cuts:
            if chosen and share > chosen[-1]:
                break
            more = (*chosen, share)
            if sum(more) <= WHOLE and fits_memory(kind, [(each, 0) for each in more]):
                full = False
                yield from _patterns(kind, cuts, more)
    if full and chosen:
        yield chosen


def _thinned(cuts: Sequence[int], count: int) -> Sequence[int]:
    """Return at most so many of some shares, evenly spaced, with the largest."""
    if len(cuts) <= count:
        return cuts
    return [cuts[round((n + 1) * len(cuts) / count) - 1] for n in range(count)]
