from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.live.foreign_load import TICK
from cotenant.live.jobs import idle_share
from cotenant.live.jobs.idle_share import IdleMeter, memory_for_jobs


def used(proc: Path, first: float, second: float, other: float = 0.0) -> None:
    """Write what the processors have been busy for, in seconds; the third is not one of ours."""
    lines = [f"cpu{core} {round(busy * TICK)} 0 0 999 0 0 0 0" for core, busy in enumerate((first, second, other))]
    (proc / "stat").write_text("\n".join(["cpu 1 2 3", *lines, "intr 1"]))


def test_idle_is_what_others_leave_and_jobs_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {7: 0.0}
    monkeypatch.setattr(idle_share, "descendants", lambda pid: [])
    monkeypatch.setattr(idle_share, "processor_seconds", lambda pids: sum(seconds[pid] for pid in pids))
    meter = IdleMeter((0, 1), 2.0, tmp_path)
    used(tmp_path, 10.0, 10.0)
    assert meter.read(0.0, [7]) is None
    used(tmp_path, 10.5, 11.0, 50.0)
    seconds[7] = 1.0
    assert meter.read(1.0, [7]) == 750  # 1.5 of 2 processors are in use, 1 of them by the job


def test_idle_share_stays_within_the_whole(tmp_path: Path) -> None:
    meter = IdleMeter((0, 1), 1.0, tmp_path)
    used(tmp_path, 0.0, 0.0)
    meter.read(0.0, [])
    used(tmp_path, 1.0, 1.0)
    assert meter.read(1.0, []) == 0


def test_share_of_long_ago_is_forgotten(tmp_path: Path) -> None:
    meter = IdleMeter((0, 1), 2.0, tmp_path)
    for now in (0.0, 1.0):
        used(tmp_path, now, now)
        meter.read(now, [])
    meter.forget()
    assert meter.read(5000.0, []) is None
    used(tmp_path, 1.0, 2.0)
    assert meter.read(5001.0, []) == 500


def test_system_that_does_not_tell_is_unknown(tmp_path: Path) -> None:
    meter = IdleMeter((0,), 1.0, tmp_path)
    assert meter.read(0.0, []) is None and meter.read(1.0, []) is None
    assert memory_for_jobs([], tmp_path) is None


def test_jobs_may_have_what_is_available_but_for_a_reserve(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\nHugePages_Total:\n")
    assert memory_for_jobs([], tmp_path) == 350 << 10
