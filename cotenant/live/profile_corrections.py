"""Keep by how much profiles turned out wrong while serving, so that plans count with it, also after a restart."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping

import msgspec

from cotenant.live.serving_observer import EPOCH
from cotenant.planners import Problem


class ProfileCorrection(msgspec.Struct, frozen=True, kw_only=True):
    """Say how many times as long as profiled the batches of a model take.

    batches: from which that is known; since: when that was, in seconds since 1970. digest: of the profile.
    """

    factor: float
    batches: int
    since: float
    digest: str


class ProfileCorrections:
    """Hold corrections by model. One is of no use once the model has another profile."""

    def __init__(self, known: Mapping[str, ProfileCorrection] | None = None) -> None:
        self.known = dict(known or {})

    def correct(self, model: str, factor: float, batches: int, problem: Problem) -> None:
        """Correct the profile that a problem has of a model by a factor of at least 1; 1 takes a correction back."""
        self.known.pop(model, None)
        if factor > 1.0:
            self.known[model] = ProfileCorrection(
                factor=factor, batches=batches, since=EPOCH + time.monotonic(), digest=_digest(problem, model)
            )

    def of(self, problem: Problem) -> dict[str, ProfileCorrection]:
        """Return those that hold for the profiles of a problem."""
        return {name: known for name, known in self.known.items() if known.digest == _digest(problem, name)}

    def factors(self, problem: Problem) -> dict[str, float]:
        """Return by how much batches take longer than the profiles of a problem say, by model."""
        return {name: known.factor for name, known in self.of(problem).items()}


def _digest(problem: Problem, model: str) -> str:
    points = [
        (kind, list(profile.points)) for (name, kind), profile in sorted(problem.profiles.items()) if name == model
    ]
    return hashlib.sha256(msgspec.json.encode(points)).hexdigest()
