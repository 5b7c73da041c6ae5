"""What `cotenant status` shows: models, plan, partitions and workers of a server at one moment."""

from __future__ import annotations

import msgspec

from cotenant.core.plan import Plan
from cotenant.core.units import show_seconds
from cotenant.live.control_driver import WorkerStatus
from cotenant.live.oip import IndexEntry


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a model's requests so far.

    outcomes: requests by outcome. attainment: the fraction within the target of those whose caller stayed; mean:
    latency of the served, in seconds; each None where there was none.
    """

    outcomes: dict[str, int]
    attainment: float | None
    mean: float | None


class RevisionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """revision: the number of the plan revision in force, 0 where none is, and the reason why it was made. desired: the
    one that is wanted. phase: of the rollout under way, empty where none is."""

    revision: int = 0
    reason: str = ""
    desired: int = 0
    phase: str = ""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """isolation: what keeps workers to their shares, in words. targets: seconds by model. planned: requests/s that
    come from outside, by model."""

    backend: str
    isolation: str
    ready: bool
    plan: msgspec.Raw
    rollout: RevisionStatus = RevisionStatus()
    targets: dict[str, float]
    planned: dict[str, float]
    models: list[IndexEntry]
    statistics: dict[str, ModelStatus]
    workers: list[WorkerStatus]

    def rows(self, plan: Plan) -> list[list[str]]:
        """Return a row a model, as text: name, state, target, planned/s, served, mean, attainment, other
        outcomes."""
        rows = []
        for entry in self.models:
            counts = self.statistics.get(entry.name)
            if counts is None or entry.name not in self.targets:
                rows.append([entry.name, entry.state, *[""] * 5, entry.reason])
                continue
            others = ", ".join(f"{n} {end}" for end, n in counts.outcomes.items() if n and end != "served")
            rows.append(
                [
                    entry.name,
                    entry.state,
                    show_seconds(self.targets[entry.name]),
                    f"{plan.rate(entry.name) or self.planned.get(entry.name, 0.0):.1f}",
                    str(counts.outcomes["served"]),
                    "-" if counts.mean is None else show_seconds(counts.mean),
                    "-" if counts.attainment is None else f"{counts.attainment * 100:.2f} %",
                    entry.reason or others,
                ]
            )
        return rows
