"""Relax interference to the least that any plan has, so that a bound without interference stays one with it.

On a device with several partitions each one is slowed at least as much as by the mildest loads that fit beside it. A
device with one partition may as well have the largest share, which is left as it is; where a smaller one was measured
faster, it gets the latency of that. So every plan of a problem serves as much, by the same test, with the relaxed
latencies and no interference.
"""

from __future__ import annotations

from math import isfinite

import msgspec
import numpy as np

from cotenant.core.model import Kind
from cotenant.core.profile import Point, Profile
from cotenant.core.units import WHOLE
from cotenant.planners.problem import Problem
from cotenant.predictors import BoundedBelow, Load, NoInterference


def relaxed_problem(problem: Problem) -> Problem:
    """Return the problem without interference, with latencies slowed by the least that is possible: not at all where
    the predictor gives no bound, and on MIG instances."""
    interference = problem.interference
    profiles = dict(problem.profiles)
    if isinstance(interference, BoundedBelow):
        for kind in problem.fleet:
            if kind.geometry is None:
                profiles |= _slowed_least(problem, kind, interference)
    return msgspec.structs.replace(problem, profiles=profiles, interference=NoInterference())


def _slowed_least(problem: Problem, kind: Kind, interference: BoundedBelow) -> dict[tuple[str, str], Profile]:
    """Return the profiles of a kind, with a point for each share and batch."""
    known = {
        model.name: profile
        for model in problem.models
        if (profile := problem.profile(model.name, kind.name)) is not None
    }
    curves = {name: np.array([profile.curve(share) for share in kind.cuts]) for name, profile in known.items()}
    loads = {
        share: [
            Load(name, kind.name, batch, share)
            for name, own in curves.items()
            for batch, seconds in enumerate(own[n], 1)
            if isfinite(seconds)
        ]
        for n, share in enumerate(kind.cuts)
    }
    for own in curves.values():
        own[-1] = own.min(axis=0)
    for n, share in enumerate(kind.cuts[:-1]):
        beside = [load for cut in kind.cuts if cut <= WHOLE - share for load in loads[cut]]
        if beside:
            slowdowns = interference.least_slowdowns(loads[share], beside, WHOLE - share)
            for load, slowdown in zip(loads[share], slowdowns, strict=True):
                curves[load.model][n, load.batch - 1] *= slowdown
    return {(name, kind.name): _profile(profile, kind, curves[name]) for name, profile in known.items()}


def _profile(profile: Profile, kind: Kind, curves: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Profile:
    """Return a profile with these seconds, by share and batch. Partitions with several workers of a model stay."""
    # A profile raises what is faster with fewer rows or a larger share; a bound has to lower the others instead.
    lowered = np.minimum.accumulate(curves, axis=0)
    lowered = np.minimum.accumulate(lowered[:, ::-1], axis=1)[:, ::-1]
    points = [
        Point(share=share, batch=batch, latency=seconds, memory=profile.memory(batch))
        for share, row in zip(kind.cuts, lowered.tolist(), strict=True)
        for batch, seconds in enumerate(row, 1)
        if isfinite(seconds)
    ]
    return Profile(profile.model, profile.kind, points + [point for point in profile.points if point.procs > 1])
