from __future__ import annotations

import math

import msgspec
import pytest

from cotenant.predictors import Load
from cotenant.predictors.online_corrections import MAX_STEP, ObservedRun, OnlineCorrections
from cotenant.predictors.samples import Sample

A, B = Load("a", "k", 4, 500), Load("b", "k", 4, 500)


def after(count: int, excess: float) -> OnlineCorrections:
    corrections = OnlineCorrections()
    for _ in range(count):
        corrections = corrections.observe(A, [B], excess)
    return corrections


def test_corrections_fade_with_batch_and_share() -> None:
    corrections = after(50, 0.4)
    same = corrections.of(A, [B], 1.0)
    assert same == pytest.approx(0.4, rel=0.05)
    for other in (Load("a", "k", 32, 500), Load("a", "k", 4, 1000)):
        assert abs(corrections.of(other, [B], 1.0)) < same / 2
    assert same > corrections.of(Load("a", "k", 5, 500), [B], 1.0) > 0.9 * same
    assert corrections.of(Load("c", "k", 4, 500), [B], 1.0) == 0.0
    assert corrections.of(A, [Load("c", "k", 4, 500)], 1.0) == 0.0


def test_corrections_of_one_batch_do_not_undo_those_of_another() -> None:
    small = Load("a", "k", 1, 500)
    corrections = after(20, 0.5)
    for _ in range(20):
        corrections = corrections.observe(small, [B], 0.0)
    assert corrections.of(A, [B], 0.1) > 0.4
    assert corrections.of(small, [B], 0.1) < 0.1


def test_one_outlier_moves_a_correction_by_a_step_only() -> None:
    assert after(1, math.log(500)).of(A, [B], 0.0) == pytest.approx(MAX_STEP)
    settled = after(30, 0.1)
    assert settled.observe(A, [B], math.log(500)).of(A, [B], 0.0) < 0.1 + 1.5 * MAX_STEP / 20


def test_corrections_have_no_order_of_colocated_loads() -> None:
    other = Load("c", "k", 1, 200)
    corrections = OnlineCorrections().observe(A, [other, B], 0.3)
    assert corrections.of(A, [B, other], 0.5) == corrections.of(A, [other, B], 0.5) > 0


def test_corrections_round_trip_and_read_files_with_names_alone() -> None:
    corrections = after(3, 0.2)
    read = msgspec.convert(msgspec.to_builtins(corrections.to_json()), list[ObservedRun])
    assert OnlineCorrections.from_file(read, []).of(A, [B], 0.5) == corrections.of(A, [B], 0.5)
    old = ObservedRun(0.2, 3.0, models=("a", "b"))
    assert OnlineCorrections.from_file([old], [Sample(A, (B,), 1.0, 1.1)]).of(A, [B], 0.5) == pytest.approx(0.6 / 3.5)
    assert OnlineCorrections.from_file([old], [Sample(B, (A,), 1.0, 1.1)]).of(A, [B], 0.5) == 0.0
