"""Problems to plan for: random ones, and the embedded default's kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from cotenant.core.model import Kind, Model
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem
from cotenant.predictors import Alone, Interference, Load

MIB = 1 << 20
EVERY_5 = tuple(range(50, 1001, 50))


def profile(model: str, kind: str, latency: Mapping[tuple[int, int], float], memory: int = MIB) -> Profile:
    """latency: seconds by (share, batch)."""
    points = [Point(share=s, batch=b, latency=seconds, memory=memory) for (s, b), seconds in latency.items()]
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
    """A batch of n takes (fixed + work · n) / share seconds, as on shares of a processor."""
    return profile(model, kind, {(s, b): (fixed + work * b) * 1000 / s for s in cuts for b in batches}, memory)


class Crowded:
    """Every neighbour slows in proportion to its batch and share."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def slowdown(self, victim: Load, neighbours: Sequence[Load]) -> float:
        return 1 + self.factor * sum(load.share / 1000 * (1 + load.batch / 32) for load in neighbours)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any sound problem: hopeless models, kinds that lack a profile, tight memory, too few devices."""
    kinds = []
    for name in draw(st.sampled_from((["k"], ["k"], ["k", "l"]))):
        cuts = draw(st.sampled_from((EVERY_5, (100, 200, 400, 500, 600, 800, 1000), (1000,), (140, 280, 420, 570))))
        kinds.append(
            Kind(
                name=name,
                count=draw(st.sampled_from((None, 0, 1, 2, 4))),
                memory=draw(st.sampled_from((1 << 40, 3 * MIB))),
                price=draw(st.sampled_from((None, 1.0, 2.5))),
                cuts=cuts,
                max_partitions=draw(st.sampled_from((None, 1, 2, 3))),
            )
        )
    models, rates, profiles = [], {}, {}
    for i in range(draw(st.integers(1, 6))):
        name = f"m{i}"
        fixed, work = draw(st.floats(0.0005, 0.02)), draw(st.floats(0.0001, 0.01))
        for kind in kinds:
            if draw(st.integers(0, 9)):
                bend = draw(st.sampled_from((0.0, 0.5, 1.0)))
                latency = {
                    (s, b): (fixed + work * b) * (bend + (1 - bend) * 1000 / s)
                    for s in kind.cuts
                    for b in (1, 3, 8, 20)
                }
                profiles[name, kind.name] = profile(name, kind.name, latency)
        largest = draw(st.sampled_from((None, None, 1, 5)))
        models.append(Model(name=name, slo=draw(st.floats(0.005, 0.6)), max_batch=largest))
        rates[name] = draw(st.sampled_from((0.0, 0.2)) | st.floats(0.1, 2000.0))
    neighbours: list[Interference] = [Alone(), Alone(), Crowded(0.1), Crowded(1.0)]
    return Problem(
        models=tuple(models),
        rates=rates,
        fleet=tuple(kinds),
        profiles=profiles,
        interference=draw(st.sampled_from(neighbours)),
    )


def embedded(scale: float = 1.0) -> Problem:
    """Seven models on shares of one processor: what `cotenant demo` is like."""
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
        models=tuple(Model(name=name, slo=slo) for name, (_, _, slo, _) in table.items()),
        rates={name: rate * scale for name, (_, _, _, rate) in table.items()},
        fleet=(Kind(name="cpu", cuts=EVERY_5),),
        profiles={(name, "cpu"): linear(name, "cpu", fixed, work) for name, (fixed, work, _, _) in table.items()},
    )
