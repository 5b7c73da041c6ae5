"""The key `interference` of a problem or of settings: which predictor says what neighbours cost."""

from __future__ import annotations

from typing import Any

from cotenant.errors import ConfigError
from cotenant.predictors import Alone, Interference, Margin


def read_interference(value: Any, place: str) -> Interference:
    if value == "alone":
        return Alone()
    if isinstance(value, dict) and value.get("model") == "margin":
        unknown = [key for key in value if key not in ("model", "factor")]
        factor = value.get("factor")
        if unknown or not isinstance(factor, int | float) or not 1 <= factor < float("inf"):
            raise ConfigError(f'{place}: a margin has a factor of at least 1: {{ model = "margin", factor = 1.2 }}')
        return Margin(float(factor))
    raise ConfigError(f"{place}: {value!r} is not known; take 'alone' or {{ model = \"margin\", factor = 1.2 }}")
