"""The Horizontal Pod Autoscaler's rules, by the examples and the numbers of its documentation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.control.scaling import Observation
from cotenant.control.scaling.utilisation import UtilisationScaling
from tests.control.scaling.contexts import context


def seen(time: float, utilisation: float, ready: int, wanted: int | None = None) -> Observation:
    answer = {} if wanted is None else {"gpu": wanted}
    return Observation(time=time, seconds=15, utilisation=utilisation, ready={"gpu": ready}, wanted=answer)


@pytest.mark.parametrize(
    ("utilisation", "ready", "wanted"),
    [
        (0.8, 2, 4),  # twice the target doubles
        (0.2, 4, 2),  # half of it halves, with no earlier observation to hold it
        (0.43, 5, 5),  # within a tenth
        (0.45, 5, 6),
        (0.36, 5, 5),
        (0.34, 5, 5),  # ⌈4.25⌉
        (0.0, 3, 1),  # the last one stays
        (1.0, 3, 7),  # ⌈7.5⌉, but not more than four more
        (1.0, 7, 8),  # all there are
    ],
)
def test_one_decision(utilisation: float, ready: int, wanted: int) -> None:
    scale = UtilisationScaling(kind="gpu", target=0.4)
    assert scale(context([seen(15, utilisation, ready)], ready=ready)) == {"gpu": wanted}


def test_scale_down_waits_for_the_largest_wish_of_five_minutes() -> None:
    scale = UtilisationScaling(kind="gpu", target=0.5)
    history = [seen(15.0 * n, 0.75 if n == 1 else 0.1, 4, 4) for n in range(1, 22)]
    assert [scale(context(history[:n], ready=4))["gpu"] for n in (2, 20)] == [4, 4]
    assert scale(context(history[1:], ready=4)) == {"gpu": 1}


def test_devices_on_their_way_count_as_idle() -> None:
    scale = UtilisationScaling(kind="gpu", target=0.5)
    history = [seen(15, 0.75, 4)]
    assert scale(context(history, ready=4)) == {"gpu": 6}
    assert scale(context(history, ready=4, launching=2)) == {"gpu": 6}
    assert scale(context(history, ready=4, launching=1)) == {"gpu": 6}


def test_nothing_observed_changes_nothing() -> None:
    assert UtilisationScaling(kind="gpu")(context(ready=3)) == {"gpu": 3}
    assert UtilisationScaling(kind="gpu")(context([seen(15, 0.0, 0)], launching=2)) == {"gpu": 2}


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8)), min_size=1, max_size=30))
def test_wanted_is_within_bounds_and_rises_with_utilisation(points: list[tuple[float, int]]) -> None:
    scale = UtilisationScaling(kind="gpu")
    history = [seen(15.0 * n, *point) for n, point in enumerate(points, 1)]
    ready = points[-1][1]
    wanted = scale(context(history, ready=ready))["gpu"]
    assert 1 <= wanted <= 8
    busier = [*history[:-1], seen(history[-1].time, 1.0, ready)]
    assert scale(context(busier, ready=ready))["gpu"] >= wanted
