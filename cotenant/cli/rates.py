"""Parse rates given on the command line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from cotenant.errors import ConfigError


def chosen_rates(planned: Mapping[str, float], given: Iterable[str], scale: float) -> dict[str, float]:
    """Return requests/s by model: `scale` times the planned ones, or those given as ``MODEL=RATE`` and no others."""
    rates = {}
    for text in given:
        name, equals, number = text.rpartition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = -1.0
        if not equals or not 0 <= rate < math.inf:
            raise ConfigError(f"--rate {text}: write MODEL=REQUESTS_PER_SECOND, such as resnet50=20")
        if name not in planned:
            raise ConfigError(f"--rate {text}: no model {name!r}; available: {', '.join(planned) or 'none'}")
        rates[name] = rate
    return {name: rate * scale for name, rate in (rates or planned).items()}
