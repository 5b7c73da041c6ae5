"""Parse and format quantities as people write them (``"25ms"``, ``"40%"``, ``"8GiB"``).

Internally, durations are seconds, memory is bytes, and a share is an integer number of thousandths of a device (‰):
shares are compared and hashed, and a thousandth of a core is the familiar millicore.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from cotenant.errors import ConfigError

WHOLE = 1000  # one device, in thousandths
SEVENTH_TOLERANCE = 0.005  # percent of a device by which a share may differ from sevenths, to two digits, and be them

_LARGEST = 1e15  # in any unit: 30 million years, or more memory than exists; far from overflow
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ%]*)\s*")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def _split(text: str, place: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ConfigError(f"{place}: {text!r} is not a quantity; write it as {example}")
    if float(match[1]) > _LARGEST:
        raise ConfigError(f"{place}: {text!r} is out of range; write it as {example}")
    return float(match[1]), match[2]


def parse_seconds(text: str, place: str) -> float:
    """Parse a duration: ``"25ms"`` → 0.025. Raises ConfigError, also for a bare number, whose unit is ambiguous."""
    value, unit = _split(text, place, '"25ms" or "1.5s"')
    if unit not in _SECONDS:
        raise ConfigError(f'{place}: {text!r} has no unit of time; write it as "25ms" or "1.5s"')
    return value * _SECONDS[unit]


def parse_memory(text: str, place: str) -> int:
    """Parse an amount of memory: ``"8GiB"`` → 8589934592. Raises ConfigError."""
    value, unit = _split(text, place, '"8GiB" or "500MiB"')
    if unit.lower() not in _BYTES:
        raise ConfigError(f'{place}: {text!r} has no unit of memory; write it as "8GiB" or "500MiB"')
    return round(value * _BYTES[unit.lower()])


def parse_fraction(text: str | float, place: str) -> float:
    """Parse a fraction above 0 and at most 1: ``"99%"`` → 0.99; ``0.99`` stays. Raises ConfigError."""
    if isinstance(text, str):
        value, unit = _split(text, place, '"99%" or 0.99')
        if unit not in ("", "%"):
            raise ConfigError(f'{place}: {text!r} is not a fraction; write it as "99%" or 0.99')
        value = value / 100 if unit == "%" else value
    else:
        value = float(text)
    if not 0 < value <= 1:
        raise ConfigError(f"{place}: {text!r} must be above 0 and at most 1 (100%)")
    return value


def parse_share(percent: float, place: str) -> int:
    """Convert a share in percent to thousandths: 12.5 → 125. Raises ConfigError outside 0.1 to 100 %.

    A seventh of a device is rounded down, as in core/mig.py, however many digits are written: 14.2857 and 14.29 → 142.
    """
    if not (math.isfinite(percent) and 0 < percent <= 100):
        raise ConfigError(f"{place}: a share of {percent:g} % must be above 0 and at most 100")
    sevenths = round(percent * 7 / 100)
    if 0 < sevenths < 7 and abs(percent - sevenths * 100 / 7) < SEVENTH_TOLERANCE:
        return WHOLE * sevenths // 7
    thousandths = round(percent * 10)
    if thousandths == 0:
        raise ConfigError(f"{place}: a share of {percent:g} % is below the smallest, 0.1 %")
    return thousandths


def show_share(thousandths: int) -> str:
    """Format a share: 125 → ``12.5 %``, and a seventh, which is rounded down, in full: 142 → ``14.29 %``."""
    return f"{100 * part_of_device(thousandths):.4g} %"


def part_of_device(thousandths: int) -> float:
    """Return the part that a share is of its device, from 0 to 1: 125 → 0.125, and 142 → one seventh."""
    sevenths = -(-thousandths * 7 // WHOLE)
    return sevenths / 7 if thousandths == WHOLE * sevenths // 7 else thousandths / WHOLE


def show_seconds(value: float) -> str:
    """Format a duration with three significant digits in a suitable unit: 0.0254 → ``25.4 ms``, 7200 → ``7200 s``."""
    if not math.isfinite(value):
        return "never" if value > 0 else "-"
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{show_rate(value)} s"


def show_rate(per_second: float) -> str:
    """Format with three significant digits, or all before the point: 12.345 → ``12.3``, 20000 → ``20000``."""
    return f"{per_second:.3g}" if per_second < 999.5 else f"{per_second:.0f}"


def show_memory(value: float) -> str:
    """Format an amount of memory: 1610612736 → ``1.5 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def show_count(count: int | str, one: str, many: str = "") -> str:
    """Format a count: 1, ``device`` → ``1 device``; 2 → ``2 devices``. many: the plural, if irregular."""
    return f"{count} {one if str(count) == '1' else many or one + 's'}"


def show_names(names: Sequence[str]) -> str:
    """Join one or more names as in a sentence: ``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
