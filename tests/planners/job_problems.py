"""Problems with best-effort jobs, for several files of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from cotenant.core.background_job import BackgroundJob
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem
from cotenant.predictors import Load

GIB = 1 << 30
CUTS = (100, 250, 500, 750, 1000)
SERVED = 0.010  # seconds of one row on the whole device; on less in proportion
STEP = 0.100


def profile(model: str, seconds: float, memory: int = GIB) -> Profile:
    """A row takes these seconds on the whole device, and several no less each."""
    points = [
        Point(share=share, batch=batch, latency=seconds * batch * 1000 / share, memory=memory)
        for share in CUTS
        for batch in (1, 2, 4)
    ]
    return Profile(model, "k", points)


class WideTail:
    """Jobs slow what is served by a tenth in the median, and by `tail` in high quantiles; a job named "rude" by three
    times as much. Nothing else slows anything."""

    interferes: ClassVar[bool] = True

    def __init__(self, tail: float = 0.2, quantile: float = 0.5) -> None:
        self._tail = tail
        self._quantile = quantile

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        factor = 0.1 if self._quantile <= 0.5 else self._tail
        jobs = [load for load in colocated if load.model in ("train", "rude", "big")]
        if victim.model in ("train", "rude", "big"):
            return 1.0
        return 1 + factor * sum(3 if load.model == "rude" else 1 for load in jobs)

    def with_quantile(self, quantile: float) -> WideTail:
        return WideTail(self._tail, quantile)


def problem(*jobs: BackgroundJob, **options: Any) -> Problem:
    """One model of 20 requests/s on one or more devices; jobs have the profiles "train", "rude" and "big"."""
    names = {"served": SERVED, "other": SERVED, "train": STEP, "rude": STEP}
    profiles = {(name, "k"): profile(name, seconds) for name, seconds in names.items()}
    profiles["big", "k"] = profile("big", STEP, memory=3 * GIB)
    known: dict[str, Any] = {
        "models": (Model(name="served", slo=0.1), Model(name="other", slo=0.1)),
        "rates": {"served": 20.0},
        "fleet": (Kind(name="k", count=4, memory=4 * GIB, cuts=CUTS),),
        "profiles": profiles,
        "interference": WideTail(),
        "jobs": jobs,
    }
    return Problem(**{**known, **options})


def job(name: str = "train", model: str | None = None, **options: Any) -> BackgroundJob:
    return BackgroundJob(name=name, model=model or name, **options)


def partition(model: str, share: int, rate: float, batch: int = 1) -> Partition:
    latency = SERVED * batch * 1000 / share
    placement = Placement(model=model, batch=batch, rate=rate, duty=latency, latency=latency)
    return Partition(share=share, placements=(placement,))


def plan(*devices: Sequence[Partition]) -> Plan:
    """Devices cut into these partitions."""
    return Plan(
        planner="test",
        devices=tuple(Device(id=DeviceId("k", n), partitions=tuple(cuts)) for n, cuts in enumerate(devices)),
    )


HALF = (partition("served", 500, 20.0),)  # busy for 40 % of its time
