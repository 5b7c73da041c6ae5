"""What people see of a controller."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Plan


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, for people. time: in seconds of the controller's clock. action: what it did or found."""

    time: float
    action: str
    reason: str


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller knows of a model.

    planned: requests/s that its plan was made for, or gives it where no rate was known; sustained: that the plan can
    serve within the SLO. slowdown: of its batches against their profile and predictor, that the plan counts with.
    """

    offered: float
    planned: float
    sustained: float
    slowdown: float
    observed_slowdown: float
    attainment: float | None


class ControllerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """activity: "watching", "solving" or "rolling out", with the reason. short: what cannot be served, in words; empty
    where all can. observed_slowdown: of all batches of late, against what the plan in force predicts. decisions: the
    latest, oldest first."""

    activity: str
    reason: str
    short: str
    models: dict[str, ModelState]
    devices: tuple[DeviceId, ...]
    launching: dict[str, int]
    foreign_load: float | None
    observed_slowdown: float
    decisions: tuple[Decision, ...]


def decisions_since(decisions: Sequence[Decision], last: Decision | None) -> list[Decision]:
    """Return those of a controller's decisions that came after one, oldest first; None: all that it remembers."""
    fresh = itertools.takewhile(lambda decision: decision is not last, reversed(decisions))
    return list(fresh)[::-1]


def served_rates(plan: Plan, rates: Mapping[str, float], sustained: Mapping[str, float]) -> dict[str, float]:
    """Return up to which rates a plan serves each model, in requests/s: what it was made for, or sustains beyond that,
    or less where it leaves some unserved. rates: that it was made for."""
    return plan.rates() | {
        name: plan.rate(name) if name in plan.unserved else max(rate, sustained.get(name, 0.0))
        for name, rate in rates.items()
    }
