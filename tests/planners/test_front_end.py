from __future__ import annotations

import pytest

from cotenant.planners.front_end import MAX_UTILISATION, FrontEnd, cores_of


def test_front_end_reads_as_many_requests_as_one_processor_allows() -> None:
    assert FrontEnd(seconds=1e-3).max_rate == pytest.approx(MAX_UTILISATION * 1000)


def test_front_end_takes_nothing_from_models_within_its_reserve() -> None:
    assert FrontEnd(seconds=1e-3, reserved=0.3, processors=1.7).slowdown(300) == 1.0


def test_front_end_beyond_its_reserve_slows_models_by_what_it_takes() -> None:
    front_end = FrontEnd(seconds=1e-3, reserved=0.3, processors=1.0)
    assert front_end.slowdown(550) == pytest.approx(1 / 0.75)  # 0.55 processors, 0.25 of them from models
    assert front_end.slowdown(1e9) == pytest.approx(10.0)


def test_front_end_beside_gpus_slows_no_model() -> None:
    assert FrontEnd(seconds=1e-3).slowdown(690) == 1.0


def test_cores_are_those_of_models_and_those_kept_for_the_front_end() -> None:
    assert cores_of(1.7, None) == (0, 1) and cores_of(1.0, None) == (0,)
    assert cores_of(3.4, FrontEnd(reserved=0.6, processors=3.4)) == (0, 1, 2, 3)
    assert cores_of(2.0, FrontEnd(reserved=2.0, processors=2.0)) == (0, 1, 2, 3)
