"""What a controller is told and what it asks for: values only, so that a log of them replays its decisions.

Nothing here holds profiles: whoever solves has the models, their profiles and the predictor, and is told what is
different from them now.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cotenant.control.revision import RolloutOutcome
from cotenant.core.identity import DeviceId
from cotenant.core.plan import Plan

# Events: what happened.


class BatchLatency(msgspec.Struct, frozen=True):
    """The batches of a model that ended since the last observation.

    predicted, observed: seconds, in sum over `batches`; predicted as the plan in force has them. Batches that ran on
    lent share are left out: they are faster than a plan may count on.
    """

    batches: int
    predicted: float
    observed: float


class Observed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was seen since the last observation.

    seconds: since then. offered: rows of requests that arrived, by model or application, whatever became of them: one
    of ten rows costs what ten of one row do. Those that applications make themselves are not counted. stayed,
    within_target: of the requests that ended, those whose caller stayed, and those that met their target. waiting:
    requests that have not ended. latencies: of batches, by model.
    foreign_load: part of the machine's processors that other programs used, from 0 to 1; None where that is not known.
    interrupted: models and applications whose batches a worker's death may have delayed: one of theirs died, was
    expected back or warmed up meanwhile, or one of a model that they share a partition with.
    utilisation: part of the allocated share during which batches ran.
    """

    seconds: float
    offered: dict[str, int]
    stayed: dict[str, int] = {}
    within_target: dict[str, int] = {}
    waiting: dict[str, int] = {}
    latencies: dict[str, BatchLatency] = {}
    foreign_load: float | None = None
    interrupted: tuple[str, ...] = ()
    utilisation: float = 0.0


class Adopted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A revision is in force that the controller did not ask for: the first one, a reload, a model loaded or unloaded.

    rates: requests/s that its plan was made for, by model or application; a model that is missing has an unknown rate.
    slowdowns: that its plan counts with, as in `Solve`. targets: by model or application, the fraction of requests that
    must meet its target, where that is not known yet. corrections: of profiles, as in `CorrectProfile`, those that are
    known from before.
    """

    plan: Plan
    rates: dict[str, float]
    slowdowns: dict[str, float] = {}
    targets: dict[str, float] = {}
    corrections: dict[str, float] = {}


class SolveStep(StrEnum):
    """How far a solver had to go. keep: the plan in force serves the new rates. retune: other batches and rates in the
    same partitions, which no worker notices. replan: other partitions."""

    KEEP = "keep"
    RETUNE = "retune"
    REPLAN = "replan"


class Solved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a `Solve`.

    plan: for the devices that are there; it passes `check`. None: there is none, for the reason of `error`. devices:
    how many of each kind are wanted for these rates, whether they are there yet or not. rates: that the plan was made
    for, which are less than was asked where that could not be served. sustained: by model or
    application, the rate up to which the plan keeps its SLO. short: what is left unserved, in words; empty where
    nothing is. seconds: that solving took. outdated: there is none since another revision is on its way, which is no
    failure. slowed: the plan counts with the slowdowns that were asked for, as it does unless they leave nobody served.
    """

    number: int
    step: SolveStep = SolveStep.REPLAN
    plan: Plan | None = None
    devices: dict[str, int] = {}
    rates: dict[str, float] = {}
    sustained: dict[str, float] = {}
    short: str = ""
    error: str = ""
    seconds: float = 0.0
    outdated: bool = False
    slowed: bool = True


class RollEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rollout that a `Roll` asked for has ended. seconds: from the request until the new lanes were in force, or
    until it failed."""

    number: int
    outcome: RolloutOutcome
    reason: str = ""
    seconds: float = 0.0


class DevicesFound(msgspec.Struct, frozen=True, tag=True):
    """These devices can be used from now on: acquired, or restored."""

    devices: tuple[DeviceId, ...]


class DevicesGone(msgspec.Struct, frozen=True, tag=True):
    """These devices cannot be used any more: lost, or released."""

    devices: tuple[DeviceId, ...]
    reason: str = ""


class AcquisitionFailed(msgspec.Struct, frozen=True, tag=True):
    """A provider does not give devices that `Acquire` asked for."""

    kind: str
    count: int
    reason: str


ControllerEvent = Observed | Adopted | Solved | RollEnded | DevicesFound | DevicesGone | AcquisitionFailed

# Commands: what to do.


class Cause(StrEnum):
    """Why to plan anew, the most urgent first."""

    DEVICES = "devices"
    RATE = "rate"
    LATENCY = "latency"
    SLO = "slo"
    SAVING = "saving"


class Solve(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Find a plan, elsewhere, and answer by `Solved`, in any case.

    rates: requests/s to plan for, by model or application; offered: what is offered now, which is less. slowdowns: how
    much longer batches take than profiled, for reasons that no profile or predictor knows, by model; 1 where a model is
    missing. current: the plan in force. devices: those that are there. launching: by kind, how many more are on their
    way. step: the first to try. fill: use all devices, for the largest multiple of the rates that they serve, instead
    of the fewest that serve the rates. bursts: the rates are those of bursts, between which next to nothing is offered:
    the fewest devices give them all that they have. cause, reason: why, for programs and for people.
    """

    number: int
    rates: dict[str, float]
    offered: dict[str, float] = {}
    slowdowns: dict[str, float] = {}
    current: Plan
    devices: tuple[DeviceId, ...]
    launching: dict[str, int] = {}
    step: SolveStep = SolveStep.KEEP
    fill: bool = False
    bursts: bool = False
    cause: Cause = Cause.RATE
    reason: str = ""


class Roll(msgspec.Struct, frozen=True, tag=True):
    """Go over to a plan by a rollout, and answer by `RollEnded`. rates, slowdowns: as in `Adopted`."""

    number: int
    plan: Plan
    rates: dict[str, float]
    reason: str
    slowdowns: dict[str, float] = {}


class Acquire(msgspec.Struct, frozen=True, tag=True):
    """Get so many more devices of a kind; answered by `DevicesFound` or `AcquisitionFailed`, which may take minutes."""

    kind: str
    count: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Give devices back, on which nothing runs; answered by `DevicesGone`."""

    devices: tuple[DeviceId, ...]


class CorrectProfile(msgspec.Struct, frozen=True, tag=True):
    """Multiply the latencies that were measured of a model, for plans to come: as many batches, with nothing else on
    the machine, took so many times as long. factor: at least 1, which takes an earlier correction back."""

    model: str
    factor: float
    batches: int


ControllerCommand = Solve | Roll | Acquire | Release | CorrectProfile
