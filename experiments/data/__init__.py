"""Read published measurements of others, which are not part of Cotenant.

A module for each data set converts its files to `Profile`s. Shares are per mille in `Profile`s and percent in all of
these files; batches are rows; each module names the unit of its latencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from cotenant.core.profile import Profile
from cotenant.errors import ConfigError
from cotenant.predictors import Load

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data"  # next to the checkout


def lines(path: str) -> Iterator[tuple[str, str]]:
    """Yield the place (file and line, for messages) and the text of every non-empty line of a file below FOLDER.

    Raises ConfigError if the file does not exist.
    """
    file = FOLDER / path
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        owner = path.partition("/")[0].replace("+", "/", 1)
        raise ConfigError(
            f"{file} does not exist; the experiments read measurements by {owner}, which are not part of Cotenant: "
            f"put its files there; docs/reproduction.md describes them and the results"
        ) from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"{file}:{number}", line


def numbers(place: str, *texts: str) -> tuple[float, ...]:
    """Convert texts to numbers. Raises ConfigError naming `place`."""
    try:
        return tuple(float(text) for text in texts)
    except ValueError:
        raise ConfigError(f"{place}: {', '.join(texts)}: expected numbers") from None


def alone(profiles: Iterable[Profile]) -> dict[Load, float]:
    """Return measured latencies in seconds; a profile's own curves differ where they had to be made monotone."""
    return {
        Load(each.model, each.kind, point.batch, point.share): point.latency
        for each in profiles
        for point in each.points
    }
