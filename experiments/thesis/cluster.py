"""Simulate the thesis' cluster in chapter 9: an A30 and a V100, pods that arrive, run their queries and leave.

What the text leaves open is chosen here, and said in docs/reproduction.md:

- queries: those that take 11 to 30 s on a whole GPU, which for its workloads are 270 to 22,000, as the text has it;
- a pod first loads its model and data for a minute, on its partition but disturbing nobody;
- a pod that is put beside one that it cannot run with fails when it has loaded; others keep 5 % of what they reach on a
  whole GPU, whoever is beside them;
- the drawn GPU of an objective: the text's SLO_4 and SLO_1 are of "the GPU", and the workload has not been placed yet.

Rates are what `matrices` says, at every moment for the pods that run then; a pod's achieved queries/s are its queries
over the time that they took.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import msgspec

from experiments.thesis.matrices import A30, MAX_LOST, V100, Matrices
from experiments.thesis.schedulers import SCHEDULERS, Placement, Pod, beside, utilisation

GPUS = (A30, V100)
RATED_WATTS = {A30: 165.0, V100: 250.0}  # by NVIDIA's data sheets, of the PCIe cards
IDLE = 0.15  # of its rated power, of a GPU that runs nothing, but holds a context
BATCH = 8  # pods that are deployed at once
SPREAD = 5.0  # seconds over which those of a batch arrive
SPAN = 900.0  # seconds over which batches are spread
LOADING = 60.0  # seconds
RECONFIGURING = 5.0  # seconds to cut the A30 anew
RUNNING = (11.0, 30.0)  # seconds that a pod's queries take on a whole GPU
OBJECTIVES = {"low": 4, "high": 1}  # parts of a GPU on which an objective is what a workload reaches
RANGE = (0.8, 1.2)  # times that
LEAST = 1 - MAX_LOST  # of its rate on a whole GPU, that a pod keeps beside others
ROUNDING = 1e-6  # seconds of queries that are left when a pod ends


class Outcome(msgspec.Struct, frozen=True):
    """Say how a pod ended. achieved: queries/s; None where it failed."""

    pod: Pod
    achieved: float | None

    @property
    def difference(self) -> float | None:
        """Return achieved less objective, over the objective."""
        return None if self.achieved is None else self.achieved / self.pod.objective - 1

    @property
    def violated(self) -> bool:
        return self.difference is None or self.difference < 0


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what one experiment with one scheduler came to. seconds: its duration; busy: mean part of time in which a
    GPU ran something; joules: of both GPUs."""

    outcomes: tuple[Outcome, ...]
    seconds: float
    busy: float
    joules: float

    @property
    def violations(self) -> int:
        return sum(outcome.violated for outcome in self.outcomes)

    @property
    def errors(self) -> int:
        return sum(outcome.achieved is None for outcome in self.outcomes)


