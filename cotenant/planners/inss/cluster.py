"""View a problem as InSS does: a fixed list of devices, a fixed list of models, and tables of latency and memory."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.model import Kind
from cotenant.core.units import WHOLE
from cotenant.planners.capacity import fits_memory, latency_curve
from cotenant.planners.problem import Problem
from cotenant.predictors import Load

MAX_BATCH = 32  # Algorithm 1, line 3
Floats = NDArray[np.float64]


class Provisioning(msgspec.Struct, frozen=True):
    """Hold an action: by model, the index of its device and its share of it in ‰; a share of 0 is not deployed."""

    devices: tuple[int, ...]
    shares: tuple[int, ...]

    def on(self, device: int) -> list[int]:
        """Return the models that are deployed on a device."""
        return [i for i, (d, share) in enumerate(zip(self.devices, self.shares, strict=True)) if d == device and share]


class Cluster(msgspec.Struct, frozen=True, dict=True):
    """Describe the devices and models of a problem.

    devices: the kind of each; models: their names. A kind with more devices than there are models, or without a count,
    has as many as models: InSS puts each model on one device.
    """

    problem: Problem
    devices: tuple[Kind, ...]
    models: tuple[str, ...]

    @classmethod
    def of(cls, problem: Problem) -> Cluster:
        models = tuple(model.name for model in problem.models)
        counts = [len(models) if kind.count is None else min(kind.count, len(models)) for kind in problem.fleet]
        devices = tuple(kind for kind, count in zip(problem.fleet, counts, strict=True) for _ in range(count))
        return cls(problem, devices, models)

    @functools.cached_property
    def shares(self) -> int:
        """Return the number of shares that an action may give: of the kind with most cuts."""
        return max((len(kind.cuts) for kind in self.devices), default=1)

    @property
    def heads(self) -> tuple[int, ...]:
        """Return the number of choices of each decision: by model, a device and a share."""
        return (len(self.devices), self.shares) * len(self.models)

    @functools.cached_property
    def slos(self) -> Floats:
        return np.array([model.slo for model in self.problem.models])

    def share(self, device: int, choice: int) -> int:
        """Return the share in ‰ that a choice from 0 to `shares` - 1 means on a device; kinds with fewer cuts have each
        several times."""
        cuts = self.devices[device].cuts
        return cuts[choice * len(cuts) // self.shares]

    def curve(self, model: int, device: int, share: int) -> Sequence[float]:
        """Return the seconds of batches 1 to at most 32 alone on a share (‰); empty where nothing was profiled."""
        return self._curve(model, self.devices[device].name, share)

    def memory(self, model: int, device: int, batch: int) -> int:
        profile = self.problem.profile(self.models[model], self.devices[device].name)
        return 0 if profile is None else profile.memory(batch)

    def fits(self, device: int, models: Sequence[int], shares: Sequence[int], batches: Sequence[int]) -> bool:
        """Tell whether models fit into a device's memory, and their shares into its MIG placements."""
        needs = [(share, self.memory(i, device, b)) for i, share, b in zip(models, shares, batches, strict=True)]
        return fits_memory(self.devices[device], needs)

    def slowdown(self, model: int, batch: int, where: Provisioning, batches: Sequence[int]) -> float:
        """Return the slowdown of a batch by the other models of its device. batches: by model, of those others."""
        if not self.problem.interference.interferes:
            return 1.0
        device = where.devices[model]
        kind = self.devices[device].name
        others = [Load(self.models[i], kind, batches[i], where.shares[i]) for i in where.on(device) if i != model]
        if not others:
            return 1.0
        return self.problem.interference.slowdown(Load(self.models[model], kind, batch, where.shares[model]), others)

    @functools.cached_property
    def reference_rates(self) -> Floats:
        """Return H_i of equation 3: requests/s with batches of 1 on the whole of the best kind; inf where no kind has a
        profile, so that nothing counts."""
        best = []
        for i in range(len(self.models)):
            first = [self.curve(i, d, kind.cuts[-1])[:1] for d, kind in enumerate(self.devices)]
            rates = [1 / seconds[0] for seconds in first if seconds]
            best.append(max(rates, default=0.0) or np.inf)
        return np.array(best)

    @functools.cached_property
    def fleet_hash(self) -> str:
        """Identify the devices: kinds, counts, memory and cuts."""
        return _hashed(
            [[kind.name, kind.memory, kind.cuts, kind.max_partitions, kind.geometry] for kind in self.devices]
        )

    @functools.cached_property
    def models_hash(self) -> str:
        """Identify the models: names, targets, largest batches and profiles on these devices."""
        kinds = sorted({kind.name for kind in self.devices})
        return _hashed(
            [
                [
                    [model.name, model.slo, model.max_batch],
                    [
                        [point.share, point.batch, point.procs, point.latency, point.memory]
                        for kind in kinds
                        if (profile := self.problem.profile(model.name, kind)) is not None
                        for point in profile.points
                    ],
                ]
                for model in self.problem.models
            ]
        )

    @functools.cached_property
    def _curves(self) -> dict[tuple[int, str, int], tuple[float, ...]]:
        return {}

    def _curve(self, model: int, kind: str, share: int) -> tuple[float, ...]:
        key = model, kind, share
        if key not in self._curves:
            curve = latency_curve(self.problem, self.models[model], kind, share)[:MAX_BATCH]
            finite = sum(seconds < np.inf for seconds in curve)
            self._curves[key] = curve[:finite]
        return self._curves[key]


def adjusted(cluster: Cluster, choices: NDArray[np.int64], wanted: Sequence[bool]) -> Provisioning:
    """Return what an action gives each model, with shares that add up to at most the whole of each device.

    choices: by model, a device and a share. wanted: models that are to be deployed. Equation 1a is silent on what
    happens where an action violates it; as in the published program shares go down, one step of the legal cuts and one
    model after the other, until they fit, and then up as long as they do, so that no share of a device is left idle.
    Where not even the least shares fit, or a device may have no more partitions, later models are not deployed.
    """
    devices = tuple(int(device) for device, _ in choices)
    shares = [0] * len(devices)
    for device, kind in enumerate(cluster.devices):
        mine = [i for i, d in enumerate(devices) if d == device and wanted[i]]
        mine = mine[: min(kind.max_partitions or len(mine), WHOLE // kind.cuts[0])]
        steps = [kind.cuts.index(cluster.share(device, int(choices[i][1]))) for i in mine]
        while mine and not _legal(kind, steps):
            if not any(steps):
                mine.pop()
                steps.pop()
                continue
            highest = max(range(len(steps)), key=steps.__getitem__)
            steps[highest] -= 1
        grew = True
        while grew:
            grew = False
            for n in range(len(steps)):
                more = [*steps[:n], steps[n] + 1, *steps[n + 1 :]]
                if more[n] < len(kind.cuts) and _legal(kind, more):
                    steps, grew = more, True
        for i, step in zip(mine, steps, strict=True):
            shares[i] = kind.cuts[step]
    return Provisioning(devices, tuple(shares))


def _legal(kind: Kind, steps: Sequence[int]) -> bool:
    shares = [kind.cuts[step] for step in steps]
    return sum(shares) <= WHOLE and fits_memory(kind, [(share, 0) for share in shares])


def _hashed(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]
