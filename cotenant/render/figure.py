"""Provide what all figures need: colours, formats, and atomic writing."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, distinct for colour-blind readers.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#9A8C98")
STYLES = ("-", "--", ":")  # combined with COLOURS, that many lines are distinct
FAINT = "#E3E6E9"  # of grids, and of lines in the background
VIOLATION = "#B00020"  # of targets, and of what misses them


def check_drawable(path: Path) -> None:
    """Raise ConfigError for a path that cannot be drawn: call it before long work. Reasons: suffix, no matplotlib."""
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"{path}: cannot draw a {path.suffix or 'file without suffix'}; use .svg, .png or .pdf")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{path}: drawing needs matplotlib; install `cotenant[plot]`")


def figure_for(path: Path, width: float, height: float) -> Figure:
    """Return an empty figure, its size in inches. Raises ConfigError as `check_drawable` does."""
    check_drawable(path)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure whole or, where that fails, leave what was there. Raises ConfigError."""
    part = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(part, dpi=150, format=path.suffix[1:])
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
