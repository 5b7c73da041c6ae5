from __future__ import annotations

import math

import pytest

from cotenant.worker.jobs.pacer import Pacer


def run(pacer: Pacer, seconds: float, *, threads: float = 2.0, used: float = 0.0, now: float = 0.0) -> float:
    """Let a job that uses all it can be paced; return what it has used."""
    end = now + seconds
    while now < end:
        look = min(pacer.next_look(), end - now)
        now += look
        used += threads * look if pacer.runs else 0.0
        pacer.look(used, now)
    return used


@pytest.mark.parametrize("rate", [0.05, 0.3, 1.0, 1.7])
def test_job_gets_its_rate_on_average(rate: float) -> None:
    pacer = Pacer()
    pacer.grant(rate, 0.0, 0.0)
    assert run(pacer, 60.0) == pytest.approx(60 * rate, rel=0.03)


def test_share_of_zero_and_no_limit_need_no_looks() -> None:
    pacer = Pacer()
    assert not pacer.runs and pacer.next_look() == math.inf
    pacer.grant(math.inf, 0.0, 0.0)
    assert pacer.runs and pacer.next_look() == math.inf
    pacer.grant(0.0, 5.0, 1.0)
    assert not pacer.runs and pacer.next_look() == math.inf


def test_what_idle_moments_left_unused_is_caught_up_within_bounds() -> None:
    pacer = Pacer()
    pacer.grant(0.5, 0.0, 0.0)
    used = run(pacer, 10.0, threads=0.0)
    more = run(pacer, 1.0, used=used, now=10.0)
    assert 1.3 < more < 1.6  # a second's credit, and what it earns meanwhile


def test_time_without_a_limit_leaves_no_debt() -> None:
    pacer = Pacer()
    pacer.grant(math.inf, 0.0, 0.0)
    pacer.look(20.0, 10.0)
    pacer.grant(0.5, 20.0, 10.0)
    assert pacer.runs
