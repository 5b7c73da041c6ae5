"""Measurements that others published, which the experiments read where they lie: none of them comes with Cotenant.

A module for each data set turns its files into `Profile`s. Shares are legal ‰ inside and percent in all of these files;
batches are rows; how long, in what unit, says each module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from cotenant.core.profile import Profile
from cotenant.errors import ConfigError
from cotenant.predictors import Load

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data"  # beside the checkout


def lines(path: str) -> Iterator[tuple[str, str]]:
    """Place (file and line, for messages) and text of every line of a file below FOLDER that has any text.

    Raises ConfigError where the file is not there.
    """
    file = FOLDER / path
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        owner = path.partition("/")[0].replace("+", "/", 1)
        raise ConfigError(
            f"{file}: is not there; the experiments read what {owner} measured, which does not come with Cotenant: "
            f"put its files there, or see docs/reproduction.md for what they are and what was made of them"
        ) from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"{file}:{number}", line


def numbers(place: str, *texts: str) -> tuple[float, ...]:
    try:
        return tuple(float(text) for text in texts)
    except ValueError:
        raise ConfigError(f"{place}: {', '.join(texts)}: numbers were expected here") from None


def alone(profiles: Iterable[Profile]) -> dict[Load, float]:
    """Seconds as they were measured, which a profile's curves are not where they had to be made monotone."""
    return {
        Load(each.model, each.kind, point.batch, point.share): point.latency
        for each in profiles
        for point in each.points
    }
