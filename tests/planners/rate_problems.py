"""Small problems whose largest rate is known."""

from __future__ import annotations

import msgspec

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.predictors import Interference
from tests.planners.problems import linear


def accept_all(plan: Plan, problem: Problem) -> bool:
    return True


def largest(problem: Problem) -> Problem:
    """The same problem, with the largest rate for its objective."""
    return msgspec.structs.replace(problem, objective="rate")


def one_device(rate: float, slo: float = 0.1) -> Problem:
    """One model that takes 10 ms a request whatever the batch: 100 requests/s at most."""
    return Problem(
        time_limit=1.0,
        models=(Model(name="a", slo=slo),),
        rates={"a": rate},
        fleet=(Kind(name="k"),),
        profiles={("a", "k"): linear("a", "k", 0.0, 0.010, cuts=(1000,), batches=(1, 4))},
    )


def unlimited(problem: Problem) -> Problem:
    """The same problem, on as many devices as needed."""
    return msgspec.structs.replace(problem, fleet=(Kind(name="k", count=None),))


def two_halves(interference: Interference) -> Problem:
    """Two models of 10 ms a request on the whole device, which has two halves; the largest rate is asked for."""
    return Problem(
        time_limit=1.0,
        models=(Model(name="a", slo=0.4), Model(name="b", slo=0.4)),
        rates={"a": 10.0, "b": 10.0},
        fleet=(Kind(name="k", cuts=(500,)),),
        profiles={(name, "k"): linear(name, "k", 0.0, 0.010, cuts=(500, 1000), batches=(1, 4)) for name in "ab"},
        objective="rate",
        interference=interference,
    )
