"""What figures of simulations and fleets show: read back from the SVG's text, and from what matplotlib was given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.measure.report import ModelReport, Report
from cotenant.measure.timeline import Timeline
from cotenant.render import charts, timeline_figure
from cotenant.render.charts import Series, save_capacity, save_growth
from cotenant.render.timeline_figure import save_timeline

pytest.importorskip("matplotlib", reason="needs the extra 'plot'")
import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.text import Annotation


@pytest.fixture(autouse=True)
def text_in_svg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """What was drawn."""
    drawn: list[Figure] = []
    for module in (charts, timeline_figure):
        save = module.save_figure

        def keep(figure: Figure, path: Path, save: Any = save) -> None:
            drawn.append(figure)
            save(figure, path)

        monkeypatch.setattr(module, "save_figure", keep)
    return drawn


def texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def timeline(names: list[str]) -> Timeline:
    def each(value: float) -> dict[str, list[float]]:
        return {name: [value] * 4 for name in names}

    return Timeline(
        step=1.0,
        offered=each(10.0),
        goodput=each(9.0),
        missed=each(1.0),
        p99={name: [0.01, None, 0.06, 0.02] for name in names},
        waiting=[1.0] * 4,
        busy=[0.5] * 4,
        devices=[1.0] * 4,
        cost=None,
    )


def report(names: list[str]) -> Report:
    rows = tuple(
        ModelReport(
            model=name,
            offered=10,
            served=10,
            goodput=9,
            attainment=0.9,
            required=0.99,
            target=0.05,
            mean=0.02,
            p50=0.02,
            p99=0.06,
            p999=0.06,
            outcomes={"served": 400},
        )
        for name in names
    )
    return Report(source="simulated", seconds=4.0, models=rows, timeline=timeline(names))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_timeline_has_panels_of_its_own_for_each_model(tmp_path: Path, figures: list[Figure], count: int) -> None:
    names = [f"model-{number}" for number in range(count)]
    save_timeline(report(names), tmp_path / "run.svg", dict.fromkeys(names, 0.05))
    shown = texts(tmp_path / "run.svg")
    assert sorted(text for text in shown if text.startswith("model-")) == names
    assert shown.count("target 50 ms") == count and shown.count("90.00 % of 99 %") == count
    lines = [len(axes.get_lines()) for axes in figures[0].axes if axes.get_visible()]
    assert max(lines) <= 2  # a series, and a target


def curves() -> list[Series]:
    x = [1.0, 1.1, 1.2]
    return [
        Series(label="a", x=x, y=[99.9, 99.5, 98.0], low=[99.0, 98.5, 95.0], high=[101.0, 100.4, 99.5]),
        Series(label="b", x=x, y=[5.0, 2.0, 1.0], low=[3.0, -1.0, -4.0], high=[6.0, 5.0, 4.0]),
    ]


def test_capacity_has_a_panel_for_each_model_and_bands_within_0_and_100(tmp_path: Path, figures: list[Figure]) -> None:
    save_capacity(curves(), tmp_path / "c.svg", required=99, capacity=1.1, low=1.05, high=1.15, title="4 cpu")
    shown = texts(tmp_path / "c.svg")
    assert {"a", "b", "its 95 % interval", "required", "4 cpu"} <= set(shown)
    bands = [axes.collections[0] for axes in figures[0].axes]
    heights = [float(y) for band in bands for path in band.get_paths() for y in np.asarray(path.vertices)[:, 1]]
    assert (min(heights), max(heights)) == (0.0, 100.0)


@pytest.mark.parametrize(("cost", "label"), [(True, "the cheapest: both"), (False, "the fewest: both")])
def test_growth_is_drawn_in_steps_and_names_the_best_choice(
    tmp_path: Path, figures: list[Figure], cost: bool, label: str
) -> None:
    lines = [Series(label="big alone", x=[1, 2], y=[4, 8]), Series(label="both", x=[1, 2], y=[3, 5])]
    bars = [Series(label="m", x=[99.5], y=[99.0], low=[98.0], high=[101.0])]
    save_growth(
        lines,
        bars,
        tmp_path / "g.svg",
        best="both",
        annotations=["3 big", "5 big"],
        cost=cost,
        per_multiple=10,
        title="2 × the rates",
    )
    assert {label, "big alone", "3 big", "5 big", "m"} <= set(texts(tmp_path / "g.svg"))
    growth, attained = figures[0].axes[:2]
    assert [line.get_drawstyle() for line in growth.get_lines()] == ["steps-pre", "default"] * 2
    assert max(float(np.max(np.asarray(line.get_xdata()))) for line in attained.get_lines()) == 100.0


def test_labels_of_lines_that_end_at_one_point_stand_above_each_other(tmp_path: Path, figures: list[Figure]) -> None:
    lines = [Series(label=name, x=[1.0, 2.0], y=[1.0, last]) for name, last in (("a", 2.0), ("b", 2.0), ("c", 2.0))]
    bar = Series(label="m", x=[100.0], y=[99.0], low=[100.0], high=[100.0])
    save_growth(
        lines,
        [bar],
        tmp_path / "growth.svg",
        best="b",
        annotations=["1 a", "2 a"],
        cost=True,
        per_multiple=10.0,
        title="two",
    )
    notes = [text for text in figures[0].axes[0].texts if isinstance(text, Annotation)]
    placed = {note.get_text(): note.xyann[1] for note in notes}
    assert placed["the cheapest: b"] == 0
    assert len({placed[name] for name in ("a", "the cheapest: b", "c")}) == 3
