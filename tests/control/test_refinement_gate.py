"""When profiles may be refined while a server serves."""

from __future__ import annotations

import pytest

from cotenant.control.refinement_gate import MachineUse, RefinementGate

QUIET = MachineUse(foreign=0.05, own=0.05, changing=False)


def gate() -> RefinementGate:
    return RefinementGate(foreign=0.1, own=0.1, seconds=30.0)


def test_measurement_begins_once_the_machine_has_been_quiet_for_long_enough() -> None:
    measured = gate()
    seen = [measured.observe(QUIET, float(now)) for now in range(5, 37)]
    assert seen.index(True) == 30 and all(seen[30:])
    assert measured.reason == ""


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (QUIET._replace(foreign=0.11), "other programs use the processors"),
        (QUIET._replace(foreign=None), "what other programs use is not known"),
        (QUIET._replace(own=0.11), "requests are served"),
        (QUIET._replace(changing=True), "the plan is changing"),
        (QUIET._replace(jobs=True), "a best-effort job runs"),
    ],
)
def test_measurement_stops_at_once_and_waits_anew(use: MachineUse, reason: str) -> None:
    measured = gate()
    assert not measured.observe(QUIET, 0.0)
    assert measured.observe(QUIET, 30.0)
    assert not measured.observe(use, 30.5)
    assert measured.reason == reason
    assert not measured.observe(QUIET, 31.0)
    assert measured.reason == "the machine has been quiet for less than 30 s"
    assert not measured.observe(QUIET, 60.9)
    assert measured.observe(QUIET, 61.0)
