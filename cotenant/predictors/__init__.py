"""Predict the interference of models that share a device: `slowdown(victim, colocated)`, and optional capabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import msgspec

from cotenant.core.profile import MAX_BATCH
from cotenant.core.units import WHOLE
from cotenant.errors import PlanError

if TYPE_CHECKING:
    from cotenant.core.profile import Profiles
    from cotenant.predictors.samples import Sample

REMEMBERED = 100_000  # slowdowns that one predictor caches
ANSWERS = "_answers"  # the attribute that caches them


class Load(msgspec.Struct, frozen=True, cache_hash=True):
    """Describe a victim or co-located model, which runs batches on a partition. kind: of the device. share: ‰ of it.

    Raises PlanError for a batch or share that none can have, NaN among them.
    """

    model: str
    kind: str
    batch: int
    share: int

    def __post_init__(self) -> None:
        if not (0 < self.batch <= MAX_BATCH and self.batch % 1 == 0):
            raise PlanError(f"model {self.model!r}: batch {self.batch} is not a whole number from 1 to {MAX_BATCH}")
        if not (0 < self.share <= WHOLE and self.share % 1 == 0):
            raise PlanError(f"model {self.model!r}: share {self.share} is not a whole number of ‰ from 1 to {WHOLE}")


def require(kind: str, load: Load) -> None:
    """Raise PlanError for a load on another kind of device than that of a predictor's samples."""
    if load.kind != kind:
        raise PlanError(
            f"model {load.model!r} on {load.kind!r}: this predictor was fitted to samples on {kind!r} and cannot"
            " predict for other kinds of device; plan for one kind, or use 'gaussian-process', which extrapolates"
        )


class Interference(Protocol):
    """Predict slowdowns.

    interferes: whether any load may ever slow another. If none may, planners search less: a device's partitions are
    independent.
    """

    @property
    def interferes(self) -> bool: ...

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Predict the victim's latency under co-location over its latency alone, at least 1."""
        ...


@runtime_checkable
class ProfileAware(Interference, Protocol):
    """Learn models without samples from their profiles."""

    def with_profiles(self, profiles: Profiles) -> Interference:
        """Return the predictor for the models of these profiles."""
        ...


@runtime_checkable
class OnlineLearner(Interference, Protocol):
    """Learn from measurements made after the predictor was fitted."""

    def observe(self, sample: Sample) -> Interference:
        """Return the predictor corrected by one more co-located run."""
        ...


@runtime_checkable
class ExtrapolationAware(Interference, Protocol):
    """Tell how far a load is from the samples of the fit."""

    def extrapolated_models(self, loads: Iterable[Load]) -> dict[str, str]:
        """Return model → why its slowdowns are extrapolated, for those of these loads whose slowdowns are."""
        ...


@runtime_checkable
class QuantilePredictor(Interference, Protocol):
    """Predict the distribution of a slowdown."""

    def with_quantile(self, quantile: float) -> Interference:
        """Return the predictor whose `slowdown` is that quantile of the distribution, between 0 and 1."""
        ...


def at_quantile(interference: Interference, quantile: float) -> Interference:
    """Return the predictor whose `slowdown` is a quantile; one without a distribution has the same at all of them."""
    return interference.with_quantile(quantile) if isinstance(interference, QuantilePredictor) else interference


@runtime_checkable
class BoundedBelow(Interference, Protocol):
    """Bound slowdowns from below before it is known which models are co-located, so that planners can prove bounds."""

    def least_slowdowns(self, victims: Sequence[Load], colocated: Sequence[Load], room: int) -> list[float]:
        """Return for each victim a slowdown that no one or more of the co-located loads go below, each as often as one
        likes, whose shares add up to at most `room` (‰)."""
        ...


class NoInterference:
    """Assume that co-located models do not slow each other."""

    interferes: ClassVar[bool] = False

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return 1.0


class ConstantMargin(msgspec.Struct, frozen=True):
    """Slow every co-located model by the same factor: a margin in place of a prediction."""

    factor: float

    @property
    def interferes(self) -> bool:
        return self.factor > 1

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return self.factor if colocated else 1.0

    def least_slowdowns(self, victims: Sequence[Load], colocated: Sequence[Load], room: int) -> list[float]:
        return [self.factor] * len(victims)


def remembered(slowdown: Callable[[Any, Load, Sequence[Load]], float]) -> Callable[[Any, Load, Sequence[Load]], float]:
    """Cache a `slowdown` method, and return 1 where nothing is co-located: planners call it many times for the same
    loads.

    The cache lives in the `__dict__` of the predictor, a value.
    """

    @functools.wraps(slowdown)
    def answer(self: Any, victim: Load, colocated: Sequence[Load]) -> float:
        if not colocated:
            return 1.0
        answers: dict[tuple[Load, ...], float] | None = self.__dict__.get(ANSWERS)
        if answers is None:
            answers = self.__dict__[ANSWERS] = {}
        asked = (victim, *colocated)
        known = answers.get(asked)
        if known is None:
            if len(answers) >= REMEMBERED:
                answers.clear()
            known = answers[asked] = slowdown(self, victim, colocated)
        return known

    return answer
