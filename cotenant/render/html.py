"""Turn what is printed in a terminal into HTML: tables become tables, text becomes paragraphs, bars keep their columns.

Everything is escaped, and tags are closed and quoted as in XML, so that a strict parser reads the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

COLUMNS = 150  # of the terminal that renderables are asked for: wide enough for all of their columns
COLOURS = ("red", "green", "yellow")

_console = Console(width=COLUMNS, color_system="truecolor", force_terminal=False, file=None)
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_REPLACED = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})


def escaped(text: object) -> str:
    """Return text that is safe in an element or an attribute; what no document may hold becomes U+FFFD."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(text)).translate(_REPLACED)


def html_of(*renderables: RenderableType) -> str:
    """Return renderables as HTML, one below the other."""
    return "".join(_html(each) for each in renderables)


def _html(renderable: RenderableType) -> str:
    match renderable:
        case Table():
            return _table(renderable)
        case Group():
            return html_of(*renderable.renderables)
        case Text() | str():
            return _text(_as_text(renderable))
    # A class of ours that draws as wide as the terminal allows.
    parts: Iterable[RenderableType] = renderable.__rich_console__(_console, _console.options)  # type: ignore[union-attr, assignment]
    return html_of(*parts)


def _as_text(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else Text.from_markup(str(cell))


def _text(text: Text) -> str:
    if not text.plain.strip():
        return ""
    if _is_bar(text):
        return f'<pre class="bar">{_spans(text)}</pre>'
    return f"<p>{_spans(text)}</p>"


def _is_bar(text: Text) -> bool:
    """Return whether the text is drawn by backgrounds and columns, which have to stay as they are."""
    return any(_style(span.style).bgcolor is not None for span in text.spans) or "··" in text.plain


def _table(table: Table) -> str:
    lines = ['<div class="wide" tabindex="0" role="group"><table>']
    title = "" if table.title is None else _spans(_as_text(table.title))
    if title:
        lines.append(f"<caption>{title}</caption>")
    numeric = [' class="number"' if column.justify == "right" else "" for column in table.columns]
    heads = [_spans(_as_text(column.header)).replace("<br/>", " ") for column in table.columns]
    lines.append("<thead><tr>")
    lines += [
        f'<th scope="col"{number}>{head}</th>' if head else f"<td{number}></td>"
        for head, number in zip(heads, numeric, strict=True)
    ]
    lines.append("</tr></thead><tbody>")
    columns = [list(column.cells) for column in table.columns]
    for at, row in enumerate(table.rows):
        classes = [*_classes(_style(row.style or "")), *(["last"] if row.end_section else [])]
        lines.append(f'<tr class="{" ".join(classes)}">' if classes else "<tr>")
        lines += [
            f"<td{number}>{_spans(_as_text(cells[at]))}</td>" for cells, number in zip(columns, numeric, strict=True)
        ]
        lines.append("</tr>")
    lines.append("</tbody></table></div>")
    caption = "" if table.caption is None else _spans(_as_text(table.caption))
    return "".join(lines) + (f'<p class="note">{caption}</p>' if caption else "")


def _spans(text: Text) -> str:
    """Return text with its colours."""
    parts = []
    whole = _style(text.style)
    for segment in text.render(_console):
        style = whole + segment.style  # which knows of the whole only where there are spans
        content = escaped(segment.text).replace("\n", "<br/>")
        classes = " ".join(_classes(style))
        attributes = f' class="{classes}"' if classes else ""
        if style.bgcolor is not None:
            attributes += f' style="background: {style.bgcolor.get_truecolor().hex}; color: #000"'
        parts.append(f"<span{attributes}>{content}</span>" if attributes else content)
    return "".join(parts)


def _style(style: str | Style) -> Style:
    return style if isinstance(style, Style) else Style.parse(style)


def _classes(style: Style) -> list[str]:
    colour = "" if style.color is None else style.color.name
    return [
        *([colour] if colour in COLOURS else []),
        *(["bold"] if style.bold else []),
        *(["dim"] if style.dim else []),
    ]
