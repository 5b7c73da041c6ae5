"""InSS' closed form of a batch's latency beside neighbours, and of a request's.

InSS (2023), section 4: a batch is transferred, its kernels are scheduled, they run, and the answer is transferred:

    latency = (input + output) · batch / bandwidth + kernels · (o + delay(models on the device)) + run · (1 + c · Σ L2)

The delay of scheduling grows linearly with how many models share the device, and is 0 for one alone. Running takes
longer by the L2 cache that neighbours use, each linear in its share; alone it is read off locally weighted regression
over batch and share. Which kernel and width that has, the paper does not say: here it is tricube over the nearest
points, in logarithms, in which time is nearly linear in both.

Of a profile, the columns `input_bytes` and `output_bytes` of a row, `kernels`, `scheduling_us` of a kernel alone and
`l2_util_pct` are read; without the first four those parts are taken to be none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.profile import Profile, Profiles
from cotenant.core.units import WHOLE
from cotenant.errors import PlanError
from cotenant.predictors import Load, remembered, require
from cotenant.predictors.linear import L2
from cotenant.predictors.samples import Sample

BANDWIDTH = 10e9  # bytes per second of a device's PCIe bus; iGniter measured 10 GB/s
INPUT, OUTPUT, KERNELS, SCHEDULING = "input_bytes", "output_bytes", "kernels", "scheduling_us"
# Of locally weighted regression: points, and where weight ends over the farthest of them. A point left out is then off
# by 1.4 % on the V100's profiles and 2.9 % on the A100's, on average; what smooths more is worse with InSS' 16 points.
NEAREST, REACH = 6, 1.02


class Alone(msgspec.Struct, frozen=True, dict=True):
    """A model alone. transfer: seconds for a row; scheduling: seconds for a kernel; l2_*: a line, fraction over share.

    points: batch, share (‰), seconds that it runs.
    """

    transfer: float
    kernels: float
    scheduling: float
    l2_slope: float
    l2_constant: float
    points: tuple[tuple[int, int, float], ...]

    def l2(self, share: int) -> float:
        return max(0.0, self.l2_slope * share / WHOLE + self.l2_constant)

    def overhead(self, batch: int) -> float:
        """Seconds before and after it runs."""
        return self.transfer * batch + self.kernels * self.scheduling

    def running(self, batch: int, share: int) -> float:
        """Seconds, by locally weighted regression."""
        known = self._known.get((batch, share))
        if known is None:
            where, times = self._logarithms
            known = math.exp(locally_weighted(where, times, np.log([batch, share])))
            self._known[batch, share] = known
        return known

    @functools.cached_property
    def _known(self) -> dict[tuple[int, int], float]:
        return {}

    @functools.cached_property
    def _logarithms(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        points = np.log(np.array(self.points))
        return points[:, :2], points[:, 2]


class Delay(msgspec.Struct, frozen=True):
    """Seconds that scheduling a kernel takes longer, by how many models share the device."""

    slope: float
    constant: float

    def of(self, models: int) -> float:
        return max(0.0, self.slope * models + self.constant) if models > 1 else 0.0


class Analytic(msgspec.Struct, frozen=True, dict=True):
    """Of one kind of device. alone: by model; cache: how much longer each runs, for all of the L2 cache in use.

    A model that was no victim in any sample is taken to feel the cache as those that were do on average.
    """

    kind: str
    delay: Delay
    cache: dict[str, float]
    alone: dict[str, Alone]

    interferes: ClassVar[bool] = True

    @remembered
    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Raises PlanError for a model that no profile says the use of L2 of, and on another kind of device."""
        return max(1.0, self.latency(victim, colocated) / self.latency(victim, ()))

    def latency(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Seconds of a batch."""
        own = self._alone(victim)
        used = sum(self._alone(load).l2(load.share) for load in colocated)
        delay = own.kernels * self.delay.of(1 + len(colocated))
        running = own.running(victim.batch, victim.share)
        cache = self.cache.get(victim.model, self._usual)
        return own.overhead(victim.batch) + delay + running * (1 + cache * used)

    def with_profiles(self, profiles: Profiles) -> Analytic:
        """The same, which also knows these models."""
        return Analytic(self.kind, self.delay, self.cache, self.alone | _alone(profiles, self.kind))

    @functools.cached_property
    def _usual(self) -> float:
        return float(np.mean(list(self.cache.values())))

    def _alone(self, load: Load) -> Alone:
        require(self.kind, load)
        known = self.alone.get(load.model)
        if known is None:
            raise PlanError(f"model {load.model!r}: how much L2 it uses is unknown; its profile needs {L2}")
        return known


def fit(samples: Sequence[Sample], profiles: Profiles) -> Analytic:
    """By least squares of slowdowns. Raises PlanError for models without `l2_util_pct`, and for too few samples."""
    if not samples:
        raise PlanError("no samples to fit a closed form to; measure pairs with `cotenant profile --pairs`")
    kind = samples[0].victim.kind
    alone = _alone(profiles, kind)
    bare = Analytic(kind, Delay(0.0, 0.0), {sample.victim.model: 0.0 for sample in samples}, alone)
    terms = [
        Term(
            sample.victim.model,
            1 + len(sample.colocated),
            (own := bare._alone(sample.victim)).kernels / (base := bare.latency(sample.victim, ())),
            own.running(sample.victim.batch, sample.victim.share)
            / base
            * sum(bare._alone(load).l2(load.share) for load in sample.colocated),
            sample.slowdown - 1,
        )
        for sample in samples
    ]
    delay, cache = least_squares(terms)
    return Analytic(kind, delay, cache, alone)


def _alone(profiles: Profiles, kind: str) -> dict[str, Alone]:
    """Of the models on this kind of device whose profiles say how much L2 they use."""
    return {
        profile.model: measured(profile)
        for profile in profiles.values()
        if profile.kind == kind and any(L2 in point.features for point in profile.points)
    }


class Term(msgspec.Struct, frozen=True):
    """One sample: slower = kernels · delay(models) + cache[victim] · pressure.

    kernels: over the latency alone; pressure: what neighbours use of L2, times the part of the latency that feels it;
    slower: the slowdown less 1.
    """

    victim: str
    models: int
    kernels: float
    pressure: float
    slower: float


def least_squares(terms: Sequence[Term]) -> tuple[Delay, dict[str, float]]:
    """The delay, and what L2 costs each victim.

    Where all samples have the same number of models, a line through it cannot be told; the delay is then taken to go
    with the number of neighbours. Raises PlanError for fewer samples than coefficients.
    """
    victims = sorted({term.victim for term in terms})
    counts = {term.models for term in terms}
    delays = np.array(
        [
            [term.kernels * term.models, term.kernels] if len(counts) > 1 else [term.kernels * (term.models - 1)]
            for term in terms
        ]
    )
    caches = np.array([[term.pressure if term.victim == victim else 0.0 for victim in victims] for term in terms])
    unknown = delays.shape[1] + len(victims)
    if len(terms) < unknown:
        raise PlanError(f"{len(terms)} samples are fewer than the {unknown} coefficients to find; measure more pairs")
    found, *_ = np.linalg.lstsq(np.hstack([delays, caches]), np.array([term.slower for term in terms]), rcond=None)
    slope, *rest = found.tolist()
    delay = Delay(slope, rest.pop(0) if len(counts) > 1 else -slope)
    return delay, dict(zip(victims, rest, strict=True))


def measured(profile: Profile) -> Alone:
    """What a profile says of a model alone."""
    points = [point for point in profile.points if point.procs == 1]
    using = [(point.share / WHOLE, point.features[L2] / 100) for point in points if L2 in point.features]
    if len({share for share, _ in using}) > 1:
        shares, fractions = np.array(using).T
        slope, constant = np.polyfit(shares, fractions, 1)
    else:
        slope, constant = 0.0, float(np.mean([used for _, used in using]))
    of_all = {name: value for point in points for name, value in point.features.items()}
    transfer = (of_all.get(INPUT, 0.0) + of_all.get(OUTPUT, 0.0)) / BANDWIDTH
    kernels, scheduling = of_all.get(KERNELS, 0.0), of_all.get(SCHEDULING, 0.0) / 1e6
    found = Alone(transfer, kernels, scheduling, float(slope), float(constant), ())
    running = [(point.batch, point.share, point.latency - found.overhead(point.batch)) for point in points]
    for batch, share, seconds in running:
        if seconds <= 0:
            raise PlanError(
                f"model {profile.model!r}, batch {batch} at {share / 10:g} %: transfer and scheduling would take longer"
                f" than the batch; look at {INPUT}, {OUTPUT}, {KERNELS} and {SCHEDULING} of its profile"
            )
    return msgspec.structs.replace(found, points=tuple(running))


def locally_weighted(where: NDArray[np.float64], values: NDArray[np.float64], at: NDArray[np.float64]) -> float:
    """A plane through the nearest points, the nearer the more it counts (Cleveland, 1979). where: two columns."""
    off = where - at
    distance = np.hypot(*off.T)
    nearest = np.argsort(distance, kind="stable")[:NEAREST]
    width = REACH * distance[nearest[-1]] or 1.0
    weight = np.sqrt((1 - (distance[nearest] / width) ** 3) ** 3)
    plane = np.column_stack([np.ones(len(nearest)), off[nearest]])
    found, *_ = np.linalg.lstsq(plane * weight[:, None], values[nearest] * weight, rcond=None)
    return float(found[0])


def task_latency(queued: float, batch: int, rate: float, executing: float, latency: float) -> float:
    """Seconds until a request is answered, InSS' equation 2.

    queued: requests that wait, this one included; rate: of arrivals, per second; executing: seconds until the batch in
    flight is done; latency: of a batch. With fewer than a batch waiting, it also takes until the batch is full.
    """
    if queued >= batch:
        return executing + math.ceil(queued / batch) * latency
    return max(executing, (batch - queued) / rate) + latency
