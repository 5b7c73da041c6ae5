"""Read published measurements of others, which are not part of Cotenant.

A module for each data set converts its files to `Profile`s and `Sample`s. Shares are per mille in these and percent in
all of the files; batches are rows; each module names the unit of its latencies.

The files lie as their authors published them, in a folder for each repository, `<owner>+<name>`, all of them in the
folder that is given, or that COTENANT_DATA names; by default `shared/data` next to a checkout, or `cotenant-data`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cotenant.core.profile import Profile
from cotenant.errors import ConfigError
from cotenant.predictors import Load


def default_folder(root: Path) -> Path:
    """Return the folder of all published files, where none is given. root: the folder that holds the package."""
    if named := os.environ.get("COTENANT_DATA"):
        return Path(named)
    return root.parent / "shared" / "data" if (root / "pyproject.toml").is_file() else Path("cotenant-data")


FOLDER = default_folder(Path(__file__).resolve().parents[2])


def lines(path: str, folder: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield the place (file and line, for messages) and the text of every non-empty line of a file below a folder, by
    default FOLDER.

    Raises ConfigError if the file does not exist.
    """
    place = folder or FOLDER
    file = place / path
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        name = path.partition("/")[0]
        raise ConfigError(
            f"{file} does not exist; it is of measurements that others have published, which are not part of Cotenant: "
            f"get https://github.com/{name.replace('+', '/', 1)} as {place / name}, or say with COTENANT_DATA which "
            f"folder has {name}"
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
