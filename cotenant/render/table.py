"""Style all tables: narrow, for terminals of 80 columns, and folded rather than truncated in narrower ones."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

LONGEST = 24  # letters of a name


def table(title: str, *headings: str) -> Table:
    """Return an empty table. A heading that begins with ``>`` is that of a column of numbers; its words are stacked."""
    rows = Table(
        title=Text(title, no_wrap=True, overflow="ignore"),  # it may be wider than the table
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for heading in headings:
        if heading.startswith(">"):
            rows.add_column(heading[1:].replace(" ", "\n"), justify="right", overflow="fold")
        else:
            rows.add_column(heading, overflow="fold")
    return rows


def shorten_middle(name: str) -> str:
    """Shorten a long name in its middle: beginnings and ends tell names apart."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST // 2]}…{name[-(LONGEST // 2 - 1) :]}"
