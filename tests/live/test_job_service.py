"""What callers are told of jobs over HTTP: the routes, and what is refused with key, value and the way out."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cotenant.control.jobs.events import DeviceIdle, DevicesObserved, JobEvent, JobExited, JobPlaced, PlaceJob
from cotenant.control.jobs.scheduler import JobScheduler
from cotenant.core.identity import DeviceId, decode_identity
from cotenant.core.job import BatchInference, Command, JobId, JobRequest, JobState, JobStatus, Training, describe_work
from cotenant.errors import ConfigError, InvalidError, NotFoundError, UnavailableError
from cotenant.live import job_service
from cotenant.live.http import HttpServer
from cotenant.live.job_proof import JobKey
from cotenant.live.job_service import JobList, JobOutput, JobService, read_output
from tests.live.stub import StubCore
from tests.live.test_http import Answer, ask_later, request

CPU = DeviceId("cpu")
JOBS = "/cotenant/jobs"


class FakeDriver:
    """Runs nothing: a scheduler in real time whose jobs do no steps."""

    def __init__(self) -> None:
        self.scheduler = JobScheduler()
        self.feed(DevicesObserved({CPU: DeviceIdle(500)}))

    def feed(self, event: JobEvent) -> None:
        for command in self.scheduler.handle(event, time.time()):  # noqa: TID251  # as the driver's clock
            if isinstance(command, PlaceJob):
                self.feed(JobPlaced(command.job.id, CPU))

    def statuses(self) -> list[JobStatus]:
        return self.scheduler.statuses()


class FakeRecords:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        self.flushed = 0

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def folder_of(self, id: JobId) -> Path:
        return self.folder / id

    def flush(self) -> bool:
        self.flushed += 1
        return True


@pytest.fixture
def key(tmp_path: Path) -> JobKey:
    return JobKey.of_file(tmp_path / "key")


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def records(tmp_path: Path) -> FakeRecords:
    return FakeRecords(tmp_path)


@pytest.fixture
def service(records: FakeRecords, key: JobKey, driver: FakeDriver) -> JobService:
    service = JobService(records, key=key, memory=2 << 30)
    service.attach(driver, sources=("digits", "bert_train"))
    return service


@pytest.fixture
def server(service: JobService) -> Iterator[HttpServer]:
    core = StubCore()
    yield HttpServer(core, jobs=service)
    core.arena.close()


def submit(server: HttpServer, body: Any, **headers: str) -> Answer:
    return ask_later(server, request("POST", JOBS, json.dumps(body).encode(), **headers))


def error(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["error"]


def digits(**values: Any) -> dict[str, Any]:
    return {"work": {"type": "training", "source": "digits"}, **values}


def test_job_that_is_submitted_is_listed_shown_paused_resumed_and_cancelled(
    server: HttpServer, records: FakeRecords
) -> None:
    answer = submit(server, digits(priority=3))
    assert answer.status == 200
    status = msgspec.json.decode(answer.body, type=JobStatus, dec_hook=decode_identity)
    assert (status.job.id, status.job.priority, status.job.memory) == ("digits-1", 3, 2 << 30)
    assert (status.state, status.device) == (JobState.RUNNING, CPU)
    assert records.flushed == 1
    listed = msgspec.json.decode(ask_later(server, request("GET", JOBS)).body, type=JobList, dec_hook=decode_identity)
    assert [status.job.id for status in listed.jobs] == ["digits-1"]
    for method, path, state in (
        ("GET", "", "running"),
        ("POST", "/pause", "paused"),
        ("POST", "/resume", "running"),
        ("DELETE", "", "running"),  # it is told, and has its grace
    ):
        answer = ask_later(server, request(method, f"{JOBS}/digits-1{path}"))
        assert (answer.status, answer.json["state"]) == (200, state)
    assert answer.json["reason"] == "cancelled by its owner"


def test_job_that_is_not_there_is_not_found(server: HttpServer) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/resume"), ("GET", "/output")):
        answer = ask_later(server, request(method, f"{JOBS}/digits-9{path}"))
        assert error(answer) == (404, "no job 'digits-9'; `cotenant jobs list` shows all")


def test_job_that_ended_is_neither_paused_nor_cancelled(server: HttpServer, driver: FakeDriver) -> None:
    submit(server, digits())
    driver.feed(JobExited("digits-1", 1, completed=True))
    answer = ask_later(server, request("DELETE", f"{JOBS}/digits-1"))
    assert error(answer) == (400, "job 'digits-1' has succeeded; submit it again to run it once more")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "no job: Object missing required field `work`"),
        ([], "no job: Expected `object`, got `array`"),
        (digits(prio=1), "no job: Object contains unknown field `prio`"),
        ({"work": {"type": "mining"}}, "no job: Invalid value 'mining' - at `$.work.type`"),
        (digits(priority=0), "priority: 0 must be between 1 and 100"),
        (digits(priority="high"), "no job: Expected `int`, got `str` - at `$.priority`"),
        (digits(name="../../etc"), "name: '../../etc' must begin with a letter or digit"),
        (digits(deadline=1000.0), "deadline: 1000 has passed; give unix seconds in the future"),
        (
            {"work": {"type": "training", "source": "digit"}},
            "source: the zoo trains no 'digit'; did you mean 'digits'?",
        ),
        ({"work": {"type": "training", "source": "digits", "steps": -1}}, "steps: -1 must be between"),
        ({"work": {"type": "command", "argv": []}}, "argv: a command needs a program to run"),
    ],
)
def test_what_is_no_job_is_refused_with_key_and_value(server: HttpServer, body: Any, message: str) -> None:
    status, said = error(submit(server, body))
    assert status == 400
    assert said.startswith(message)


def test_what_is_no_json_is_refused(server: HttpServer) -> None:
    for body in (b"{", b"\xff", b"[" * 100_000):
        assert ask_later(server, request("POST", JOBS, body)).status == 400


COMMAND = {"work": {"type": "command", "argv": ["true"]}}
NAMES_FILES: list[dict[str, Any]] = [
    COMMAND,
    {"work": {"type": "training", "source": "/tmp/train.py:epochs"}},  # noqa: S108
    {"work": {"type": "inference", "model": "m", "input": "/etc/passwd", "output": "/tmp/out"}},  # noqa: S108
]


@pytest.mark.parametrize("body", NAMES_FILES)
def test_job_that_reaches_files_needs_a_proof(server: HttpServer, driver: FakeDriver, body: dict[str, Any]) -> None:
    status, said = error(submit(server, body))
    assert status == 403
    assert "is for the user that the server runs as" in said
    assert error(submit(server, body, Cotenant_Proof="x"))[0] == 403
    assert driver.statuses() == []


def proved(key: JobKey, body: Any) -> str:
    return key.prove(JOBS, json.dumps(body).encode(), time.time())  # noqa: TID251  # as the server's clock


def test_user_of_the_server_submits_commands_once_for_each_proof(server: HttpServer, key: JobKey) -> None:
    proof = proved(key, COMMAND)
    assert submit(server, COMMAND, Cotenant_Proof=proof).status == 200
    assert error(submit(server, COMMAND, Cotenant_Proof=proof)) == (
        403,
        "the proof has expired; submit the job again",
    )
    other = {"work": {"type": "command", "argv": ["rm", "-r", "/"]}}
    assert submit(server, other, Cotenant_Proof=proved(key, COMMAND)).status == 403


@pytest.mark.parametrize(("commands", "status"), [("tokens", 200), ("user", 403), ("off", 403)])
def test_settings_say_who_may_submit_commands(
    records: FakeRecords, key: JobKey, driver: FakeDriver, commands: Any, status: int
) -> None:
    service = JobService(records, key=key, commands=commands)
    service.attach(driver)
    core = StubCore()
    server = HttpServer(core, jobs=service)
    assert submit(server, COMMAND).status == status
    if commands == "off":
        assert submit(server, COMMAND, Cotenant_Proof=proved(key, COMMAND)).status == 403
    told = ask_later(server, request("GET", "/cotenant/jobs-key")).json
    assert told == {"file": str(key.path) if commands == "user" else ""}
    core.arena.close()


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ({"type": "training", "source": "train.py:f"}, "source: 'train.py' is relative; write an absolute path"),
        ({"type": "training", "source": "{}/no.py:f"}, "source: 'no.py': there is no such file or folder"),
        (
            {"type": "inference", "model": "m", "input": "{}/no", "output": "{}/out"},
            "input: 'no': there is no such file or folder",
        ),
        (
            {"type": "inference", "model": "m", "input": "{}/key", "output": "{}/no/out"},
            "output: 'out': its folder is not there",
        ),
        (
            {"type": "command", "argv": ["true"], "directory": "{}/no"},
            "directory: 'no': there is no such file or folder",
        ),
    ],
)
def test_files_that_are_not_there_are_named(
    server: HttpServer, key: JobKey, tmp_path: Path, work: dict[str, Any], message: str
) -> None:
    body = {
        "work": {
            name: value.replace("{}", str(tmp_path)) if isinstance(value, str) else value
            for name, value in work.items()
        }
    }
    status, said = error(submit(server, body, Cotenant_Proof=proved(key, body)))
    assert status == 400
    assert said.startswith(message)  # folders of the server are in no message


def test_server_that_has_no_driver_yet_says_so() -> None:
    core = StubCore()
    server = HttpServer(core, jobs=JobService())
    assert error(submit(server, digits())) == (503, "jobs are rejected: the server is starting")
    assert ask_later(server, request("GET", JOBS)).json == {"jobs": [], "problem": ""}
    off = HttpServer(core, jobs=JobService(off="jobs.enabled = false in the settings"))
    assert error(submit(off, digits()))[1] == "jobs are rejected: jobs.enabled = false in the settings"
    assert ask_later(HttpServer(core), request("GET", JOBS)).status == 404
    core.arena.close()


def test_server_that_stops_takes_no_jobs_any_more(service: JobService) -> None:
    service.detach("the server stops")
    with pytest.raises(UnavailableError, match="jobs are rejected: the server stops"):
        asyncio.run(service.submit(JobRequest(work=Training(source="digits"))))


def test_jobs_that_wait_are_bounded(service: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_service, "MOST_WAITING", 2)

    async def many() -> None:
        for _ in range(3):
            await service.submit(JobRequest(work=Training(source="digits")))

    with pytest.raises(UnavailableError, match="there are 2 jobs that have not ended"):
        asyncio.run(many())


def test_output_is_read_from_a_byte_on(server: HttpServer, tmp_path: Path) -> None:
    submit(server, digits())
    assert ask_later(server, request("GET", f"{JOBS}/digits-1/output")).json == {"text": "", "next": 0}
    (tmp_path / "digits-1").mkdir()
    (tmp_path / "digits-1" / "output.txt").write_text("one\ntwo\n")
    for start, text in (("", "one\ntwo\n"), ("?from=4", "two\n"), ("?from=-4", "two\n"), ("?from=99", "")):
        answer = ask_later(server, request("GET", f"{JOBS}/digits-1/output{start}"))
        assert answer.json == {"text": text, "next": 8}
    answer = ask_later(server, request("GET", f"{JOBS}/digits-1/output?from=x"))
    assert error(answer)[1] == "from: 'x' is not a number of bytes; write 0 for all, -1000 for the last thousand"


def test_output_is_never_cut_within_a_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "output.txt"
    text = "aé€😀" * 5
    path.write_text(text)
    for size in range(4, 12):
        monkeypatch.setattr(job_service, "MOST_OUTPUT", size)
        read, start = "", 0
        while (part := read_output(path, start)).text:
            read, start = read + part.text, part.next
        assert read == text
        assert start == len(text.encode())


def test_output_that_is_no_text_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "output.txt"
    path.write_bytes(b"a\xff\xfe")
    assert read_output(path, 0) == JobOutput("a��", 3)


def test_submitted_job_is_checked_again_for_programs_of_the_same_process(service: JobService) -> None:
    refused: list[tuple[Callable[[], Awaitable[Any]], type[Exception]]] = [
        (lambda: service.submit(JobRequest(work=Training(source="nope"))), InvalidError),
        (lambda: service.submit(JobRequest(work=Command(argv=("a",)), priority=1000)), InvalidError),
        (lambda: service.output("nope-1"), NotFoundError),
    ]
    for call, raised in refused:

        async def run(call: Callable[[], Awaitable[Any]] = call) -> None:
            await call()

        with pytest.raises(raised):
            asyncio.run(run())


def test_job_that_cannot_be_stored_is_not_taken(key: JobKey, records: FakeRecords, driver: FakeDriver) -> None:
    records.flush = lambda: False  # type: ignore[method-assign]
    service = JobService(records, key=key, problem=lambda: "disk full")
    service.attach(driver)
    with pytest.raises(UnavailableError, match="'digits-1' is rejected: it cannot be stored: disk full"):
        asyncio.run(service.submit(JobRequest(work=Training(source="digits"))))
    (status,) = driver.statuses()
    assert status.reason == "rejected: it cannot be stored: disk full"


def test_job_that_is_stored_while_the_server_stops_is_answered(service: JobService, records: FakeRecords) -> None:
    def flush() -> bool:
        service.detach("the server stops")
        return True

    records.flush = flush  # type: ignore[method-assign]
    assert asyncio.run(service.submit(JobRequest(work=Training(source="digits")))).job.id == "digits-1"


def test_jobs_that_are_submitted_at_once_are_bounded(service: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_service, "MOST_WAITING", 2)

    async def many() -> list[Any]:
        requests = (service.submit(JobRequest(work=Training(source="digits"))) for _ in range(5))
        return await asyncio.gather(*requests, return_exceptions=True)

    assert sum(isinstance(answer, JobStatus) for answer in asyncio.run(many())) == 2


def test_output_that_would_replace_the_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npz").touch()
    (tmp_path / "link").symlink_to("x.npz")
    for name in ("x.npz", "link"):
        work = BatchInference(model="m", input=str(tmp_path / "x.npz"), output=str(tmp_path / name))
        with pytest.raises(InvalidError, match="is the input, which it would replace"):
            job_service.check_work(work, None)


def test_output_is_read_of_a_plain_file_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to("secret")
    for name in ("pipe", "link"):
        assert read_output(tmp_path / name, 3) == JobOutput("", 3)


def test_command_is_bounded_and_shown_in_short() -> None:
    with pytest.raises(ConfigError, match="argv: 131078 bytes, of at most 131072"):
        Command(argv=("echo", "x" * (128 << 10)))
    shown = describe_work(Command(argv=("echo", "x" * 1000)))
    assert shown.startswith("echo xxx")
    assert shown.endswith("…")
    assert len(shown) == 200


def test_proof_does_not_hold_again_after_a_restart(server: HttpServer, key: JobKey) -> None:
    body = json.dumps(COMMAND).encode()
    old = key.prove(JOBS, body, time.time() - 10)  # noqa: TID251  # as the server's clock
    assert error(submit(server, COMMAND, Cotenant_Proof=old)) == (403, "the proof has expired; submit the job again")
