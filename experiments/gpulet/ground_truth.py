"""Define the true interference in simulations, which differs from what planners predict.

On the V100 and the A100 it follows measured pairs of the models; for unmeasured pairs, the linear formula. No pair was
published for the paper's own device: there, the formula with the paper's coefficients errs as section 4.4 reports, by
at most 10.26 % for 90 % of pairs and 13.98 % for 95 %.

The simulator takes latencies and slowdowns from a problem, so the environment is a problem with the true interference.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import msgspec
import numpy as np

from cotenant.core.model import Kind
from cotenant.planners import Problem
from cotenant.predictors import Interference, Load
from cotenant.predictors.samples import Sample
from cotenant.published import a100, v100
from cotenant.workload.arrivals import random_streams
from experiments.gpulet import paper
from experiments.gpulet.model_sets import A100, V100, ModelSet

# Relative errors of the formula (section 4.4): a Laplace distribution of this scale has 90 % within 10.5 % and 95 %
# within 13.7 %, closer to the paper's numbers than a normal distribution.
ERROR_SCALE = 0.0456
SHARE_DISTANCE = 200  # a difference of so many ‰ in share counts as much as a factor 2 in batch
DISTANCE_OFFSET = 0.05  # added to squared distances, so that an exact match does not outweigh all others


class MeasuredInterference:
    """Predict slowdowns from measured pairs: the formula, times its error at the nearest samples.

    samples: with one co-located model each. Pairs of models without samples get the formula alone. Slowdowns by several
    co-located models add up, as in the formula.
    """

    def __init__(self, formula: Interference, samples: Iterable[Sample], models: Mapping[str, str]) -> None:
        """Take samples. models: for each role, the name in the samples of the model that plays it."""
        self._formula = formula
        self._models = models
        self._known: dict[tuple[Load, Load], float] = {}
        roles = {model: role for role, model in models.items()}
        by_pair: dict[tuple[str, str], list[tuple[tuple[float, ...], float]]] = {}
        for sample in samples:
            (other,) = sample.colocated
            pair = sample.victim.model, other.model
            victim, colocated = (
                msgspec.structs.replace(load, model=roles[load.model]) for load in (sample.victim, other)
            )
            factor = sample.slowdown / formula.slowdown(victim, (colocated,))
            by_pair.setdefault(pair, []).append((_coordinates(victim, colocated), factor))
        self._factors = {
            pair: (np.array([point for point, _ in factors]), np.array([factor for _, factor in factors]))
            for pair, factors in by_pair.items()
        }

    interferes: ClassVar[bool] = True

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return max(1.0, 1.0 + sum(self._pair_slowdown(victim, other) - 1.0 for other in colocated))

    def _pair_slowdown(self, victim: Load, other: Load) -> float:
        known = self._known.get((victim, other))
        if known is None:
            known = self._formula.slowdown(victim, (other,))
            pair = self._models[victim.model], self._models[other.model]
            if pair in self._factors:
                points, factors = self._factors[pair]
                distances = ((points - _coordinates(victim, other)) ** 2).sum(axis=1)
                known *= float(np.average(factors, weights=(DISTANCE_OFFSET + distances) ** -2.0))
            self._known[victim, other] = known
        return known


def _coordinates(victim: Load, other: Load) -> tuple[float, ...]:
    """Map two loads to a point, such that similar loads are close."""
    shares = victim.share / SHARE_DISTANCE, other.share / SHARE_DISTANCE
    return math.log2(victim.batch), math.log2(other.batch), *shares


class RandomErrorInterference(msgspec.Struct, frozen=True):
    """Multiply a formula by a random error, drawn once for each pair of loads."""

    formula: Interference
    seed: int

    interferes: ClassVar[bool] = True

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return max(1.0, 1.0 + sum(self._pair_slowdown(victim, other) - 1.0 for other in colocated))

    def _pair_slowdown(self, victim: Load, other: Load) -> float:
        return self.formula.slowdown(victim, (other,)) * (1 + _error(self.seed, victim, other))


@functools.lru_cache(1 << 16)
def _error(seed: int, victim: Load, other: Load) -> float:
    name = " ".join(f"{load.model} {load.batch} {load.share}" for load in (victim, other))
    return float(random_streams(seed, [name])[name].laplace(0.0, ERROR_SCALE))


def true_environment(model_set: ModelSet, devices: int = paper.DEVICES, seed: int = 0) -> Problem:
    """Return the problem to simulate: a set's models on devices with unlimited memory and the true interference."""
    problem = model_set.problem(devices)
    fleet = tuple(Kind(name=kind.name, count=kind.count, cuts=kind.cuts) for kind in problem.fleet)
    return msgspec.structs.replace(problem, fleet=fleet, interference=true_interference(model_set, seed))


def true_interference(model_set: ModelSet, seed: int = 0) -> Interference:
    """Return the true interference between the models of a set."""
    if model_set.kind == v100.KIND:
        return MeasuredInterference(
            model_set.interference, v100.pairs(), {role: name for role, (name, _) in V100.items()}
        )
    if model_set.kind == a100.KIND:
        return MeasuredInterference(model_set.interference, a100.pairs(), A100)
    return RandomErrorInterference(model_set.interference, seed)
