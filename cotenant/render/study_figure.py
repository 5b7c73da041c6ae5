"""Draw how planners compare: distance to the bound, attainment, work and churn, with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cotenant.planning.planner_study import Estimate, StudySummary
from cotenant.render.figure import COLOURS, FAINT, figure_for, save_figure

# Heading, what of a summary is drawn, the factor of its unit, and whether the axis is logarithmic.
Panel = tuple[str, Callable[[StudySummary], Estimate | None], float, bool]
PANELS: tuple[Panel, ...] = (
    ("above the proven bound, %", lambda each: each.distance, 100, False),
    ("rejected or late, %", lambda each: each.missed, 100, False),
    ("processor time of a plan, ms", lambda each: each.cpu_s, 1000, True),
    ("workers restarted, %", lambda each: each.churn, 100, False),
)
FLOOR = 1e-2  # of what is drawn on a logarithmic axis


def save_study(planners: Sequence[StudySummary], problems: Sequence[StudySummary], path: Path) -> None:
    """Draw a row for each planner: its mean over all problems with the 95 % interval, and a point for each problem.

    Raises ConfigError as `save_plan` does.
    """
    figure = figure_for(path, 11, 1.0 + 0.3 * len(planners))
    spots = figure.subplots(1, len(PANELS), sharey=True, squeeze=False)[0]
    names = list(dict.fromkeys(each.problem for each in problems))
    rows = {each.planner: i for i, each in enumerate(reversed(planners))}
    for axes, (heading, of, factor, logarithmic) in zip(spots, PANELS, strict=True):
        least = FLOOR if logarithmic else 0.0
        drawn = [least]
        for each in problems:
            estimate = of(each)
            if estimate is not None and each.planner in rows:
                number = names.index(each.problem)
                height = rows[each.planner] + 0.3 * ((number + 0.5) / len(names) - 0.5)
                x = max(least, estimate.mean * factor)
                drawn.append(x)
                axes.plot(x, height, ".", color=COLOURS[number % len(COLOURS)], markersize=3, alpha=0.6)
        for each in planners:
            estimate = of(each)
            if estimate is not None:
                mean, half = max(least, estimate.mean * factor), estimate.half * factor
                low = max(mean - half, mean / 10 if logarithmic else 0.0)  # else it would go on to minus infinity
                axes.plot([low, mean + half], [rows[each.planner]] * 2, color="black", linewidth=1.2)
                axes.plot(mean, rows[each.planner], "o", color="black", markersize=4)
        if logarithmic:
            axes.set_xscale("log")
        else:  # an interval of very few problems may go far beyond all of them
            axes.set_xlim(-0.05 * max(drawn), 1.05 * max(drawn) or 1.0)
        axes.set_title(heading, loc="left", fontsize=9)
        axes.grid(axis="both", color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    spots[0].set_yticks(list(rows.values()), list(rows), fontsize=8)
    save_figure(figure, path)
