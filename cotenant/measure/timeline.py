"""Record a run over time: requests, queues, devices and cost, by interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Timeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold figures of intervals of `step` seconds from the start of a run, one entry per interval.

    offered, goodput, missed: by model, arrivals, answers within target, and other outcomes (except of requests whose
    caller left), per second. p99: by model, of the answers that came in the interval, in seconds; None where none did.
    waiting: requests in queues, on average. busy: the fraction of the devices' capacity on which batches ran. devices:
    how many were in use, on average. cost: per hour, of those; None where no device has a price.
    """

    step: float = msgspec.field(name="step_s")
    offered: dict[str, list[float]]
    goodput: dict[str, list[float]]
    missed: dict[str, list[float]]
    p99: dict[str, list[float | None]] = msgspec.field(name="p99_s")
    waiting: list[float]
    busy: list[float]
    devices: list[float]
    cost: list[float] | None = msgspec.field(name="cost_per_hour")

    @property
    def times(self) -> list[float]:
        """The middle of each interval, in seconds."""
        return [(n + 0.5) * self.step for n in range(len(self.waiting))]

    @property
    def utilisation(self) -> float:
        """The fraction of the devices' capacity on which batches ran, over the whole run; 0 without devices."""
        used = math.fsum(self.devices)
        return math.fsum(b * d for b, d in zip(self.busy, self.devices, strict=True)) / used if used else 0.0

    @property
    def spent(self) -> float | None:
        """What the run cost, in the prices' currency."""
        return None if self.cost is None else math.fsum(self.cost) * self.step / 3600

    @property
    def answers(self) -> float:
        """The answers within target, of all models together."""
        return math.fsum(math.fsum(rates) for rates in self.goodput.values()) * self.step


def interval_mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
