"""Hold what is known of kinds of devices and of models, and make of pods the problems that rules are asked.

Pods may ask for one model within several targets, and a problem has one target a model. So a model within a target is
a model of the problem, named after both; profiles and predictors are asked for the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from cotenant.core.model import Kind, Model
from cotenant.core.profile import Profiles
from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.predictors import Interference, Load, at_quantile

MAX_ALIASES = 1000  # models within targets that are remembered though no pod may ask for them any more
MAX_LOADS = 100_000


class Catalogue:
    """Kinds of devices, profiles, and how co-located models slow each other."""

    def __init__(self, fleet: Sequence[Kind], profiles: Profiles, interference: Interference) -> None:
        self._fleet = tuple(fleet)
        self.kinds = {kind.name: kind for kind in fleet}
        self.profiles = profiles
        self._interference = interference
        self._models: dict[str, tuple[str, float]] = {}  # by alias, the model and its target
        self._problem: Problem | None = None

    @classmethod
    def of(cls, problem: Problem) -> Catalogue:
        """Take kinds, profiles and interference of a problem; its models and rates are those of pods."""
        return cls(problem.fleet, problem.profiles, problem.interference)

    def knows(self, model: str) -> bool:
        """Return whether a model has a profile on any kind."""
        return any((model, kind) in self.profiles for kind in self.kinds)

    def alias(self, model: str, slo: float) -> str:
        """Return the name of a model within a target, in the problem."""
        name = f"{model} within {slo:g} s"
        if name not in self._models:
            self._models[name] = (model, slo)
            self._problem = None
        return name

    def problem(self) -> Problem:
        """Return the problem with all models that have been named."""
        if self._problem is None:
            names = {alias: model for alias, (model, _) in self._models.items()}
            self._problem = Problem(
                models=tuple(Model(name=alias, slo=slo) for alias, (_, slo) in self._models.items()),
                rates={},
                fleet=self._fleet,
                profiles={
                    (alias, kind): self.profiles[model, kind]
                    for alias, model in names.items()
                    for kind in self.kinds
                    if (model, kind) in self.profiles
                },
                interference=_Aliased(self._interference, names),
                arrivals="even",
            )
        return self._problem

    def forget(self) -> bool:
        """Forget all names where they have become many; return whether they were."""
        if len(self._models) <= MAX_ALIASES:
            return False
        self._models.clear()
        self._problem = None
        return True


class _Aliased:
    """Ask a predictor for the models that aliases stand for. What it has no samples of slows without bound: it gets no
    partition beside others, and other pods are placed as ever."""

    def __init__(self, inner: Interference, models: dict[str, str]) -> None:
        self._inner = inner
        self._models = models
        self._loads: dict[Load, Load] = {}

    @property
    def interferes(self) -> bool:
        return self._inner.interferes

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        try:
            return self._inner.slowdown(self._named(victim), tuple(map(self._named, colocated)))
        except PlanError:
            return math.inf if colocated else 1.0

    def with_quantile(self, quantile: float) -> _Aliased:
        return _Aliased(at_quantile(self._inner, quantile), self._models)

    def _named(self, load: Load) -> Load:
        named = self._loads.get(load)
        if named is None:
            if len(self._loads) >= MAX_LOADS:
                self._loads.clear()
            named = self._loads[load] = msgspec.structs.replace(load, model=self._models[load.model])
        return named