def make_pods(
    count: int, objectives: str, of: Matrices, rng: random.Random, between: tuple[float, float] = RANGE
) -> list[Pod]:
    """Draw the pods of an experiment. objectives: "low" or "high"; between: times what the workload reaches."""
    batches = -(-count // BATCH)
    pods = []
    for index in range(count):
        workload, gpu = rng.randrange(len(of.rates[A30])), rng.choice(GPUS)
        pods.append(
            Pod(
                number=index,
                workload=workload,
                objective=rng.uniform(*between) * of.alone(workload, gpu, OBJECTIVES[objectives]),
                queries=rng.uniform(*RUNNING) * of.alone(workload, gpu, 1),
                arrival=index // BATCH * SPAN / batches + rng.uniform(0, SPREAD),
            )
        )
    return sorted(pods, key=lambda pod: pod.arrival)


class _Cluster:
    """Run pods; time is in seconds, and advances from event to event."""

    def __init__(self, scheduler: str, truth: Matrices, known: Matrices, power: tuple[float, float], seed: int) -> None:
        self._bind = SCHEDULERS[scheduler]()
        self._truth, self._known, self._power = truth, known, power
        self._rng = random.Random(seed)  # noqa: S311
        self._now = self._joules = self._busy = 0.0
        self._bound: list[tuple[Pod, Placement]] = []
        self._started: dict[Pod, float] = {}
        self._left: dict[Pod, float] = {}  # queries of pods that run
        self._loading: list[tuple[float, int, Pod]] = []
        self._failing: set[Pod] = set()
        self._a30_parts: int | None = None
        self._outcomes: dict[Pod, Outcome] = {}

    def run(self, pods: Sequence[Pod]) -> Experiment:
        arrivals, waiting = list(pods), list[Pod]()
        while len(self._outcomes) < len(pods):
            rates = self._rates()
            ends = [self._now + self._left[pod] / rate for pod, rate in rates.items()]
            events = [*ends, *(at for at, _, _ in self._loading[:1]), *(pod.arrival for pod in arrivals[:1])]
            self._advance(min(events), rates)
            while arrivals and arrivals[0].arrival <= self._now:
                waiting.append(arrivals.pop(0))
            while waiting and self._place(waiting[0]):
                waiting.pop(0)
        return Experiment(
            outcomes=tuple(self._outcomes[pod] for pod in pods),
            seconds=self._now,
            busy=self._busy / self._now,
            joules=self._joules,
        )

    def _place(self, pod: Pod) -> bool:
        """Bind a pod; return False where it has to wait."""
        place = self._bind(pod, self._bound, self._known, self._rng)
        if place is None:
            return False
        delay = LOADING
        if place.gpu == A30 and place.parts != self._a30_parts:
            self._a30_parts, delay = place.parts, delay + RECONFIGURING
        others = beside(pod, place, self._bound)
        if not all(self._truth.together(place.gpu, pod.workload, other.workload) for other in others):
            self._failing.add(pod)
        self._bound.append((pod, place))
        heapq.heappush(self._loading, (self._now + delay, pod.number, pod))
        return True

    def _rates(self) -> dict[Pod, float]:
        """Return the queries/s of the pods that run now."""
        running = [(pod, place) for pod, place in self._bound if pod in self._left]
        rates = {}
        for pod, place in running:
            others = [other.workload for other in beside(pod, place, running)]
            rate = self._truth.beside(pod.workload, place.gpu, place.parts, others)
            if place.chunk is not None:
                sharing = sum(at.chunk == place.chunk for _, at in self._bound)
                rate = min(rate, self._truth.alone(pod.workload, place.gpu, place.parts * sharing))
            rates[pod] = max(rate, LEAST * self._truth.alone(pod.workload, place.gpu, 1))
        return rates

    def _advance(self, until: float, rates: dict[Pod, float]) -> None:
        """Let time pass, with pods at these rates; start those that have loaded, and end those that are done."""
        seconds, self._now = until - self._now, until
        for gpu in GPUS:
            busy = self._gpu_busy(gpu)
            self._busy += seconds * busy / len(GPUS)
            drawn = max(IDLE, self._power[0] + self._power[1] * busy)
            self._joules += seconds * RATED_WATTS[gpu] * drawn
        for pod, rate in rates.items():
            self._left[pod] -= seconds * rate
            if self._left[pod] <= rate * ROUNDING:
                del self._left[pod]
                self._end(pod, pod.queries / (until - self._started[pod]))
        while self._loading and self._loading[0][0] <= until:
            _, _, pod = heapq.heappop(self._loading)
            if pod in self._failing:
                self._end(pod, None)
            else:
                self._started[pod], self._left[pod] = until, pod.queries

    def _end(self, pod: Pod, achieved: float | None) -> None:
        self._bound = [each for each in self._bound if each[0].number != pod.number]
        self._outcomes[pod] = Outcome(pod, achieved)

    def _gpu_busy(self, gpu: str) -> float:
        """Return the part of time in which a GPU runs something; an instance counts by its part of it."""
        running = [(pod, place) for pod, place in self._bound if place.gpu == gpu and pod in self._left]
        if gpu == V100:
            return utilisation(gpu, running, self._truth)
        slots = {place.slot: place.parts for _, place in running}
        return sum(
            utilisation(gpu, [each for each in running if each[1].slot == slot], self._truth) / parts
            for slot, parts in slots.items()
        )


def simulate(
    scheduler: str, pods: Sequence[Pod], truth: Matrices, known: Matrices, power: tuple[float, float], seed: int
) -> Experiment:
    """Run an experiment. power: of `miso.power_curve`; seed: of ties. Pods must be in order of arrival."""
    return _Cluster(scheduler, truth, known, power, seed).run(pods)
