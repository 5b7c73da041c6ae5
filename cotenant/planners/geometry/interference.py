"""Bound interference before it is known which models are co-located."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.geometry.modes import Mode, PartitionSize
from cotenant.predictors import Load

MAX_COLOCATED_PARTITIONS = 3  # beside one partition
MAX_COLOCATED_CASES = 60  # sets of co-located loads up to which all are evaluated
WORST_CASES = 10  # of more sets, those evaluated: the ones that slow one model most
MILDEST_CASES = 5  # co-located loads that slow one model least, which are evaluated for the others
TRIED_BATCHES = (1, 4, 16, 64)  # rows of a victim's and a co-located load's batch, in search of the least slowdown

Batches = Mapping[tuple[int, int], int]  # by slot and model


def slowdown_factors(
    problem: Problem, slots: Sequence[PartitionSize], names: Sequence[str], singles: Sequence[Mode], quantile: float
) -> NDArray[np.float64]:
    """Return a factor on the latencies of each model on each slot: a quantile of the possible slowdowns.

    Victim and co-located models run one row or the batch of highest throughput, whichever is worse: a predictor need
    not grow with the batch.
    """
    batches = {(mode.slot, mode.models[0]): mode.batches[0] for mode in singles}
    factors = np.ones((len(slots), len(names)))
    colocated = {s: _colocated_loads(problem, slots, names, batches, s) for s in {mode.slot for mode in singles}}
    for (s, i), batch in batches.items():
        if colocated[s]:
            victims = [Load(names[i], problem.fleet[slots[s].kind].name, rows, slots[s].share) for rows in {1, batch}]
            caused = [max(problem.interference.slowdown(v, loads) for v in victims) for loads in colocated[s]]
            factors[s, i] = np.quantile(caused, quantile)
    return factors


def least_slowdown_factors(
    problem: Problem, slots: Sequence[PartitionSize], names: Sequence[str], singles: Sequence[Mode]
) -> NDArray[np.float64]:
    """Return a factor on the latencies of each model on each slot: the least that any co-located model slows it.

    1 on whole devices and on MIG instances. Assumes that more partitions slow no less, and that the load that slows one
    model least is among the `MILDEST_CASES` that slow another least: enough to stop a search early, but no proof.
    """
    largest_batches = {(mode.slot, mode.models[0]): mode.batches[0] for mode in singles}
    tried_batches = {
        each: sorted({min(n, batch) for n in (*TRIED_BATCHES, batch)}) for each, batch in largest_batches.items()
    }
    factors = np.ones((len(slots), len(names)))
    for s, slot in enumerate(slots):
        kind = problem.fleet[slot.kind]
        colocated = [
            Load(names[j], kind.name, n, slots[t].share)
            for (t, j), batches in tried_batches.items()
            if slots[t].kind == slot.kind and slots[t].share <= WHOLE - slot.share
            for n in batches
        ]
        own = [i for t, i in largest_batches if t == s]
        if not colocated or not own or kind.geometry is not None:
            continue
        first = Load(names[own[0]], kind.name, largest_batches[s, own[0]], slot.share)
        mildest = sorted(colocated, key=lambda load: problem.interference.slowdown(first, (load,)))[:MILDEST_CASES]
        for i in own:
            victims = [Load(names[i], kind.name, n, slot.share) for n in tried_batches[s, i]]
            factors[s, i] = min(problem.interference.slowdown(v, (load,)) for v in victims for load in mildest)
    return factors


def _colocated_loads(
    problem: Problem, slots: Sequence[PartitionSize], names: Sequence[str], batches: Batches, s: int
) -> list[list[Load]]:
    """Return what may fill the rest of a device with slot s: one, two or three partitions of one model."""
    slot = slots[s]
    cases: list[list[Load]] = []
    for count in range(1, min(MAX_COLOCATED_PARTITIONS, (problem.fleet[slot.kind].max_partitions or WHOLE) - 1) + 1):
        largest_share = (WHOLE - slot.share) // count
        fitting = {t for t, _ in batches if slots[t].kind == slot.kind and slots[t].share <= largest_share}
        if fitting:
            t = max(fitting, key=lambda t: slots[t].share)
            cases += [
                [Load(name, problem.fleet[slot.kind].name, rows, slots[t].share)] * count
                for j, name in enumerate(names)
                if (t, j) in batches
                for rows in {1, batches[t, j]}
            ]
    if len(cases) <= MAX_COLOCATED_CASES:
        return cases
    # What slows one victim most is assumed to slow the others most.
    i = next(i for t, i in batches if t == s)
    victim = Load(names[i], problem.fleet[slot.kind].name, batches[s, i], slot.share)
    return sorted(cases, key=lambda loads: -problem.interference.slowdown(victim, loads))[:WORST_CASES]
