"""Faults of many machines by seed: links that are cut, silent or slow, nodes and front ends that die, freeze and come
back, other versions. Each request ends once, each device has one owner, each cut is noticed within a second, and all is
served again in the end. `make test-slow` plays four times as many seeds, and `make chaos` any number."""

from __future__ import annotations

from collections import Counter

import pytest

from cotenant.live.nodes import link
from tests.chaos.cluster.schedule import FRONT_END_FAULTS, NET_FAULTS, NODE_FAULTS, make
from tests.chaos.cluster.world import failure, play

SEEDS = 200
AT_ONCE = 25
PART = 50  # which every run of the tests plays


@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=pytest.mark.slow if n >= PART else ()) for n in range(0, SEEDS, AT_ONCE)]
)
def test_faults_of_machines_of_any_seed_leave_one_owner_and_everything_answered(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        found = failure(make(seed))
        assert not found, found


def test_schedules_of_machines_have_every_kind_of_fault() -> None:
    always, kinds = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for seed in range(SEEDS):
        steps = [(step.what, step.how) for step in make(seed).steps if step.what != "request"]
        kinds.update(steps)
        always.update(steps if seed < PART else ())
    named = {("net", how) for how in NET_FAULTS} | {("node", how) for how in NODE_FAULTS}
    named |= {("takeover", how) for how in FRONT_END_FAULTS}
    named |= {(what, "") for what in ("kill", "lose", "dismiss", "plan", "unload", "leave")}
    assert all(kinds[kind] >= 20 and always[kind] >= 4 for kind in named), (kinds, always)


def test_schedule_of_machines_that_is_played_again_is_the_same_run() -> None:
    once, again = ([play(make(seed)).told for seed in range(6)] for _ in range(2))
    assert once == again and sum(map(len, once)) > 200


def test_failure_of_machines_names_its_seed_and_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is silent for too long before it is cut."""
    monkeypatch.setattr(link, "SILENCE", 1.7)
    found = next(text for seed in range(100) if (text := failure(make(seed))))
    first, told, seed_line, *steps = found.splitlines()
    assert "it has not noticed within 1 s" in first and told.startswith("The shortest schedule that fails")
    assert seed_line.startswith("seed ") and len(steps) == 1 and ("net hole" in steps[0] or "node " in steps[0]), found
