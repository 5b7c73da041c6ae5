"""The Knative Pod Autoscaler's rules: stable and panic windows, limits of change, to zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cotenant.control.scaling import Observation, ScalingContext
from cotenant.control.scaling.concurrency import ConcurrencyScaling
from tests.control.scaling.contexts import context

SCALE = ConcurrencyScaling(kind="gpu", target=10.0, utilisation=1.0)


def seen(time: float, concurrency: float, ready: int, wanted: int | None = None) -> Observation:
    answer = {} if wanted is None else {"gpu": wanted}
    return Observation(time=time, seconds=2, concurrency={"a": concurrency}, ready={"gpu": ready}, wanted=answer)


def followed(
    concurrency: Callable[[float], float], until: float, scale: ConcurrencyScaling = SCALE, ready: int = 1
) -> dict[float, int]:
    """Return what is wanted by time, where devices are there at once. A period is 2 s."""
    history: list[Observation] = []
    wanted = {}
    for tick in range(1, int(until / 2) + 1):
        now = 2.0 * tick
        history.append(seen(now, concurrency(now), ready))
        kept = tuple(it for it in history if it.time >= now - scale.horizon)
        ready = scale(context(kept, ready=ready))["gpu"]
        history[-1] = seen(now, concurrency(now), history[-1].ready["gpu"], ready)
        wanted[now] = ready
    return wanted


def test_the_stable_window_is_averaged() -> None:
    def history(ready: int) -> list[Observation]:
        return [seen(2.0 * n, 20.0 if n <= 15 else 40.0, ready) for n in range(1, 31)]

    assert SCALE(context(history(3), ready=3)) == {"gpu": 3}
    assert SCALE(context(history(2), ready=2)) == {"gpu": 4}  # the panic window wants twice what is there


def test_a_burst_panics_and_scales_down_only_after_a_stable_window() -> None:
    wanted = followed(lambda now: 10.0 if now <= 100 or now > 110 else 75.0, 300)
    assert wanted[100] == 1
    assert wanted[102] == 4  # a third of the panic window is at 75, the rest at 10: ⌈31.7 / 10⌉
    assert max(wanted.values()) == wanted[106] == 8
    # Twice what is there was wanted at 102 s only: four were there at 104 s.
    assert max(time for time, count in wanted.items() if count == 8) == 102 + 60
    assert wanted[300] == 1


def test_it_shrinks_by_half_at_most() -> None:
    history = [seen(2.0 * n, 1.0, 8) for n in range(1, 31)]
    assert SCALE(context(history, ready=8)) == {"gpu": 4}


def test_zero_takes_a_whole_stable_window_without_requests() -> None:
    wanted = followed(lambda now: 5.0 if now <= 20 else 0.0, 120)
    assert wanted[78] == 1
    assert wanted[80] == 0
    kept = ConcurrencyScaling(kind="gpu", target=10.0, to_zero=False)
    assert followed(lambda now: 0.0, 120, kept)[120] == 1


def test_a_first_request_brings_a_device_back() -> None:
    wanted = followed(lambda now: 0.0 if now <= 200 else 1.0, 210)
    assert wanted[200] == 0
    assert wanted[202] == 1


@pytest.mark.parametrize("given", [context(), context(ready=3, launching=1)])
def test_nothing_observed_changes_nothing(given: ScalingContext) -> None:
    assert SCALE(given) == {"gpu": given.allocated("gpu")}
