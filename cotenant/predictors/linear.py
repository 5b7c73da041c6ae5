"""Predict by gpulet's interference model: linear in the L2 and memory-bandwidth utilisation of all co-located models.

gpulet paper, section 4.4: slowdown = c1 · L2_victim + c2 · L2_colocated + c3 · mem_victim + c4 · mem_colocated + c5,
with each model's utilisation alone on its share. Slowdowns are at least 1.

The paper has one co-located model. The utilisations of several are summed. A partition that is time-shared runs one
model at a time; callers pass the one that slows the victim most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.profile import Profile, Profiles
from cotenant.errors import PlanError
from cotenant.predictors import Load, require
from cotenant.predictors.samples import Sample

L2, DRAM = "l2_util_pct", "dram_util_pct"  # columns of a profile
COLUMNS = "batch, share, l2, dram"


class Coefficients(msgspec.Struct, frozen=True):
    """Hold c1 to c5 of section 4.4, for utilisations as fractions."""

    l2_victim: float
    l2_colocated: float
    dram_victim: float
    dram_colocated: float
    constant: float


class Utilisation:
    """Interpolate a model's utilisation of L2 cache and memory bandwidth alone, as fractions by batch and share (‰).

    Linear between measured batches and shares; constant beyond them.
    """

    def __init__(self, model: str, measured: Mapping[tuple[int, int], tuple[float, float]]) -> None:
        """measured: (batch, share) → (L2, DRAM). Raises PlanError where there is none."""
        if not measured:
            raise PlanError(f"model {model!r}: its L2 and DRAM utilisation was not measured")
        self.model = model
        self.measured = dict(measured)
        self._rows: dict[int, NDArray[np.float64]] = {}  # share → rows of batch, L2, DRAM
        for share in sorted({share for _, share in measured}):
            points = sorted(
                (batch, *used) for (batch, measured_share), used in measured.items() if measured_share == share
            )
            self._rows[share] = np.array(points).T
        self._cache: dict[tuple[int, int], tuple[float, float]] = {}

    @classmethod
    def of(cls, profile: Profile) -> Utilisation:
        """Read a profile's columns `l2_util_pct` and `dram_util_pct`. Raises PlanError where they are absent."""
        return cls(
            profile.model,
            {
                (point.batch, point.share): (point.features[L2] / 100, point.features[DRAM] / 100)
                for point in profile.points
                if point.procs == 1 and L2 in point.features and DRAM in point.features
            },
        )

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Utilisation:
        used = {(int(batch), int(share)): (float(l2), float(dram)) for batch, share, l2, dram in value[COLUMNS]}
        return cls(value["model"], used)

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, COLUMNS: [(*where, *used) for where, used in sorted(self.measured.items())]}

    def at(self, batch: int, share: int) -> tuple[float, float]:
        """Return (L2, DRAM) utilisation, each as a fraction of the device's."""
        used = self._cache.get((batch, share))
        if used is None:
            used = self._cache[batch, share] = self._interpolate(batch, share)
        return used

    def _interpolate(self, batch: int, share: int) -> tuple[float, float]:
        rows = self._rows.values()
        l2 = [np.interp(batch, batches, used) for batches, used, _ in rows]
        dram = [np.interp(batch, batches, used) for batches, _, used in rows]
        shares = list(self._rows)
        return float(np.interp(share, shares, l2)), float(np.interp(share, shares, dram))


class Linear(msgspec.Struct, frozen=True):
    """Predict by gpulet's model. utilisation: by model; kind: of the devices that it holds for, None for any."""

    coefficients: Coefficients
    utilisation: Mapping[str, Utilisation]
    kind: str | None = None

    interferes: ClassVar[bool] = True

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Predict a slowdown. Raises PlanError for a model of unknown utilisation, and on another kind of device."""
        if not colocated:
            return 1.0
        if self.kind is not None:
            require(self.kind, victim)
        c = self.coefficients
        own_l2, own_dram = _utilisation_of(self.utilisation, victim)
        factor = c.constant + c.l2_victim * own_l2 + c.dram_victim * own_dram
        for load in colocated:
            l2, dram = _utilisation_of(self.utilisation, load)
            factor += c.l2_colocated * l2 + c.dram_colocated * dram
        return factor if factor > 1.0 else 1.0

    def least_slowdowns(self, victims: Sequence[Load], colocated: Sequence[Load], room: int) -> list[float]:
        """Return a lower bound for each victim: what the loads that add least add, filled into the room where that is
        less than nothing, as a fit may have it."""
        c = self.coefficients
        least = math.inf
        for load in colocated:
            l2, dram = _utilisation_of(self.utilisation, load)
            added = c.l2_colocated * l2 + c.dram_colocated * dram
            least = min(least, added if added >= 0 else added / load.share * max(load.share, room))
        slowdowns = []
        for victim in victims:
            l2, dram = _utilisation_of(self.utilisation, victim)
            slowdowns.append(max(1.0, c.constant + c.l2_victim * l2 + c.dram_victim * dram + least))
        return slowdowns

    def with_profiles(self, profiles: Profiles) -> Linear:
        """Return the predictor with the utilisation of these profiles' models added."""
        return Linear(self.coefficients, {**self.utilisation, **_utilisation(profiles, self.kind)}, self.kind)


def fit(samples: Sequence[Sample], profiles: Profiles) -> Linear:
    """Fit the coefficients by least squares. Raises PlanError for samples of models without utilisation."""
    kind = samples[0].victim.kind if samples else None
    used = _utilisation(profiles, kind)
    return Linear(least_squares(samples, used), used, kind)


def _utilisation(profiles: Profiles, kind: str | None) -> dict[str, Utilisation]:
    """Return the utilisation of every model on a kind of device whose profile has it."""
    return {
        model: Utilisation.of(profile)
        for (model, on), profile in profiles.items()
        if kind in (None, on)
        and any(L2 in point.features and DRAM in point.features for point in profile.points if point.procs == 1)
    }


def least_squares(samples: Iterable[Sample], utilisation: Mapping[str, Utilisation]) -> Coefficients:
    """Return the least-squares coefficients. Raises PlanError for fewer samples than coefficients."""
    rows, slowdowns = [], []
    for sample in samples:
        own_l2, own_dram = _utilisation_of(utilisation, sample.victim)
        colocated = [_utilisation_of(utilisation, load) for load in sample.colocated]
        rows.append((own_l2, sum(l2 for l2, _ in colocated), own_dram, sum(dram for _, dram in colocated), 1.0))
        slowdowns.append(sample.slowdown)
    coefficients = len(Coefficients.__struct_fields__)
    if len(rows) < coefficients:
        raise PlanError(
            f"{len(rows)} samples for the {coefficients} coefficients of a linear model; it needs more runs of pairs"
        )
    solution, *_ = np.linalg.lstsq(np.array(rows), np.array(slowdowns), rcond=None)
    return Coefficients(*solution.tolist())


def _utilisation_of(utilisation: Mapping[str, Utilisation], load: Load) -> tuple[float, float]:
    model_utilisation = utilisation.get(load.model)
    if model_utilisation is None:
        raise PlanError(
            f"model {load.model!r}: its L2 and DRAM utilisation is unknown; add the columns {L2} and {DRAM} to its"
            " profile"
        )
    return model_utilisation.at(load.batch, load.share)
