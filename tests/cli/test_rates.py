from __future__ import annotations

import pytest

from cotenant.cli.rates import chosen_rates
from cotenant.errors import ConfigError

PLANNED = {"a": 10.0, "b": 4.0}


def test_chosen_rates_none_given_are_the_planned_ones_scaled() -> None:
    assert chosen_rates(PLANNED, [], 1.5) == {"a": 15.0, "b": 6.0}


def test_chosen_rates_some_given_are_those_alone_scaled() -> None:
    assert chosen_rates(PLANNED, ["b=20"], 1.5) == {"b": 30.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", r"^--rate a: write MODEL=REQUESTS_PER_SECOND, such as resnet50=20$"),
        ("a=-1", r"^--rate a=-1: write MODEL=REQUESTS_PER_SECOND"),
        ("a=inf", r"^--rate a=inf: write MODEL=REQUESTS_PER_SECOND"),
        ("c=1", r"^--rate c=1: no model 'c'; available: a, b$"),
    ],
)
def test_chosen_rates_no_rate_or_unknown_model_raises_with_the_text(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_rates(PLANNED, [text], 1.0)
