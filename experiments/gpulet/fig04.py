"""Reproduce Figure 4: latency by share, for several batches, on GPUs that were measured by others.

Section 3.1: the larger the batch, the more a larger share helps; small batches gain nothing beyond a small share. The
paper gives no number in its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.core.profile import Profile
from cotenant.errors import ConfigError
from cotenant.published import a100, v100
from cotenant.render.figure import COLOURS, figure_for, save_figure
from experiments.parallel import Options

TITLE = "latency by share and batch, ms (gpulet, Figure 4)"
SHARES = (200, 400, 500, 600, 800)  # at which all batches were measured on either GPU
BATCHES = (1, 8, 32)
PROFILES = {"v100": v100.profiles, "a100": a100.profiles}


class Row(msgspec.Struct, frozen=True):
    """Hold milliseconds of a batch by share in percent. gain: of 80 % over 20 %."""

    profiles: str
    model: str
    batch: int
    at_20: float
    at_40: float
    at_50: float
    at_60: float
    at_80: float
    gain: float


def run(options: Options) -> list[Row]:
    """Read latencies. Raises ConfigError for profiles that there are not."""
    for name in options.profiles:
        if name not in PROFILES:
            raise ConfigError(f"--profiles {name}: no such profiles; available: {' or '.join(PROFILES)}")
    return [
        _row(name, profile, batch)
        for name in options.profiles or PROFILES
        for profile in PROFILES[name]().values()
        for batch in BATCHES
    ]


def _row(name: str, profile: Profile, batch: int) -> Row:
    at_20, at_40, at_50, at_60, at_80 = (1e3 * profile.latency(batch, share) for share in SHARES)
    return Row(name, profile.model, batch, at_20, at_40, at_50, at_60, at_80, at_20 / at_80)


def plot(rows: Sequence[Row], path: Path) -> None:
    models = list(dict.fromkeys((row.profiles, row.model) for row in rows))
    columns = min(len(models), 5)
    figure = figure_for(path, 2.3 * columns, 2.1 * -(-len(models) // columns) + 0.4)
    spots = list(figure.subplots(-(-len(models) // columns), columns, squeeze=False).flat)
    for axes, (name, model) in zip(spots, models, strict=False):
        for row in rows:
            if (row.profiles, row.model) == (name, model):
                ms = [row.at_20, row.at_40, row.at_50, row.at_60, row.at_80]
                colour = COLOURS[BATCHES.index(row.batch)]
                axes.plot([share / 10 for share in SHARES], ms, ".-", color=colour, label=f"batch {row.batch}")
        axes.set_yscale("log")
        axes.set_title(f"{model}, {name}", loc="left", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.tick_params(which="minor", labelleft=False)
        axes.set_ylim(0.7, 500)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in spots[len(models) :]:
        axes.set_visible(False)
    figure.axes[0].legend(fontsize=6, frameon=False)
    figure.supxlabel("share, %", fontsize=8)
    figure.supylabel("ms", fontsize=8)
    save_figure(figure, path)
