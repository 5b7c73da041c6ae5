"""Define the input of every planner: a validated `Problem`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Literal, get_args

import msgspec

from cotenant.core import mig
from cotenant.core.application import Application
from cotenant.core.background_job import BackgroundJob
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Profile, Profiles
from cotenant.core.units import WHOLE
from cotenant.errors import PlanError
from cotenant.planners.front_end import FrontEnd
from cotenant.planners.policy import Policy
from cotenant.predictors import Interference, NoInterference

Objective = Literal["devices", "rate"]
Arrivals = Literal["poisson", "even"]


class Problem(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Hold everything that a planner may need.

    rates: requests/s from outside, by model or application. objective: "devices" asks for the fewest devices (the least
    cost, where they have prices) that serve the rates, "rate" for the largest multiple of the rates that the fleet can
    serve. profiles: (model, kind) → Profile. current: the plan in force, if any. time_limit: seconds that
    `geometry` may search for a better plan, by its own count of work, and `inss` trains where it has no policy; other
    planners, `ideal` too, ignore it. clock: seconds since some moment, by which it stops as well (None: by the count
    alone). bounded: whether to spend time on proving a tight bound. applications: graphs of these models; planners
    never see any, since their targets are split over the models first. assumed: models and applications whose rate
    nobody knows; each gets one worker where that is possible. front_end: what requests cost besides; None: nothing.
    policy: of a planner that learns; None: it trains for the problem. arrivals: "poisson" leaves room for random
    arrivals and validates plans by simulation; "even" plans for evenly spaced requests, as the papers' planners do.
    jobs: best-effort jobs, which are placed on what a plan leaves idle; planners never see any.
    """

    models: tuple[Model, ...]
    rates: dict[str, float]
    fleet: tuple[Kind, ...]
    profiles: Profiles
    objective: Objective = "devices"
    interference: Interference = msgspec.field(default_factory=NoInterference)
    current: Plan | None = None
    time_limit: float = 5.0
    clock: Callable[[], float] | None = None
    bounded: bool = True
    applications: tuple[Application, ...] = ()
    assumed: frozenset[str] = frozenset()
    front_end: FrontEnd | None = None
    policy: Policy | None = None
    arrivals: Arrivals = "poisson"
    jobs: tuple[BackgroundJob, ...] = ()

    @cached_property
    def _by_name(self) -> dict[str, Model]:
        return {model.name: model for model in self.models}

    def __post_init__(self) -> None:
        """Raise PlanError for values that make no sense, so that planners need not check them."""
        if self.objective not in get_args(Objective):
            raise PlanError(f"unknown objective {self.objective!r}; available: {' and '.join(get_args(Objective))}")
        if self.arrivals not in get_args(Arrivals):
            raise PlanError(f"unknown arrivals {self.arrivals!r}; available: {' and '.join(get_args(Arrivals))}")
        _once("model", [model.name for model in self.models])
        _once("kind of device", [kind.name for kind in self.fleet])
        _once("job", [job.name for job in self.jobs])
        for model in self.models:
            where = f"model {model.name!r}"
            if not 0 < model.slo < math.inf:
                raise PlanError(f"{where}: a target of {model.slo:g} s must be above 0 and finite")
            if not 0 < model.attainment <= 1:
                raise PlanError(f"{where}: attainment {model.attainment:g} must be above 0 and at most 1")
            if model.max_batch is not None and model.max_batch < 1:
                raise PlanError(f"{where}: a largest batch of {model.max_batch} must be at least 1")
        names = {model.name for model in self.models}
        for application in self.applications:
            if application.name in names:
                raise PlanError(f"application {application.name!r}: the name is taken; give it another")
            names.add(application.name)
            for stage in application.stages:
                self.model(stage.model)
        for name, rate in self.rates.items():
            if name not in names:
                self.model(name)  # says which there are
            if not (math.isfinite(rate) and rate >= 0):
                raise PlanError(f"model {name!r}: a rate of {rate:g} requests/s must be finite and at least 0")
        for kind in self.fleet:
            where = f"kind {kind.name!r}"
            if kind.count is not None and kind.count < 0:
                raise PlanError(f"{where}: a count of {kind.count} must be at least 0")
            if kind.max_partitions is not None and kind.max_partitions < 1:
                raise PlanError(f"{where}: max_partitions {kind.max_partitions} must be at least 1")
            if not kind.cuts or list(kind.cuts) != sorted(set(kind.cuts)) or kind.cuts[0] < 1 or kind.cuts[-1] > WHOLE:
                raise PlanError(f"{where}: the cuts {kind.cuts} must ascend, from at least 1 to at most {WHOLE} ‰")
            if kind.geometry is not None:
                if not mig.is_known_geometry(kind.geometry):
                    known = ", ".join(mig.GEOMETRIES)
                    raise PlanError(f"{where}: no MIG geometry {kind.geometry!r}; available: {known}")
                if not set(kind.cuts) <= set(legal := mig.instance_shares(kind.geometry)):
                    raise PlanError(f"{where}: the cuts {kind.cuts} are not all shares of MIG instances, {legal} ‰")

    def model(self, name: str) -> Model:
        model = self._by_name.get(name)
        if model is None:
            raise PlanError(f"unknown model {name!r} in this problem; it has {', '.join(m.name for m in self.models)}")
        return model

    def kind(self, name: str) -> Kind:
        for kind in self.fleet:
            if kind.name == name:
                return kind
        raise PlanError(f"no devices of kind {name!r} in this problem")

    def profile(self, model: str, kind: str) -> Profile | None:
        return self.profiles.get((model, kind))


def _once(what: str, names: list[str]) -> None:
    seen = set[str]()
    for name in names:
        if name in seen:
            raise PlanError(f"two entries for the {what} {name!r}; list each once")
        seen.add(name)
