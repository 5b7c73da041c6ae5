from __future__ import annotations

from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.check import check
from cotenant.planners.ideal import plan
from tests.planners.problems import profile

CUTS = (200, 400, 500, 600, 800, 1000)


def shares(plan: Plan) -> list[list[int]]:
    return [sorted(cut.share for cut in device.partitions) for device in plan.devices]


def small(seed: int) -> Problem:
    """Two or three models, batches to 3, two devices that are cut 4:6, 5:5 or not at all."""
    rng = np.random.default_rng(seed)
    names = "abc"[: rng.integers(2, 4)]
    bend = rng.random()
    latency = {
        name: {
            (cut, batch): (0.004 + fixed + work * batch) * (bend + (1 - bend) * 1000 / cut)
            for cut in (400, 500, 600, 1000)
            for batch in (1, 2, 3)
        }
        for name, fixed, work in zip(names, rng.random(3) * 0.01, rng.random(3) * 0.004, strict=False)
    }
    slos = {name: float(latency[name][400, 1] * (2 + 3 * rng.random())) for name in names}
    whole = sum(2 * 3 / latency[name][1000, 3] for name in names) / len(names)
    return Problem(
        models=tuple(Model(name=name, slo=slos[name]) for name in names),
        rates={name: float(whole * (0.1 + rng.random()) * 1.3 / len(names)) for name in names},
        fleet=(Kind(name="k", count=2, cuts=(400, 500, 600, 1000), max_partitions=2),),
        profiles={(name, "k"): profile(name, "k", latency[name]) for name in names},
    )


def brute(problem: Problem) -> int | None:
    """The fewest devices that serve all, with every choice of cuts and batches looked at."""
    names = list(problem.rates)
    asked = np.array([problem.rates[name] for name in names])
    slos = [problem.model(name).slo for name in names]

    def modes(share: int) -> np.ndarray:
        """Requests/s by model, for every choice of batches (0: not there) that holds the targets."""
        curves = [(0.0, *problem.profiles[name, "k"].curve(share)) for name in names]
        found = []
        for batches in product(*(range(len(curve)) for curve in curves)):
            lengths = [curve[batch] for curve, batch in zip(curves, batches, strict=True)]
            round_ = sum(lengths)
            if all(batch == 0 or round_ + own <= slo for batch, own, slo in zip(batches, lengths, slos, strict=True)):
                found.append([batch / round_ if batch else 0.0 for batch in batches])
        return np.array(found)

    known = {share: modes(share) for share in problem.fleet[0].cuts}
    layouts = ((400, 600), (500, 500), (1000,))
    for devices in range(1, (problem.fleet[0].count or 0) + 1):
        for cut in combinations_with_replacement(layouts, devices):
            reached = np.zeros((1, len(names)))
            for share in sorted(share for layout in cut for share in layout):
                reached = np.minimum(reached[:, None] + known[share][None], asked).reshape(-1, len(names))
                reached = np.unique(reached, axis=0)
            if (reached >= asked * (1 - 1e-9)).all(axis=1).any():
                return devices
    return None


@pytest.mark.parametrize("seed", range(40))
def test_nothing_better_exists(seed: int) -> None:
    problem = small(seed)
    made = plan(problem)
    assert check(made, problem) == []
    assert (None if made.unserved else made.devices_used) == brute(problem)
