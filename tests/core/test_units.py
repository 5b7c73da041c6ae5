from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core import units
from cotenant.errors import ConfigError


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (units.parse_seconds, "25ms", 0.025),
        (units.parse_seconds, " 1.5 s ", 1.5),
        (units.parse_seconds, "3µs", 3e-6),
        (units.parse_seconds, "2min", 120.0),
        (units.parse_memory, "8GiB", 8 << 30),
        (units.parse_memory, "1.5mib", 3 << 19),
        (units.parse_memory, "500MB", 500_000_000),
        (units.parse_fraction, "99%", 0.99),
        (units.parse_fraction, "0.5", 0.5),
        (units.parse_fraction, 1, 1.0),
        (units.parse_share, 12.5, 125),
        (units.parse_share, 100, 1000),
    ],
)
def test_parse_of_common_notations_returns_base_units(read: Callable[..., float], text: Any, value: float) -> None:
    assert read(text, "here") == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (units.parse_seconds, "25", """here: '25' has no unit of time; write it as "25ms" or "1.5s\""""),
        (units.parse_seconds, "fast", "here: 'fast' is not a quantity"),
        (units.parse_seconds, "-1s", "here: '-1s' is not a quantity"),
        (units.parse_seconds, "1 GiB", "here: '1 GiB' has no unit of time"),
        (units.parse_memory, "8", "here: '8' has no unit of memory"),
        (units.parse_fraction, "101%", "here: '101%' must be above 0"),
        (units.parse_fraction, 0, "here: 0 must be above 0"),
        (units.parse_fraction, math.nan, "here: nan must be above 0"),
        (units.parse_share, 0, "here: a share of 0 % must be above 0 and at most 100"),
        (units.parse_share, 100.1, "here: a share of 100.1 % must be"),
        (units.parse_share, math.nan, "here: a share of nan % must be"),
        (units.parse_share, 0.01, "here: a share of 0.01 % is below the smallest, 0.1 %"),
    ],
)
def test_parse_of_other_text_raises_config_error_with_place(
    read: Callable[..., float], text: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        read(text, "here")


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (units.show_share(125), "12.5 %"),
        (units.show_share(1000), "100 %"),
        (units.show_share(142), "14.29 %"),
        (units.show_share(571), "57.14 %"),
        (units.show_seconds(0.0254), "25.4 ms"),
        (units.show_seconds(25.4e-6), "25.4 µs"),
        (units.show_seconds(2.0), "2 s"),
        (units.show_seconds(7200.0), "7200 s"),
        (units.show_seconds(0.0), "0 µs"),
        (units.show_seconds(math.inf), "never"),
        (units.show_memory(1610612736), "1.5 GiB"),
        (units.show_memory(512), "512 B"),
    ],
)
def test_show_of_quantities_includes_unit(shown: str, text: str) -> None:
    assert shown == text


def test_sevenths_of_a_device_are_shown_as_what_they_are() -> None:
    assert [units.part_of_device(share) for share in (0, 125, 142, 143, 857, 1000)] == [
        0,
        0.125,
        1 / 7,
        0.143,
        6 / 7,
        1,
    ]


@given(st.integers(1, 1000))
def test_show_share_parses_to_the_same_share(share: int) -> None:
    assert units.parse_share(float(units.show_share(share).split()[0]), "here") == share


@pytest.mark.parametrize(
    ("per_second", "text"), [(0, "0"), (0.5, "0.5"), (12.345, "12.3"), (999.6, "1000"), (20000.0, "20000")]
)
def test_show_rate_of_large_values_has_no_exponent(per_second: float, text: str) -> None:
    assert units.show_rate(per_second) == text
