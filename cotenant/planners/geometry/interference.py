"""How much neighbours may slow a model, before it is known who they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.geometry.modes import Mode, PartitionSize
from cotenant.predictors import Load

MAX_COLOCATED_PARTITIONS = 3  # partitions beside one, at most
MAX_COLOCATED_CASES = 60  # neighbours that are all looked at; of more, the `WORST_CASES` that slow one model most
WORST_CASES = 10

MILDEST_CASES = 5  # neighbours that slow one model least, which are tried on the others
TRIED_BATCHES = (1, 4, 16, 64)  # of batches that are tried where least is asked for

Batches = Mapping[tuple[int, int], int]  # by slot and model


def slowdown_factors(
    problem: Problem, slots: Sequence[PartitionSize], names: Sequence[str], singles: Sequence[Mode], quantile: float
) -> NDArray[np.float64]:
    """A factor on the latencies of each model on each slot: a quantile of the slowdowns that neighbours may cause.

    They and their victim run one row or the batch that carries most, whichever is worse: predictors need not think that
    larger batches disturb more.
    """
    batches = {(mode.slot, mode.models[0]): mode.batches[0] for mode in singles}
    factors = np.ones((len(slots), len(names)))
    beside = {s: _beside(problem, slots, names, batches, s) for s in {mode.slot for mode in singles}}
    for (s, i), batch in batches.items():
        if beside[s]:
            victims = [Load(names[i], problem.fleet[slots[s].kind].name, rows, slots[s].share) for rows in {1, batch}]
            caused = [max(problem.interference.slowdown(v, others) for v in victims) for others in beside[s]]
            factors[s, i] = np.quantile(caused, quantile)
    return factors


def least_slowdown_factors(
    problem: Problem, slots: Sequence[PartitionSize], names: Sequence[str], singles: Sequence[Mode]
) -> NDArray[np.float64]:
    """A factor on the latencies of each model on each slot: the least that any neighbour slows it.

    1 on whole devices and on MIG's instances. That more neighbours slow no less is taken for granted, and that who
    slows one model least is among the `MILDEST_CASES` that slow another least: enough to give up early, but no proof.
    """
    most = {(mode.slot, mode.models[0]): mode.batches[0] for mode in singles}
    rows = {each: sorted({min(n, batch) for n in (*TRIED_BATCHES, batch)}) for each, batch in most.items()}
    factors = np.ones((len(slots), len(names)))
    for s, slot in enumerate(slots):
        kind = problem.fleet[slot.kind]
        beside = [
            Load(names[j], kind.name, n, slots[t].share)
            for (t, j), batches in rows.items()
            if slots[t].kind == slot.kind and slots[t].share <= WHOLE - slot.share
            for n in batches
        ]
        own = [i for t, i in most if t == s]
        if not beside or not own or kind.geometry is not None:
            continue
        first = Load(names[own[0]], kind.name, most[s, own[0]], slot.share)
        mildest = sorted(beside, key=lambda other: problem.interference.slowdown(first, (other,)))[:MILDEST_CASES]
        for i in own:
            victims = [Load(names[i], kind.name, n, slot.share) for n in rows[s, i]]
            factors[s, i] = min(problem.interference.slowdown(v, (other,)) for v in victims for other in mildest)
    return factors


def _beside(
    problem: Problem, slots: Sequence[PartitionSize], names: Sequence[str], batches: Batches, s: int
) -> list[list[Load]]:
    """What may fill the rest of a device beside slot s: one, two or three partitions of a model."""
    slot = slots[s]
    found: list[list[Load]] = []
    for many in range(1, min(MAX_COLOCATED_PARTITIONS, (problem.fleet[slot.kind].max_partitions or WHOLE) - 1) + 1):
        room = (WHOLE - slot.share) // many
        fitting = {t for t, _ in batches if slots[t].kind == slot.kind and slots[t].share <= room}
        if fitting:
            t = max(fitting, key=lambda t: slots[t].share)
            found += [
                [Load(name, problem.fleet[slot.kind].name, rows, slots[t].share)] * many
                for j, name in enumerate(names)
                if (t, j) in batches
                for rows in {1, batches[t, j]}
            ]
    if len(found) <= MAX_COLOCATED_CASES:
        return found
    # Who is bad for one is bad for others.
    i = next(i for t, i in batches if t == s)
    victim = Load(names[i], problem.fleet[slot.kind].name, batches[s, i], slot.share)
    return sorted(found, key=lambda others: -problem.interference.slowdown(victim, others))[:WORST_CASES]
