"""`cotenant endpoint-picker`: what it refuses, and when it ends. What it does: tests/k8s/picker."""

from __future__ import annotations

import pytest

from cotenant.k8s.picker.poller import ReplicaPoller
from tests.cli.program import Program


def test_interval_in_which_a_servers_state_gets_too_old_is_refused(program: Program) -> None:
    assert program.refuses("endpoint-picker", "localhost:8000", "--interval", "2s") == (
        "--interval 2 s: must be at most 500 ms"
    )


def test_poller_that_breaks_ends_the_picker(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the picker would answer 503 for ever."""

    async def breaks(poller: ReplicaPoller) -> None:
        raise RuntimeError("the poller broke")

    monkeypatch.setattr(ReplicaPoller, "run", breaks)
    with pytest.raises(RuntimeError, match=r"^the poller broke$"):
        program("endpoint-picker", "127.0.0.1:8000", "--port=0", "--metrics-port=0")
