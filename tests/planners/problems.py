"""Problems for tests: random ones, and one like the embedded default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from hypothesis import strategies as st

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem
from cotenant.planners.contract import DRAM, SM, random_problem
from cotenant.planners.contract import EVERY_5 as EVERY_5
from cotenant.planners.contract import MIB as MIB
from cotenant.planners.contract import ProportionalInterference as ProportionalInterference

T = TypeVar("T")


def profile(model: str, kind: str, latency: Mapping[tuple[int, int], float], memory: int = MIB) -> Profile:
    """latency: seconds by (share, batch)."""
    points = [
        Point(share=s, batch=b, latency=seconds, memory=memory, features={SM: 50.0, DRAM: 50.0})
        for (s, b), seconds in latency.items()
    ]
    return Profile(model, kind, points)


def linear(
    model: str,
    kind: str,
    fixed: float,
    work: float,
    cuts: Sequence[int] = EVERY_5,
    batches: Sequence[int] = (1, 2, 4, 8, 16),
    memory: int = MIB,
) -> Profile:
    """Return a profile in which a batch of n takes (fixed + work · n) / share seconds, as on CPU shares."""
    return profile(model, kind, {(s, b): (fixed + work * b) * 1000 / s for s in cuts for b in batches}, memory)


class _Drawn:
    """Random choices drawn by hypothesis, which shrinks failing ones."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def choice(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))

    def between(self, low: float, high: float) -> float:
        return self._draw(st.floats(low, high))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a valid problem: unservable models, missing profiles, tight memory, too few devices."""
    return random_problem(_Drawn(draw))


def embedded(scale: float = 1.0) -> Problem:
    """Return seven models on shares of one CPU, like `cotenant demo`."""
    table = {
        # seconds for a batch, for each row; target; requests/s
        "resnet50": (0.004, 0.030, 0.5, 3.0),
        "googlenet": (0.003, 0.016, 0.3, 4.0),
        "mobilenet": (0.002, 0.006, 0.15, 8.0),
        "ssd": (0.004, 0.014, 0.4, 3.0),
        "embedder": (0.002, 0.004, 0.1, 15.0),
        "digits": (0.0005, 0.0003, 0.05, 60.0),
        "bert": (0.005, 0.050, 1.0, 1.0),
    }
    return Problem(
        time_limit=1.0,
        models=tuple(Model(name=name, slo=slo) for name, (_, _, slo, _) in table.items()),
        rates={name: rate * scale for name, (_, _, _, rate) in table.items()},
        fleet=(Kind(name="cpu", cuts=EVERY_5),),
        profiles={(name, "cpu"): linear(name, "cpu", fixed, work) for name, (fixed, work, _, _) in table.items()},
    )


def placements_by_device(plan: Plan) -> list[list[tuple[str, int, int]]]:
    """Model, batch and share of each partition, by device."""
    return [
        [(placement.model, placement.batch, cut.share) for cut in device.partitions for placement in cut.placements]
        for device in plan.devices
    ]
