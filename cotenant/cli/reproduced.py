"""Keep the results of `cotenant reproduce` in a folder, and write a report of them.

For each experiment the folder has its rows (JSON) and its figure (SVG). A result is taken again only where it was made
by the same sources and options: figures of one report are of one state of the program.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from cotenant.cli.loading import write_file
from cotenant.cli.report_file import write_report
from cotenant.errors import ConfigError, CotenantError
from cotenant.render.table import table


class Kept(msgspec.Struct, frozen=True):
    """Hold the rows of one experiment. made_by: a digest of sources and options; seconds: that it took."""

    made_by: str
    seconds: float
    fields: list[str]
    rows: list[list[Any]]


class ReproducedFigures:
    """Hold the results in a folder. Raises ConfigError where it cannot be made."""

    def __init__(self, folder: Path, checkout: Path, options: msgspec.Struct) -> None:
        """options: of the experiments; their number of processes and their progress change nothing."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--results {folder}: cannot be made: {error.strerror or error}") from None
        asked = [(f, getattr(options, f)) for f in options.__struct_fields__ if f not in ("jobs", "progress")]
        self._made_by = _digest(checkout, asked)
        self._results: dict[str, Kept] = {}

    def has(self, name: str) -> bool:
        """Return whether an experiment was made by the same sources and options."""
        try:
            kept = msgspec.json.decode(self._file(name).read_bytes(), type=Kept)
        except (OSError, msgspec.DecodeError):  # what cannot be read is made again
            return False
        if kept.made_by != self._made_by or not self.picture(name).is_file():
            return False
        self._results[name] = kept
        return True

    def keep(self, name: str, rows: Sequence[msgspec.Struct], *, seconds: float) -> None:
        """Keep the rows of an experiment, whose figure is in the folder already."""
        fields = list(rows[0].__struct_fields__) if rows else []
        values = [[msgspec.to_builtins(getattr(row, field)) for field in fields] for row in rows]
        self._results[name] = Kept(self._made_by, seconds, fields, values)
        write_file(self._file(name), msgspec.json.encode(self._results[name]).decode(), quiet=True)

    def picture(self, name: str) -> Path:
        return self.folder / f"{_stem(name)}.svg"

    def cells(self, name: str) -> tuple[list[str], list[list[Any]]]:
        """Return the fields of an experiment's rows, and their values."""
        kept = self._results[name]
        return kept.fields, kept.rows

    def rows(self, name: str) -> list[dict[str, Any]]:
        fields, rows = self.cells(name)
        return [dict(zip(fields, row, strict=True)) for row in rows]

    def write_report(self, names: Sequence[str], items: Iterable[Any], failed: Mapping[str, CotenantError]) -> None:
        """Write report.html: each experiment with its figure, table and what is missing of the paper's.

        items: of the catalogue of experiments; those of other papers are left out. failed: experiments that could not
        be made.
        """
        from cotenant.render.page import Picture, Section

        shown = {name.partition("/")[0] for name in names}
        own = [item for item in items if item.paper.lower() in shown]
        sections = []
        for name in names:
            of = [item for item in own if name in item.experiments]
            heading = ", ".join(f"{item.paper}, {item.item}" for item in of) or name
            parts: list[Any] = [escape(f"{item.item}: {item.state}{_because(item.why)}") for item in of]
            if name in failed:
                parts.append(escape(f"Could not be made: {failed[name]}"))
            else:
                fields, rows = self.cells(name)
                picture = Picture(svg=self.picture(name).read_bytes(), shows=heading)
                parts += [picture, cells_table("", fields, rows), f"{self._results[name].seconds:.1f} s; {name}"]
            sections.append(Section(heading=heading, parts=tuple(parts)))
        missing = [item for item in own if not item.experiments]
        if missing:
            view = table("", "figure or table", "shows", "why")
            for item in missing:
                view.add_row(*map(escape, (f"{item.paper}, {item.item}", item.shows, item.why)))
            sections.append(Section(heading="Not made", parts=(view,)))
        counts = Counter(item.state for item in own)
        answer = [", ".join(f"{count} {state}" for state, count in counts.most_common()) + "."]
        if failed:
            answer.append(f"{len(failed)} of {len(names)} experiments could not be made.")
        write_report(
            self.folder / "report.html",
            title=f"Reproduction of {', '.join(dict.fromkeys(item.paper for item in own)) or ', '.join(names)}",
            question=f"What do {len(own)} figures and tables of evaluation look like here?",
            answer=answer,
            good=False if failed else None,
            sections=sections,
        )

    def _file(self, name: str) -> Path:
        return self.folder / f"{_stem(name)}.json"


def cells_table(title: str, fields: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Return rows of values as a table, numbers right-aligned."""
    kinds = [{type(value) for value in column} for column in zip(*rows, strict=True)] or [set() for _ in fields]
    headings = [
        f"{'>' if kind & {int, float} else ''}{field.replace('_', ' ')}"
        for field, kind in zip(fields, kinds, strict=True)
    ]
    shown = table(title, *headings)
    for row in rows:
        shown.add_row(*(escape(_text(value)) for value in row))
    return shown


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def _stem(name: str) -> str:
    return name.replace("/", "-")


def _digest(checkout: Path, options: object) -> str:
    """Return a digest of all sources that an experiment may run, and of options."""
    digest = hashlib.sha256(msgspec.json.encode(options))
    for folder in ("cotenant", "experiments"):
        for file in sorted((checkout / folder).rglob("*.py")):
            digest.update(file.relative_to(checkout).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
