"""Faults by seed: whatever happens to workers, devices, callers, plans and the clock, each request ends once and in
time, no lane stays busy, and capacity comes back. `make test-slow` plays five times as many seeds, and `make chaos` any
number."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from cotenant.runtime import lane
from tests.chaos.schedule import BATCH_FAULTS, START_FAULTS, SYSTEM_FAULTS, Schedule, make, shrink
from tests.chaos.world import failure, play

SEEDS = 1000
AT_ONCE = 100
PART = 200  # which every run of the tests plays: the faults of `make mutants` that any seed shows fail within 40


@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=pytest.mark.slow if n >= PART else ()) for n in range(0, SEEDS, AT_ONCE)]
)
def test_faults_of_any_seed_leave_everything_answered_and_available(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        found = failure(make(seed))
        assert not found, found


def test_schedules_have_every_kind_of_fault() -> None:
    always, kinds = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for seed in range(SEEDS):
        steps = [(step.what, step.how) for step in make(seed).steps if step.what != "request"]
        kinds.update(steps)
        always.update(steps if seed < PART else ())
    named = {("batch", how) for how in BATCH_FAULTS} | {("start", how) for how in START_FAULTS}
    named |= {("system", how) for how in SYSTEM_FAULTS}
    named |= {(what, "") for what in ("kill", "hang-up", "lose", "jump", "full", "plan", "unload", "abort", "revive")}
    assert all(kinds[kind] >= 20 and always[kind] >= 4 for kind in named), (kinds, always)


def test_schedule_that_is_played_again_is_the_same_run() -> None:
    once, again = ([play(make(seed)).told for seed in range(10)] for _ in range(2))
    assert once == again and sum(map(len, once)) > 200


def test_failure_names_its_seed_and_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher that waits far too long for a batch that does not end."""
    monkeypatch.setattr(lane, "MIN_GRACE", 10.0)
    found = next(text for seed in range(100) if (text := failure(make(seed))))
    first, told, seed_line, *steps = found.splitlines()
    assert "after its deadline" in first and told.startswith("The shortest schedule that fails")
    assert seed_line.startswith("seed ") and 2 <= len(steps) <= 4, found
    assert sum("request" in step for step in steps) == 1


def test_shrunk_schedule_has_only_what_fails() -> None:
    def fails(schedule: Schedule) -> bool:
        whats = [step.what for step in schedule.steps]
        return whats.count("request") >= 2 and "plan" in whats

    long = msgspec.structs.replace(make(3), steps=make(3).steps + make(4).steps + make(5).steps)
    assert sorted(step.what for step in shrink(long, fails).steps) == ["plan", "request", "request"]
