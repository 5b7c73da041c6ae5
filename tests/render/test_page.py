"""A report is one page: strict, by itself, and whatever names hold stays text."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from base64 import b64decode
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group
from rich.text import Text

import cotenant.render.page
from cotenant.render.html import html_of
from cotenant.render.page import Listing, Origin, Picture, ReportPage, Section, SourceFile, drawn, page_html
from cotenant.render.plan_table import plan_bars
from cotenant.render.table import table
from tests.render.plans import PLAN

NASTY = "<script>alert('1')</script> & \"q\" </style></title>-->"
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'/>"


def page(name: str = "digits", *sections: Section) -> ReportPage:
    origin = Origin(
        command=f"cotenant plan {name}",
        made=datetime(2026, 11, 23, 10, 0, tzinfo=UTC),
        facts={"version": "cotenant 1", "machine": name},
        files=(SourceFile(name=name, size=3, digest="ab" * 32),),
    )
    return ReportPage(title=name, question=name, answer=(name, "It fits."), good=True, sections=sections, origin=origin)


def everything(name: str) -> Section:
    rows = table(f"about {name}", "model", ">rate /s", "")
    rows.title = Text(f"about {name}")
    rows.add_row(Text(name), Text(name, style="red"), "[green]5[/]", style="bold", end_section=True)
    rows.caption = Text(name)
    parts = (rows, Text(name), Picture(svg=SVG, shows=name), Listing(name=name, text=name))
    return Section(heading=name, parts=parts)


def parsed(text: str) -> ET.Element:
    """Every tag closed and every attribute quoted, as a parser of XML demands: stricter than HTML's own."""
    doctype, _, rest = text.partition("\n")
    assert doctype == "<!DOCTYPE html>"
    return ET.fromstring(rest)  # noqa: S314  # ours


def test_page_of_everything_parses_strictly_and_fetches_nothing() -> None:
    root = parsed(page_html(page("digits", everything("digits"))))
    assert root.get("lang") == "en"
    assert [element.text for element in root.iter("h1")] == ["digits"]
    assert not [
        element for element in root.iter() if element.tag in ("script", "link", "iframe", "object", "form", "a")
    ]
    (image,) = root.iter("img")
    kind, _, data = str(image.get("src")).partition(",")
    assert (kind, b64decode(data), image.get("alt")) == ("data:image/svg+xml;base64", SVG, "digits")
    style = "".join(element.text or "" for element in root.iter("style"))
    assert "url(" not in style and "@import" not in style
    policies = [element.get("content", "") for element in root.iter("meta") if element.get("http-equiv")]
    assert len(policies) == 1 and policies[0].startswith("default-src 'none'; img-src data:;")
    assert "prefers-color-scheme: dark" in style and "@media print" in style


def test_answer_stands_before_everything_else() -> None:
    root = parsed(page_html(page("digits", everything("digits"))))
    first, second, *_, last = root.iter("section")
    assert [element.text for element in first.iter("p")] == ["digits", "It fits."]
    assert first.get("class") == "answer good"
    assert [element.text for element in second.iter("h2")] == ["digits"]
    assert [element.text for element in last.iter("pre")] == ["cotenant plan digits"]
    assert [element.text for element in last.iter("code")] == ["ab" * 32]


def test_names_with_markup_stay_text() -> None:
    root = parsed(page_html(page(NASTY, everything(NASTY))))
    plain = parsed(page_html(page("digits", everything("digits"))))
    assert [element.tag for element in root.iter()] == [element.tag for element in plain.iter()]
    said = [
        "".join(element.itertext())
        for element in root.iter()
        if element.tag in ("h1", "title", "h2", "td", "dd", "pre")
    ]
    assert sum(NASTY in text for text in said) >= 8


@given(st.text())
def test_any_name_makes_a_page_that_parses(name: str) -> None:
    root = parsed(page_html(page(name, everything(name))))
    assert len(list(root.iter("h1"))) == 1


def test_table_keeps_cells_columns_and_colours() -> None:
    rows = table("sizes", "model", ">rate /s")
    rows.add_row("digits", "[red]12[/]", end_section=True)
    rows.add_row("minilm", Text("3", style="dim"), style="bold")
    root = ET.fromstring(html_of(rows))  # noqa: S314
    assert [("".join(head.itertext()), head.get("class")) for head in root.iter("th")] == [
        ("model", None),
        ("rate /s", "number"),
    ]
    assert ["".join(cell.itertext()) for cell in root.iter("td")] == ["digits", "12", "minilm", "3"]
    assert [element.get("class") for element in root.iter("span")] == ["red", "dim"]
    assert [row.get("class") for row in root.iter("tr")] == [None, "last", "bold"]


def test_small_picture_is_not_stretched() -> None:
    for width, style in (("340.5pt", "small"), ("792pt", None)):
        svg = f'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="9pt"/>'.encode()
        section = Section(heading="a", parts=(Picture(svg=svg, shows="a"),))
        assert [image.get("class") for image in parsed(page_html(page("a", section))).iter("img")] == [style]


def test_bars_of_a_plan_keep_their_columns() -> None:
    shown = html_of(Group(plan_bars(PLAN)))
    root = ET.fromstring(f"<div>{shown}</div>")  # noqa: S314
    bars = ["".join(bar.itertext()) for bar in root.iter("pre")]
    assert bars and len({len(bar) for bar in bars}) == 1
    assert "background: #" in shown


def test_figure_without_matplotlib_is_a_line_that_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(path: Path) -> None:
        path.write_bytes(SVG)

    assert drawn(draw, "a plan") == Picture(svg=SVG, shows="a plan")
    monkeypatch.setattr(cotenant.render.page, "find_spec", lambda _: None)
    line = drawn(draw, "a plan")
    assert isinstance(line, str) and "cotenant[plot]" in html_of(line)
