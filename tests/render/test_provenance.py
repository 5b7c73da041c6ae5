from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cotenant.core.plan import Plan
from cotenant.core.provenance import Candidate, End, Provenance, Validation, WorstAttainment
from cotenant.render.provenance import provenance_view
from tests.render.plans import PLAN, shown

PROVENANCE = Provenance(
    source="elastic",
    candidates=(
        Candidate(source="geometry, ruin and recreate", value=5.0, plans=7, rejected="needs more devices"),
        Candidate(source="elastic", value=4.0),
        Candidate(source="squishy", value=None, unserved=3.0, rejected="serves less in total"),
    ),
    headroom={"digits": 1.15, "bert": 1.15, "resnet50": 1.3225},
    slo_factors={"digits": 0.9, "bert": 0.9, "resnet50": 0.9},
    validation=Validation(
        passed=False,
        seeds=(0, 1),
        requests=12345,
        plans=3,
        runs=5,
        worst=WorstAttainment(name="bert", attainment=0.987, objective=0.99),
    ),
    stage_s={"slo_budget": 0.001, "candidates": 1.5, "headroom": 0.02, "validation": 0.25},
)


def test_provenance_view_lists_candidates_and_why_they_were_rejected() -> None:
    rows = [line.split() for line in shown(provenance_view(with_provenance())).splitlines()]
    assert ["geometry,", "ruin", "and", "recreate", "7", "5", "-", "needs", "more", "devices"] in rows
    assert ["elastic", "1", "4", "-", "chosen"] in rows
    assert ["squishy", "1", "-", "3", "serves", "less", "in", "total"] in rows


def test_provenance_view_says_what_was_planned_for_and_what_validation_saw() -> None:
    lines = shown(provenance_view(with_provenance())).splitlines()
    assert "headroom: digits and bert planned for 1.15 x the rate" in lines
    assert "headroom: resnet50 planned for 1.32 x the rate" in lines
    assert "tightened: all models planned for 0.9 x the target" in lines
    assert (
        "validation: SLO violated in 12,345 simulated requests (seeds 0, 1); worst: bert 98.7 % for 99 %;"
        " 3 plans simulated in 5 runs"
    ) in lines
    assert "time: candidates 1.5 s, headroom and local search 20 ms, validation 250 ms, SLO budgets 1 ms" in lines


@pytest.mark.parametrize(
    ("ended_by", "words"),
    [("proof", "by the proof"), ("work", "every run gives this plan"), ("clock", "another run may give another plan")],
)
def test_provenance_view_says_what_ended_the_search(ended_by: End, words: str) -> None:
    (line,) = [
        line for line in shown(provenance_view(with_provenance(ended_by=ended_by))).splitlines() if "search: " in line
    ]
    assert words in line


def test_provenance_view_of_a_plan_that_was_not_simulated_says_so() -> None:
    lines = shown(provenance_view(with_provenance(validation=None, headroom={}, slo_factors={}))).splitlines()
    assert "validation: none" in lines
    assert not [line for line in lines if line.startswith(("headroom:", "tightened:"))]


def test_provenance_view_of_a_plan_without_one_says_so() -> None:
    assert shown(provenance_view(PLAN)) == "why this plan: its file does not say how it came about\n"


def with_provenance(**changes: Any) -> Plan:
    return msgspec.structs.replace(PLAN, provenance=msgspec.structs.replace(PROVENANCE, **changes))
