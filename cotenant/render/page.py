"""Write the result of a command as one page to send to somebody: the question, the answer, tables, pictures, and how to
make it again.

The page is a file by itself: it fetches nothing, needs no script, follows the reader's light or dark theme, is readable
on a telephone and can be printed.
"""

from __future__ import annotations

import re
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import msgspec
from rich.console import RenderableType

from cotenant.render.html import escaped, html_of

# Pictures are part of the page, styles stand in it: a browser has nothing to fetch, and is told not to.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
HEAD = 2000  # bytes of a picture, within which it says its width
SMALL = 500  # points of width below which a picture is not stretched
_WIDTH = re.compile(rb'<svg[^>]* width="([\d.]+)pt"')
_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a drawing. svg: its file; shows: what is seen, for readers who do not see it, and below it for all."""

    svg: bytes
    shows: str


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a text that is shown as it is, once it is unfolded: a file that the answer depends on, or the answer's."""

    name: str
    text: str


Part = RenderableType | Picture | Listing


class Section(msgspec.Struct, frozen=True, kw_only=True):
    heading: str
    parts: tuple[Part, ...]


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """Name a file that the answer depends on. size: bytes; digest: SHA-256 of its content, in hexadecimal digits."""

    name: str
    size: int
    digest: str


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Say how a page came about. command: as a shell reads it. facts: by what they are about, such as the machine."""

    command: str
    made: datetime
    facts: Mapping[str, str]
    files: tuple[SourceFile, ...] = ()


class ReportPage(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a report. question: what was asked, in a sentence. answer: sentences, each a paragraph. good: whether the
    answer is what one hopes for; None where there is nothing to hope for."""

    title: str
    question: str
    answer: tuple[str, ...]
    good: bool | None
    sections: tuple[Section, ...]
    origin: Origin


def drawn(draw: Callable[[Path], None], shows: str) -> Picture | str:
    """Return the picture that a function draws into a file, or a line that says why there is none."""
    if find_spec("matplotlib") is None:
        return "No picture: drawing needs matplotlib; install `cotenant\\[plot]`."
    with tempfile.TemporaryDirectory(prefix="cotenant-") as folder:
        path = Path(folder) / "picture.svg"
        draw(path)
        return Picture(svg=path.read_bytes(), shows=shows)


def page_html(page: ReportPage) -> str:
    """Return the page as a file's text."""
    verdict = {True: "good", False: "bad", None: "plain"}[page.good]
    made = page.origin.made.strftime("%Y-%m-%d %H:%M %Z").strip()
    lines = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>',
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(POLICY)}"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        '<meta name="color-scheme" content="light dark"/>',
        f"<title>{escaped(page.title)}</title><style>{_STYLE}</style></head><body><main>",
        f"<header><h1>{escaped(page.title)}</h1><p>{escaped(page.question)}</p></header>",
        f'<section class="answer {verdict}"><h2>Answer</h2>',
        *(f"<p>{escaped(sentence)}</p>" for sentence in page.answer),
        "</section>",
        *map(_section, page.sections),
        _origin(page.origin),
        f"</main><footer><p>{escaped(page.origin.facts.get('version', 'cotenant'))}, {escaped(made)}</p></footer>",
        "</body></html>\n",
    ]
    return "\n".join(lines)


def _section(section: Section) -> str:
    return f"<section><h2>{escaped(section.heading)}</h2>{''.join(map(_part, section.parts))}</section>"


def _part(part: Part) -> str:
    match part:
        case Picture():
            data = b64encode(part.svg).decode()
            width = _WIDTH.search(part.svg[:HEAD])
            small = ' class="small"' if width is not None and float(width[1]) < SMALL else ""
            image = f'<img{small} alt="{escaped(part.shows)}" src="data:image/svg+xml;base64,{data}"/>'
            below = f"<figcaption>{escaped(part.shows)}</figcaption>"
            return f'<figure><div class="wide" tabindex="0" role="group">{image}</div>{below}</figure>'
        case Listing():
            return f"<details><summary>{escaped(part.name)}</summary><pre>{escaped(part.text)}</pre></details>"
    return html_of(part)


def _origin(origin: Origin) -> str:
    facts = [("made", origin.made.isoformat(timespec="seconds")), *origin.facts.items()]
    return "".join(
        [
            "<section><h2>Make it again</h2>",
            f"<pre>{escaped(origin.command)}</pre><dl>",
            *(f"<dt>{escaped(name)}</dt><dd>{escaped(text)}</dd>" for name, text in facts),
            "</dl>",
            _files(origin.files),
            "</section>",
        ]
    )


def _files(files: Iterable[SourceFile]) -> str:
    rows = [
        f"<tr><td>{escaped(file.name)}</td><td class='number'>{file.size}</td><td><code>{file.digest}</code></td></tr>"
        for file in files
    ]
    if not rows:
        return ""
    head = '<tr><th scope="col">file</th><th scope="col" class="number">bytes</th><th scope="col">SHA-256</th></tr>'
    return (
        '<div class="wide" tabindex="0" role="group"><table><caption>files that it depends on</caption>'
        f"<thead>{head}</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
