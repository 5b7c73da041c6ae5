"""Hold the planners whose plans compete with those of the geometry planner's search, as a portfolio configures them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners.problem import Problem
from cotenant.planners.registry import Planner


class ExhaustivePlanner(Protocol):
    """Enumerate the plans of few devices, such as the module `ideal`.

    MAX_DEVICES: up to how many it does.
    """

    @property
    def MAX_DEVICES(self) -> int: ...  # noqa: N802

    def plan(self, problem: Problem) -> Plan: ...

    def feasible(self, problem: Problem) -> Plan | None:
        """Return a plan that serves the rates with all devices; None where none was found."""
        ...


class Competitors(msgspec.Struct, frozen=True):
    """Hold planners that compete.

    quick: planners by name that answer within milliseconds. exhaustive: tried last under interference, which the search
    only estimates and an enumeration evaluates.
    """

    quick: Mapping[str, Planner] = {}
    exhaustive: ExhaustivePlanner | None = None


ALONE = Competitors()
