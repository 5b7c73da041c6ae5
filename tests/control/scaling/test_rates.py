"""Which rates are planned for, and when they have moved."""

from __future__ import annotations

import pytest

from cotenant.control.scaling.rates import LATEST, TargetRateOptions, TargetRates


def test_rates_are_smoothed_and_get_headroom() -> None:
    rates = TargetRates(TargetRateOptions(weight=0.25))
    rates.observe({"a": 1000.0}, 20)
    assert rates.estimate == {"a": 1000.0}  # nothing to smooth it with
    assert rates.wanted() == {"a": 1200.0}
    rates.observe({"a": 2000.0}, 20)
    assert rates.wanted() == {"a": 1500.0}


def test_rises_are_extrapolated_and_falls_are_not() -> None:
    rates = TargetRates(TargetRateOptions(weight=1.0, ahead=40.0))
    wanted = []
    for rate in (1000.0, 1200.0, 800.0):
        rates.observe({"a": rate}, 20)
        wanted.append(rates.wanted()["a"])
    assert wanted == pytest.approx([1200.0, 1200 * 1.2 + 400 * 1.2, 960.0])


def test_low_rates_get_more_headroom() -> None:
    rates = TargetRates()
    rates.observe({"a": 100.0, "b": 125.0}, 20)
    assert rates.wanted() == {"a": 150.0, "b": 150.0}


@pytest.mark.parametrize(("rate", "moved"), [(424, False), (426, True), (376, False), (374, True)])
def test_rates_that_have_hardly_moved_are_the_same(rate: float, moved: bool) -> None:
    """500 were planned for, which is 416.7 with headroom: up by 10 requests/s, down by a tenth."""
    rates = TargetRates()
    rates.observe({"a": float(rate)}, 20)
    assert rates.moved(rates.wanted(), {"a": 500.0}) == moved


def test_rates_that_were_unknown_have_moved() -> None:
    assert TargetRates().moved({"a": 0.0}, {})
    assert not TargetRates().moved({"a": 0.0}, {"a": 0.0})


def test_latest_rates_follow_at_once() -> None:
    rates = TargetRates(LATEST)
    for rate in (100.0, 101.0):
        rates.observe({"a": rate}, 5)
    assert rates.wanted() == {"a": 101.0}
    assert rates.moved({"a": 101.0}, {"a": 100.0})
    assert rates.moved({"a": 99.0}, {"a": 100.0})
    assert not rates.moved({"a": 100.0}, {"a": 100.0})


def test_a_model_that_nobody_uses_any_more_gets_a_rate_of_zero() -> None:
    rates = TargetRates()
    for rate in (100.0, *[0.0] * 30):
        rates.observe({"a": rate}, 20)
    assert rates.wanted() == {"a": 0.0}
