"""Workers that run in processor time that nobody else wants: what is asked of the system for a process that waits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cotenant.live.confinement import Confinement

if sys.platform != "linux":
    pytest.skip("only Linux has it", allow_module_level=True)


@pytest.mark.parametrize("background", [False, True])
def test_process_runs_in_the_background_where_it_is_asked_for_and_is_the_first_to_end_without_memory(
    background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda pid, policy, param: asked.append((pid, policy)))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            Confinement(background=background).apply(process.pid)
            score = Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip()
        finally:
            process.kill()
    assert asked == ([(process.pid, os.SCHED_IDLE)] if background else [])
    assert score == ("1000" if background else "500")
