"""Record how a plan came about: the candidates, the headroom, and its validation by simulation. Values only."""

from __future__ import annotations

from typing import Literal

import msgspec

Proof = Literal["optimal", "infeasible"]
End = Literal["proof", "work", "clock"]


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compare plans of one source for a plan; this is the best of them.

    source: a planner, a stage of one, or a variant of its problem, such as "geometry; targets x 0.8". value: what the
    objective counts of the best: devices, cost per hour, or the multiple of the rates, for evenly spaced requests; None
    where it was not worth finding out. unserved: requests/s that it leaves out. plans: how many there were. rejected:
    why the best was not taken; empty for the one that was.
    """

    source: str
    value: float | None
    unserved: float = 0.0
    plans: int = 1
    rejected: str = ""


class WorstAttainment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name the model or application whose SLO attainment is farthest below its objective, or nearest to it."""

    name: str
    attainment: float
    objective: float


class Validation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Summarise the validation of a plan by simulation. passed: whether no SLO was missed by more than chance explains.

    seeds: of the runs; a run ends early once its verdict is nearly certain. requests: answered or missed in them.
    plans, runs: simulated before this plan was chosen, its own included. worst: None without requests.
    """

    passed: bool
    seeds: tuple[int, ...]
    requests: int
    plans: int
    runs: int
    worst: WorstAttainment | None = None


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Record how a plan came about.

    source: the candidate that the plan was made from. candidates: all that were compared, at the rates and targets
    planned for. headroom: by model, the multiple of its rate that was planned for, above 1, so that random arrivals
    keep its SLO. slo_factors: by model, the fraction of its target that was planned for, below 1, for the same reason.
    validation: None where the plan was not simulated. request_s: seconds of a processor that a request was counted to
    take of the front end; None where nothing was. stage_s: processing time of the stages, in seconds. proven: that no
    plan is better ("optimal", for evenly spaced requests), or that none serves all rates ("infeasible"); None where
    neither was found out in the time. ended_by: what ended the search: that its plan is proven optimal, the work that
    the time limit allows, which is counted and the same in every run, or the clock, where the machine was too slow for
    that: then the plan may be another one in another run. None where the planner does not search.
    """

    source: str
    candidates: tuple[Candidate, ...] = ()
    headroom: dict[str, float] = {}
    slo_factors: dict[str, float] = {}
    validation: Validation | None = None
    request_s: float | None = None
    stage_s: dict[str, float] = {}
    proven: Proof | None = None
    ended_by: End | None = None
