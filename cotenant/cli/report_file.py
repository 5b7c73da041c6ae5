"""Write reports: `--report FILE.html` of every command that answers something worth sending."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant import __version__
from cotenant.cli.loading import write_file
from cotenant.core.units import show_memory
from cotenant.errors import ConfigError

if TYPE_CHECKING:
    from cotenant.render.page import Section, SourceFile

SUFFIXES = (".html", ".htm")

ReportFile = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.html", help="Write a report: one self-contained HTML page."),
]


def check_files(plot: Path | None, report: Path | None) -> None:
    """Raise ConfigError for a figure or a report that could not be written: call it before long work. None: is not
    wanted."""
    from cotenant.render.figure import check_drawable

    if plot is not None:
        check_drawable(plot)
    check_report(report)


def check_report(path: Path | None) -> None:
    """Raise ConfigError for a report that could not be written: call it before long work. None: no report."""
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--report {path}: a report is an HTML file; give it a name that ends in .html")
    if path.is_dir():
        raise ConfigError(f"--report {path}: is a folder; name a file in it")
    trial = path.parent / f".{path.name}.trial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with trial.open("xb"):
            pass
        trial.unlink()
    except OSError as error:
        raise ConfigError(f"--report {path}: cannot be written: {error.strerror or error}") from None


def write_report(
    path: Path,
    *,
    title: str,
    question: str,
    answer: Iterable[str],
    good: bool | None,
    sections: Iterable[Section],
    files: Iterable[Path | None] = (),
) -> None:
    """Write a report, with how it was made. files: that the answer depends on; None and what is no file are left out.

    Raises ConfigError where it cannot be written.
    """
    from cotenant.render.page import Origin, ReportPage, page_html

    origin = Origin(
        command=shlex.join(["cotenant", *sys.argv[1:]]),
        made=datetime.now().astimezone().replace(microsecond=0),
        facts=_facts(),
        files=tuple(_source_files(files)),
    )
    page = ReportPage(
        title=title, question=question, answer=tuple(answer), good=good, sections=tuple(sections), origin=origin
    )
    write_file(path, page_html(page))


def _facts() -> Mapping[str, str]:
    from cotenant.profiling.cache import machine_fingerprint

    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "version": f"cotenant {__version__}",
        "Python": platform.python_version(),
        "machine": f"{processors} processors of {machine_fingerprint()}, {show_memory(memory)}, "
        f"{platform.system()} {platform.release()}",
    }
    # Options may be set by the environment as well.
    variables = {name: value for name, value in os.environ.items() if name.startswith("COTENANT_")}
    if variables:
        facts["environment"] = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items()))
    return facts


def _source_files(paths: Iterable[Path | None]) -> Iterable[SourceFile]:
    from cotenant.render.page import SourceFile

    for path in dict.fromkeys(path for path in paths if path is not None):
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            yield SourceFile(name=str(path), size=len(content), digest=hashlib.sha256(content).hexdigest())
