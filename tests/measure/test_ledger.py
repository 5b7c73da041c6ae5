from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.request import Outcome, Request
from cotenant.measure.ledger import OutcomeLedger

cases_of_requests = st.tuples(
    st.sampled_from(Outcome),
    st.sampled_from(["", "late", "full"]),
    st.floats(0, 10),
    st.floats(1e-3, 1),
    st.floats(0, 2),
)


@given(st.lists(cases_of_requests, max_size=100))
def test_ledger_any_outcomes_equals_a_naive_count(cases: list[tuple[Outcome, str, float, float, float]]) -> None:
    ledger = OutcomeLedger()
    for outcome, reason, arrived, slo, took in cases:
        ledger.ended((Request(0, "m", arrived, arrived + slo),), outcome, arrived + took, reason)
    served = [case for case in cases if case[0] is Outcome.SERVED]
    within = sum(arrived + took <= arrived + slo for _, _, arrived, slo, took in served)
    stayed = sum(outcome is not Outcome.CANCELLED for outcome, *_ in cases)
    assert ledger.arrived == len(cases)
    assert ledger.served == ledger.latency.count == len(served)
    assert ledger.within_target == within
    assert ledger.outcomes == {outcome: sum(case[0] is outcome for case in cases) for outcome in Outcome}
    rejected = [case for case in cases if case[0] is Outcome.REJECTED]
    assert ledger.rejection_latency.count == len(rejected)
    assert ledger.reasons == {
        (outcome, reason): count
        for outcome in (Outcome.REJECTED, Outcome.EXPIRED)
        for reason in ("late", "full")
        if (count := sum(case[:2] == (outcome, reason) for case in cases))
    }
    assert ledger.attainment == (within / stayed if stayed else None)


@pytest.mark.parametrize("outcomes", [(), (Outcome.CANCELLED,)])
def test_ledger_attainment_of_nothing_is_none(outcomes: tuple[Outcome, ...]) -> None:
    ledger = OutcomeLedger()
    for outcome in outcomes:
        ledger.ended((Request(0, "m", 1.0, 2.0),), outcome, 1.5)
    assert ledger.attainment is None


def test_ledger_answer_at_the_deadline_is_within_the_target() -> None:
    ledger = OutcomeLedger()
    for now in (1.99, 2.0, 2.01):
        ledger.ended((Request(0, "m", 1.0, 2.0),), Outcome.SERVED, now)
    assert (ledger.within_target, ledger.attainment) == (2, 2 / 3)


def test_ledger_batches_add_up() -> None:
    ledger = OutcomeLedger()
    ledger.ran(3, 0.25, 0.5)
    ledger.ran(1, 0.25, 0.25)
    assert (ledger.batches, ledger.rows, ledger.predicted, ledger.observed) == (2, 4, 0.5, 0.75)
