"""Show profiles as tables and as figures: latency over batch and share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from cotenant.core.profile import Profile
from cotenant.core.units import show_seconds, show_share
from cotenant.render.figure import COLOURS, STYLES, figure_for, save_figure
from cotenant.render.table import table


def profile_table(profile: Profile) -> Table:
    """Tabulate the latency of each measured batch on each measured share."""
    batches = sorted({point.batch for point in profile.points})
    rows = table(f"{profile.model} on {profile.kind}", ">share", *(f">batch {batch}" for batch in batches))
    for share in profile.shares:
        measured = {point.batch: point.latency for point in profile.points if point.share == share}
        rows.add_row(
            show_share(share), *(show_seconds(measured[batch]) if batch in measured else "-" for batch in batches)
        )
    return rows


def save_profiles(profiles: Sequence[Profile], path: Path | str) -> None:
    """Draw latency over batch, a panel per model and a line per share. Raises ConfigError where it cannot be drawn."""
    path = Path(path)
    columns = min(3, max(1, len(profiles)))
    rows = -(-len(profiles) // columns)
    figure = figure_for(path, 4 * columns + 1, 3 * rows)
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = figure.subplots(rows, columns, squeeze=False).flat
    shares = sorted({share for profile in profiles for share in profile.shares})
    line_styles = dict(zip(shares, itertools.cycle(itertools.product(STYLES, COLOURS)), strict=False))
    lines = {}
    for profile, axes in zip(profiles, panels, strict=False):
        for share in profile.shares:
            style, colour = line_styles[share]
            points = [point for point in profile.points if point.share == share]
            (lines[share],) = axes.plot(
                [point.batch for point in points],
                [point.latency * 1e3 for point in points],
                style,
                marker=".",
                color=colour,
                label=show_share(share),
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.set_title(f"{profile.model} on {profile.kind}", loc="left", fontsize=10)
        axes.set_xlabel("batch, rows")
        axes.set_ylabel("latency, ms")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels:
        axes.set_visible(False)
    figure.legend(
        handles=[lines[share] for share in shares], loc="outside right upper", fontsize=8, title="share", frameon=False
    )
    save_figure(figure, path)
