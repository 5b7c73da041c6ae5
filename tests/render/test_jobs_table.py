from __future__ import annotations

import io

import pytest
from rich.console import Console

from cotenant.core.job import Command, JobState, Progress
from cotenant.render.jobs_table import job_notes, jobs_table, show_ahead, show_steps
from tests.live.jobs_shown import ended, running, waiting


def drawn(*jobs: object) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(jobs_table(jobs, now=1000.0))  # type: ignore[arg-type]
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_table_tells_how_far_jobs_are_within_80_columns() -> None:
    text = drawn(running(), waiting(), ended("old-3", 990.0))
    assert max(len(line) for line in text.splitlines()) <= 80
    first = next(line for line in text.splitlines() if line.startswith("digits-1"))
    assert first.split() == [
        "digits-1", "running", "600/1200", "80", "50", "%", "42.5", "in", "15", "s", "trains", "digits",
    ]  # fmt: skip


def test_table_has_no_steps_for_jobs_that_count_none() -> None:
    job = running("sh-1", Command(argv=("true",)), progress=Progress(share_seconds=2.0))
    line = next(line for line in drawn(job).splitlines() if line.startswith("sh-1"))
    assert line.split()[:8] == ["sh-1", "running", "-", "-", "50", "%", "2", "in"]
    assert [show_steps(Progress(steps=n, total=total)) for n, total in ((0, 5), (3, None))] == ["0/5", "3"]


def test_table_takes_no_markup_from_commands() -> None:
    assert "[red]x[/red]" in drawn(running("a-1", Command(argv=("[red]x[/red]",)))).replace("\n", "").replace(" ", "")


def test_notes_tell_why_jobs_wait_and_which_miss_their_deadline() -> None:
    late = running("late-1", deadline=1060.0, will_miss_deadline=True)
    failed = ended("bad-2", 990.0, JobState.FAILED, "exit status 1")
    assert job_notes([running(), waiting(), late, failed], now=1000.0) == [
        "later-2: too little memory is free",
        "late-1: expected to miss its deadline, in 60 s",
        "bad-2: exit status 1",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "now"), (45, "in 45 s"), (-720, "12 min ago"), (10_800, "in 3 h"), (864_000, "in 10 d")],
)
def test_times_ahead_are_told_in_two_digits(seconds: float, text: str) -> None:
    assert show_ahead(seconds) == text
