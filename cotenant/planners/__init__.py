"""What a planner is: a function from a `Problem` to a `Plan`. To add one: a file here, and a line in PLANNERS."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Literal

import msgspec

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Profile, Profiles
from cotenant.errors import PlanError
from cotenant.predictors import Alone, Interference

Objective = Literal["devices", "rate"]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that any planner may need.

    rates: requests per second of each model, by name. objective: "devices" asks for the fewest devices (the least
    cost, where they have prices) that serve the rates, "rate" for the largest multiple of the rates that the fleet
    can serve. profiles: (model, kind) → Profile. current: the plan in force, if any.
    """

    models: tuple[Model, ...]
    rates: dict[str, float]
    fleet: tuple[Kind, ...]
    profiles: Profiles
    objective: Objective = "devices"
    interference: Interference = msgspec.field(default_factory=Alone)
    current: Plan | None = None

    def model(self, name: str) -> Model:
        for model in self.models:
            if model.name == name:
                return model
        raise PlanError(f"no model {name!r} in this problem; it has {', '.join(m.name for m in self.models)}")

    def kind(self, name: str) -> Kind:
        for kind in self.fleet:
            if kind.name == name:
                return kind
        raise PlanError(f"no devices of kind {name!r} in this problem")

    def profile(self, model: str, kind: str) -> Profile | None:
        return self.profiles.get((model, kind))


Planner = Callable[[Problem], Plan]

# Name → module with a function `plan(problem) -> Plan`, loaded on use.
PLANNERS: dict[str, str] = {
    "squishy": "cotenant.planners.squishy",
    "elastic": "cotenant.planners.elastic",
}


def load(name: str) -> Planner:
    """The planner of that name. Raises PlanError, listing the known ones."""
    if name not in PLANNERS:
        raise PlanError(f"no planner {name!r}; there are {', '.join(sorted(PLANNERS))}")
    planner: Planner = importlib.import_module(PLANNERS[name]).plan
    return planner
