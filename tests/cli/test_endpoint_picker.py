"""`cotenant endpoint-picker`: what it refuses. What it does: tests/k8s/picker."""

from __future__ import annotations

from tests.cli.program import Program


def test_interval_in_which_a_servers_state_gets_too_old_is_refused(program: Program) -> None:
    assert program.refuses("endpoint-picker", "localhost:8000", "--interval", "2s") == (
        "--interval 2 s: must be at most 500 ms"
    )
