"""Read quantities as an API server gives them back: ``1000`` may come as ``1k``."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from cotenant.errors import ClaimError


def read_quantity(text: object, place: str) -> int:
    """Return a quantity that has to be a whole number of at least 0. Raises ClaimError."""
    value = _parsed(text)
    if value is None or value < 0 or value != int(value):
        raise ClaimError(f"{place}: {text!r} is not a whole number of at least 0")
    return int(value)


def is_same_quantity(one: object, other: object) -> bool:
    """Return whether two texts are the same quantity, however they are written."""
    return one == other or ((value := _parsed(one)) is not None and value == _parsed(other))


def is_same_capacity(one: Any, other: Any) -> bool:
    """Return whether two capacities of a device are the same, in values and policies of requests."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same_capacity(one[key], other[key]) for key in one)
    return is_same_quantity(one, other)


def _parsed(text: object) -> Decimal | None:
    from lightkube.utils.quantity import parse_quantity

    if isinstance(text, int) and not isinstance(text, bool):
        return Decimal(text)
    if not isinstance(text, str):
        return None
    try:
        return parse_quantity(text)
    except ValueError:
        return None
