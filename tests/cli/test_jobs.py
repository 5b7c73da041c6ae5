"""`cotenant jobs` against a front end over HTTP, with a scheduler and no processes: what is idle elsewhere is no
matter."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotenant.cli import jobs
from cotenant.control.jobs.events import JobExited, JobProgressed
from cotenant.core.job import JobState
from cotenant.live.access import Access, Role
from cotenant.live.http import HttpServer
from cotenant.live.job_proof import JobKey
from cotenant.live.job_service import CommandPolicy, JobService
from tests.cli.program import Program
from tests.live.stub import StubCore
from tests.live.test_job_service import FakeDriver, FakeRecords

KNOWN = "control-0123456789"


class Front:
    """A front end on a loop of its own, in a thread."""

    def __init__(self, folder: Path, *, commands: CommandPolicy = "user", tokens: bool = False) -> None:
        self.key = JobKey.of_file(folder / "key")
        self.records = FakeRecords(folder)
        self.service = JobService(self.records, key=self.key, commands=commands, memory=2 << 30)
        self.access = Access({Role.CONTROL: [KNOWN]} if tokens else None)
        self.address = ""
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self._loop, self._stop, core = asyncio.get_running_loop(), asyncio.Event(), StubCore()
        self.driver = FakeDriver()
        self.service.attach(self.driver, sources=("digits",))
        server = HttpServer(core, jobs=self.service, access=self.access)
        self.address = f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
        self._started.set()
        await self._stop.wait()
        await server.stop(1.0)
        core.arena.close()

    def __enter__(self) -> Front:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    def feed(self, event: Any) -> None:
        self._loop.call_soon_threadsafe(self.driver.feed, event)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    (tmp_path / "jobs").mkdir()
    with Front(tmp_path / "jobs") as front:
        yield front


def ran(program: Program, front: Front, *arguments: str | Path) -> Any:
    """What a command gives as JSON."""
    said = program("jobs", *arguments[:1], "-a", front.address, "--json", *arguments[1:])
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_job_is_submitted_listed_shown_paused_resumed_and_cancelled(program: Program, front: Front) -> None:
    status = ran(program, front, "submit", "--train", "digits", "--steps", "50", "--priority", "3", "--memory", "1GiB")
    assert status["job"]["work"] == {"type": "training", "source": "digits", "batch": None, "steps": 50}
    assert (status["job"]["id"], status["job"]["priority"], status["job"]["memory"]) == ("digits-1", 3, 1 << 30)
    assert [each["job"]["id"] for each in ran(program, front, "list")["jobs"]] == ["digits-1"]
    assert ran(program, front, "show", "digits-1")["state"] == "running"
    for verb, state in (("pause", "paused"), ("resume", "running"), ("cancel", "running")):
        assert ran(program, front, verb, "digits-1")["state"] == state
    assert ran(program, front, "show", "digits-1")["reason"] == "cancelled by its owner"


def test_jobs_are_shown_to_people(program: Program, front: Front) -> None:
    address = ("-a", front.address)
    assert "no jobs; submit one" in program("jobs", "list", *address).err
    said = program("jobs", "submit", "--train", "digits", "--deadline", "1000h", *address)
    assert (said.code, said.out, said.err) == (0, "", "submitted digits-1 (running)\n")
    front.feed(JobProgressed("digits-1", 1, 5, 50, 1.5, {"accuracy": 0.875}))
    assert program("jobs", "pause", "digits-1", *address).err == "digits-1 (paused: paused by its owner)\n"
    listed = program("jobs", "list", *address).out
    assert "digits-1" in listed and "5/50" in listed and "digits-1: paused by its owner" in listed
    shown = program("jobs", "show", "digits-1", *address).out
    for text in ("trains digits", "5/50", "accuracy 0.875", "2 GiB", "1.5 share-seconds", "in 42 d"):
        assert text in shown


def test_command_is_run_where_it_was_submitted_by_the_servers_user(
    program: Program, folder: Path, front: Front
) -> None:
    status = ran(program, front, "submit", "--", "sh", "-c", "echo --train $HOME")
    assert status["job"]["work"] == {
        "type": "command",
        "argv": ["sh", "-c", "echo --train $HOME"],
        "directory": str(folder),
    }
    (folder / "train.py").write_text("")
    status = ran(program, front, "submit", "--train", "train.py:epochs")
    assert status["job"]["work"]["source"] == f"{folder}/train.py:epochs"
    status = ran(program, front, "submit", "--infer", "m", "--input", "profiles.csv", "--output", "out.csv")
    assert status["job"]["work"]["input"] == f"{folder}/profiles.csv"


def test_job_file_is_submitted_and_options_stand_above_it(program: Program, folder: Path, front: Front) -> None:
    (folder / "job.toml").write_text('priority = 2\ngrace = "3s"\n[training]\nsource = "digits"\n')
    status = ran(program, front, "submit", "--file", "job.toml", "--priority", "7", "--grace", "1min")
    assert (status["job"]["priority"], status["job"]["grace"]) == (7, 60.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing given: give one of --train, --infer, --file, or a command after `--`"),
        (("--train", "digits", "--infer", "m"), "--train and --infer given: give one of"),
        (("--train", "digits", "--input", "x"), "--input: is not an option of --train; leave it out"),
        (("--infer", "m", "--output", "x"), "--infer m: needs --input FILE and --output FILE"),
        (("--train", "digit"), "source: the zoo trains no 'digit'; did you mean 'digits'?"),
        (("--train", "none.py:f"), "source: 'none.py': there is no such file or folder"),
        (("--train", "digits", "--priority", "0"), "priority: 0 must be between 1 and 100"),
        (("--train", "digits", "--memory", "2"), "--memory: '2' has no unit of memory"),
        (("--train", "digits", "--deadline", "soon"), "--deadline: 'soon' is not a time"),
        (("--file", "none.toml"), "none.toml: cannot be read: No such file or directory"),
        (("--file", "profiles.csv"), "profiles.csv: is not TOML"),
    ],
)
def test_what_cannot_be_submitted_is_refused_in_one_line(
    program: Program, front: Front, arguments: tuple[str, ...], message: str
) -> None:
    assert program.refuses("jobs", "submit", "-a", front.address, *arguments).startswith(message)
    assert front.driver.statuses() == []


def test_job_that_is_not_there_is_refused(program: Program, front: Front) -> None:
    for verb in ("show", "follow", "pause", "resume", "cancel"):
        refused = program.refuses("jobs", verb, "nope-1", "-a", front.address)
        assert refused == "no job 'nope-1'; `cotenant jobs list` shows all"


def test_user_that_cannot_read_the_key_is_told_who_can(program: Program, front: Front) -> None:
    front.key.path.unlink()
    refused = program.refuses("jobs", "submit", "-a", front.address, "--", "true")
    assert refused.startswith(f"{front.key.path}: No such file or directory: a job that runs a command")


def test_server_that_names_another_file_as_its_key_gets_nothing_of_it(
    program: Program, folder: Path, front: Front
) -> None:
    (folder / "secret").write_text("my password")
    (folder / "secret").chmod(0o600)
    front.key.path = folder / "secret"
    refused = program.refuses("jobs", "submit", "-a", front.address, "--", "true")
    assert refused == f"{folder}/secret: is not a key for jobs; remove it, and the server makes another"


def test_token_for_control_submits_commands_where_the_settings_say_so(program: Program, folder: Path) -> None:
    (folder / "jobs").mkdir()
    (folder / "token").write_text(KNOWN)
    with Front(folder / "jobs", commands="tokens", tokens=True) as front:
        assert program.refuses("jobs", "submit", "-a", front.address, "--", "true").endswith("--token-file")
        assert ran(program, front, "submit", "--token-file", "token", "--", "true")["state"] == "running"


def test_follow_prints_output_and_ends_with_the_job(
    program: Program, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PERIOD", 0.01)
    ran(program, front, "submit", "--train", "digits")
    output = front.records.folder_of("digits-1") / "output.txt"
    output.parent.mkdir()
    output.write_text("epoch 1\n")
    front.feed(JobExited("digits-1", 1, completed=True))
    said = program("jobs", "follow", "digits-1", "-a", front.address)
    assert (said.code, said.out) == (0, "epoch 1\n")
    assert said.err.splitlines()[-1] == "digits-1 succeeded"


def test_follow_of_a_job_that_fails_exits_with_its_reason(program: Program, front: Front) -> None:
    ran(program, front, "submit", "--train", "digits", "--retries", "0")
    front.feed(JobExited("digits-1", 1, completed=False, reason="exit status 3"))
    said = program("jobs", "follow", "digits-1", "-a", front.address, "--json")
    assert said.code == 1
    assert said.err == "error: job digits-1 failed: exit status 3\n"
    assert json.loads(said.out.splitlines()[-1])["state"] == "failed"


def test_submit_with_follow_ends_with_the_job(program: Program, front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PERIOD", 0.01)
    submitted = front.driver.feed

    def end(event: Any) -> None:
        submitted(event)
        submitted(JobExited("digits-1", 1, completed=True))

    monkeypatch.setattr(front.driver, "feed", end)
    said = program("jobs", "submit", "--train", "digits", "--follow", "-a", front.address)
    assert said.code == 0
    assert front.driver.statuses()[0].state is JobState.SUCCEEDED


def test_source_that_is_missing_is_named(program: Program) -> None:
    said = program("jobs", "submit", "--train", "--address", "127.0.0.1:1")
    assert said.code != 0
    assert "--train: its value is missing before --address" in " ".join(said.err.split())


def test_output_that_began_anew_is_followed_from_its_start(
    program: Program, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(program, front, "submit", "--train", "digits")
    path = front.records.folder_of("digits-1") / "output.txt"
    path.parent.mkdir()
    path.write_text("a long line of the first part\n")

    def sleep(seconds: float) -> None:
        path.write_text("anew\n")
        front.feed(JobExited("digits-1", 1, completed=True))

    monkeypatch.setattr("cotenant.cli.jobs.time", SimpleNamespace(sleep=sleep))
    said = program("jobs", "follow", "-a", front.address, "digits-1")
    assert "first part" in said.out + said.err
    assert "anew" in said.out + said.err
