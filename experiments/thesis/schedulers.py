"""Bind arriving pods to partitions of the thesis' two GPUs, by its scheduler and its three baselines (section 9.2).

The planners `score`, `min`, `max` and `roundrobin` plan for rates, all at once, and leave unserved what no device takes
within its target. Here pods arrive, run their queries and leave, objectives may be violated, and the cluster is what
the thesis has: an A30 that MIG cuts into one, two or four equal instances, and a V100 on which MPS limits pods to
parts. The scores are those of the planner.

- score: section 8.3. An empty A30 is cut anew; on the V100 a pod is limited to the smallest of quarter, half and whole
  that is expected to meet its objective. Scores are whole numbers, as Kubernetes has them; ties are broken at random.
- min: NVIDIA's device plugin hands out the A30's quarters, and the V100 as a whole, to one pod each, limited to a
  quarter of it. Others wait.
- max: it hands out both GPUs as a whole. Others wait.
- roundrobin: quarters of both GPUs in turn; n pods on a quarter are limited to 1/n of it each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from cotenant.planners.score import Pod as ScoredPod
from cotenant.planners.score import partition_score
from experiments.thesis.matrices import A30, PARTS, V100, Matrices

QUARTERS = 4


class Pod(msgspec.Struct, frozen=True):
    """Describe a pod. workload: index; objective: queries/s; queries: to run; arrival: seconds."""

    number: int
    workload: int
    objective: float
    queries: float
    arrival: float


class Placement(msgspec.Struct, frozen=True):
    """Say where a pod goes. parts: equal parts of the GPU of which it has one, by MIG on the A30 and as its limit on
    the V100; slot: which one, on the A30; chunk: of round robin, whose pods share it by limits."""

    gpu: str
    parts: int
    slot: int = 0
    chunk: int | None = None


Bound = Sequence[tuple[Pod, Placement]]
Scheduler = Callable[[Pod, Bound, Matrices, random.Random], Placement | None]


def beside(pod: Pod, placement: Placement, bound: Bound) -> list[Pod]:
    """Return the pods in the same partition: an instance of the A30, or all of the V100."""
    return [
        other
        for other, place in bound
        if other.number != pod.number
        and place.gpu == placement.gpu
        and (place.gpu == V100 or place.slot == placement.slot)
    ]


def by_score(pod: Pod, bound: Bound, known: Matrices, rng: random.Random) -> Placement:
    """Place by the thesis' scores; it never waits."""
    layout = next((place.parts for _, place in bound if place.gpu == A30), None)
    places = [Placement(A30, layout, slot) for slot in range(layout)] if layout else [Placement(A30, n) for n in PARTS]
    on_v100 = [(other, place) for other, place in bound if place.gpu == V100]
    others = [other.workload for other, _ in on_v100]
    enough = [n for n in PARTS if known.beside(pod.workload, V100, n, others) >= pod.objective]
    places.append(Placement(V100, max(enough, default=1)))
    scores = [int(_score(pod, place, bound, known)) for place in places]
    return rng.choice([place for place, score in zip(places, scores, strict=True) if score == max(scores)])


def _score(pod: Pod, place: Placement, bound: Bound, known: Matrices) -> float:
    """Return the score of a partition with the pod."""
    there = [(other, at) for other, at in bound if other in beside(pod, place, bound)]
    workloads = [other.workload for other, _ in there]
    scored = [ScoredPod(pod.objective, known.beside(pod.workload, place.gpu, place.parts, workloads))]
    for other, at in there:
        rest = [each.workload for each, _ in there if each.number != other.number] + [pod.workload]
        scored.append(ScoredPod(other.objective, known.beside(other.workload, at.gpu, at.parts, rest)))
    return partition_score(scored, utilisation(place.gpu, there, known))


def utilisation(gpu: str, running: Bound, of: Matrices) -> float:
    """Return the part of time in which any of these pods keeps a partition busy, for pods that take turns
    independently."""
    idle = 1.0
    for pod, place in running:
        idle *= 1 - of.busy(pod.workload, gpu, place.parts)
    return 1 - idle


def by_min(pod: Pod, bound: Bound, known: Matrices, rng: random.Random) -> Placement | None:
    """Place on a free quarter of the A30, or on the V100 where nobody is."""
    taken = {(place.gpu, place.slot) for _, place in bound}
    free = [Placement(A30, QUARTERS, slot) for slot in range(QUARTERS) if (A30, slot) not in taken]
    free += [Placement(V100, QUARTERS)] if (V100, 0) not in taken else []
    return rng.choice(free) if free else None


def by_max(pod: Pod, bound: Bound, known: Matrices, rng: random.Random) -> Placement | None:
    """Place on a GPU where nobody is."""
    free = [Placement(gpu, 1) for gpu in (A30, V100) if all(place.gpu != gpu for _, place in bound)]
    return rng.choice(free) if free else None


class RoundRobin:
    """Place on quarters in turn, whatever is there."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, pod: Pod, bound: Bound, known: Matrices, rng: random.Random) -> Placement:
        chunk = self._turn % (2 * QUARTERS)
        self._turn += 1
        if chunk < QUARTERS:
            return Placement(A30, QUARTERS, chunk, chunk)
        return Placement(V100, QUARTERS, chunk=chunk)


SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "score": lambda: by_score,
    "min": lambda: by_min,
    "roundrobin": RoundRobin,
    "max": lambda: by_max,
}
