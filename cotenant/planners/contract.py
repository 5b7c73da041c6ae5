"""Test any planner against the contract of all planners, on random problems.

    import pytest
    from cotenant.planners import contract

    @pytest.mark.parametrize("problem", contract.random_problems(100))
    def test_contract(problem):
        assert contract.contract_violations(my_planner(problem), problem) == []

A planner serves what it can and reports the rest as unserved; a problem that it does not support is a PlanError. How
good its plans are is for `cotenant plan --compare` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, TypeVar

import msgspec
import numpy as np

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Point, Profile
from cotenant.planners.check import check
from cotenant.planners.problem import Problem
from cotenant.predictors import Interference, Load, NoInterference

T = TypeVar("T")

BOUND_TOLERANCE = 1e-6  # relative tolerance by which a plan may beat its own bound, for rounding
MIB = 1 << 20
EVERY_5 = tuple(range(50, 1001, 50))
SM, DRAM = "sm_util_pct", "dram_util_pct"  # columns of profiles by which some planners choose


def contract_violations(plan: Plan, problem: Problem) -> list[str]:
    """Return how a plan violates the contract, in words; [] where it does not."""
    violations = [str(violation) for violation in check(plan, problem)]
    if not any(problem.rates.values()) and plan.devices:
        violations.append(f"nothing is asked for, and {plan.devices_used} devices are used")
    if not violations:
        violations += [
            f"read from its file: {violation}" for violation in check(Plan.from_json(plan.to_json()), problem)
        ]
    return violations + _disproved_bound(plan)


def _disproved_bound(plan: Plan) -> list[str]:
    """Return the bound, where the plan itself disproves it."""
    if plan.bound is None or plan.unserved:
        return []
    if plan.objective == "rate":
        beaten = plan.scale > plan.bound * (1 + BOUND_TOLERANCE)
        reached = f"{plan.scale:g} times the rates"
    else:
        takes = plan.devices_used if plan.cost_per_hour is None else plan.cost_per_hour
        beaten = takes < plan.bound * (1 - BOUND_TOLERANCE)
        reached = f"{takes:g}"
    return [f"the plan comes to {reached}, which its bound of {plan.bound:g} says is impossible"] if beaten else []


class RandomSource(Protocol):
    """Provide the randomness of a random problem."""

    def choice(self, options: Sequence[T]) -> T: ...
    def between(self, low: float, high: float) -> float: ...


class NumpyRandom:
    """Draw from a NumPy generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self._rng.integers(len(options)))]

    def between(self, low: float, high: float) -> float:
        return float(self._rng.uniform(low, high))


def random_problems(count: int, seed: int = 0) -> list[Problem]:
    """Return random problems; the first are the same for any `count`."""
    return [random_problem(NumpyRandom(rng)) for rng in np.random.default_rng(seed).spawn(count)]


class ProportionalInterference(msgspec.Struct, frozen=True):
    """Slow every co-located model in proportion to its batch and share."""

    factor: float

    interferes: ClassVar[bool] = True

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return 1 + self.factor * sum(load.share / 1000 * (1 + load.batch / 32) for load in colocated)


def random_problem(dice: RandomSource) -> Problem:
    """Return a valid problem, with models that cannot be served, missing profiles, little memory or few devices."""
    names: Sequence[str] = dice.choice((("k",), ("k",), ("k", "l")))
    kinds = tuple(_kind(dice, name) for name in names)
    models, rates, profiles = [], {}, {}
    for i in range(dice.choice(range(1, 7))):
        name = f"m{i}"
        fixed, work = dice.between(0.0005, 0.02), dice.between(0.0001, 0.01)
        for kind in kinds:
            if dice.choice(range(10)):
                bend = dice.choice((0.0, 0.5, 1.0))
                points = [
                    Point(
                        share=s,
                        batch=b,
                        latency=(fixed + work * b) * (bend + (1 - bend) * 1000 / s),
                        memory=MIB,
                        features={SM: 5.0 * b, DRAM: 100 - 4.0 * b},
                    )
                    for s in kind.cuts
                    for b in (1, 3, 8, 20)
                ]
                profiles[name, kind.name] = Profile(name, kind.name, points)
        models.append(Model(name=name, slo=dice.between(0.005, 0.6), max_batch=dice.choice((None, None, 1, 5))))
        rates[name] = dice.choice((0.0, 0.2, dice.between(0.1, 2000.0), dice.between(0.1, 2000.0)))
    colocated: tuple[Interference, ...] = (
        NoInterference(),
        NoInterference(),
        ProportionalInterference(0.1),
        ProportionalInterference(1.0),
    )
    return Problem(
        models=tuple(models),
        rates=rates,
        fleet=kinds,
        profiles=profiles,
        interference=dice.choice(colocated),
    )


def _kind(dice: RandomSource, name: str) -> Kind:
    return Kind(
        name=name,
        count=dice.choice((None, 0, 1, 2, 4)),
        memory=dice.choice((1 << 40, 3 * MIB)),
        price=dice.choice((None, 1.0, 2.5)),
        cuts=dice.choice((EVERY_5, (100, 200, 400, 500, 600, 800, 1000), (1000,), (140, 280, 420, 570))),
        max_partitions=dice.choice((None, 1, 2, 3)),
    )
