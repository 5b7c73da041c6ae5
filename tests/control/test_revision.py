from __future__ import annotations

import pytest

from cotenant.control.revision import PlanRevision
from cotenant.core.plan import Plan
from cotenant.core.provenance import Provenance, Validation

VALIDATION = Validation(passed=True, seeds=(1, 2), requests=1000, plans=1, runs=2)


@pytest.mark.parametrize(
    ("provenance", "expected"),
    [(None, None), (Provenance(source="hand"), None), (Provenance(source="hand", validation=VALIDATION), VALIDATION)],
)
def test_validation_of_a_revision_is_that_of_its_plan(
    provenance: Provenance | None, expected: Validation | None
) -> None:
    assert PlanRevision(number=1, plan=Plan(planner="hand", provenance=provenance)).validation is expected
