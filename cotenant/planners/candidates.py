"""Record how a plan came about (`Plan.provenance`)."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from cotenant.core.plan import Plan
from cotenant.core.provenance import Candidate, Proof, Provenance

PROOF_TOLERANCE = 1e-6  # relative, by which a plan may miss its bound and be optimal


def objective_value(plan: Plan) -> float:
    """Return what the objective counts: the multiple of the rates, cost per hour, or devices."""
    if plan.objective == "rate":
        return plan.scale
    return float(plan.devices_used) if plan.cost_per_hour is None else plan.cost_per_hour


def with_proof(plan: Plan, *, infeasible: bool = False) -> Plan:
    """Return the plan with what its bound proves of it; infeasible: it is proven that no plan serves all rates."""
    reached = plan.bound is not None and (
        plan.scale >= plan.bound * (1 - PROOF_TOLERANCE)
        if plan.objective == "rate"
        else not plan.unserved and objective_value(plan) <= plan.bound * (1 + PROOF_TOLERANCE)
    )
    proven: Proof | None = "infeasible" if infeasible and plan.unserved else "optimal" if reached else None
    return with_provenance(plan, proven=proven)


def without_proof(plan: Plan) -> Plan:
    """Return the plan without its bound and what is known of its search: kept for other rates, neither holds."""
    plan = msgspec.structs.replace(plan, bound=None)
    return plan if plan.provenance is None else with_provenance(plan, proven=None, ended_by=None)


def provenance_of(plan: Plan) -> Provenance:
    """Return a plan's provenance; where its planner records none, the plan as its only candidate."""
    if plan.provenance is not None:
        return plan.provenance
    only = Candidate(source=plan.planner, value=objective_value(plan), unserved=math.fsum(plan.unserved.values()))
    return Provenance(source=plan.planner, candidates=(only,))


def with_provenance(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with these fields of its provenance changed."""
    return msgspec.structs.replace(plan, provenance=msgspec.structs.replace(provenance_of(plan), **changes))
