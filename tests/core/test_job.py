from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.identity import DeviceId, decode_identity
from cotenant.core.job import (
    BatchInference,
    Command,
    Job,
    JobRequest,
    JobState,
    JobStatus,
    Progress,
    Training,
    Work,
    describe_work,
    reaches_files,
)
from cotenant.errors import ConfigError

words = st.text(st.characters(codec="utf-8", exclude_characters=":\0"), min_size=1, max_size=8)
counts = st.none() | st.integers(1, 1 << 20)
works = st.one_of(
    st.builds(Training, source=words, batch=counts, steps=counts),
    st.builds(BatchInference, model=words, input=words, output=words, batch=counts),
    st.builds(Command, argv=st.lists(words, min_size=1, max_size=3).map(tuple), directory=st.none() | words),
)
jobs = st.builds(
    Job,
    id=st.just("job-7"),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    work=works,
    priority=st.integers(1, 100),
    memory=st.none() | st.integers(1 << 20, 1 << 50),
    deadline=st.none() | st.floats(0, 1e11),
    retries=st.integers(0, 100),
    grace=st.floats(0, 3600),
    threads=st.none() | st.integers(1, 1024),
)


@given(job=jobs)
def test_job_written_as_json_reads_back_the_same(job: Job) -> None:
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job


def test_job_status_written_as_json_reads_back_the_same() -> None:
    status = JobStatus(
        job=Job(id="digits-1", name="digits", work=Training(source="digits")),
        state=JobState.RUNNING,
        device=DeviceId("cpu"),
        progress=Progress(steps=3, total=10, metrics={"accuracy": 0.5}),
        submitted_at=1.0,
    )
    written = msgspec.json.encode(status, enc_hook=str)
    assert msgspec.json.decode(written, type=JobStatus, dec_hook=decode_identity) == status


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"priority": 0}, "priority: 0 must be between 1 and 100"),
        ({"priority": 101}, "priority: 101 must be between 1 and 100"),
        ({"memory": 5}, "memory: 5 must be between"),
        ({"deadline": math.nan}, "deadline: nan must be between"),
        ({"deadline": math.inf}, "deadline: inf must be between"),
        ({"retries": -1}, "retries: -1 must be between 0 and 100"),
        ({"grace": -0.5}, "grace: -0.5 must be between 0 and 3600"),
        ({"threads": 0}, "threads: 0 must be between 1 and 1024"),
        ({"name": "../up"}, "name: '../up' must begin with a letter or digit"),
        ({"name": "a" * 65}, "at most 64 characters"),
        ({"id": "a/b"}, "id: 'a/b' is not a job's"),
    ],
)
def test_job_value_out_of_range_is_refused_with_its_key(changed: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"id": "job-1", "name": "job", "work": Training(source="digits")} | changed
    with pytest.raises(ConfigError, match=message):
        Job(**values)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: Training(source=""), "source: '' names nothing to train"),
        (lambda: Training(source="file.py:"), "source: 'file.py:' names nothing to train"),
        (lambda: Training(source=":train"), "source: ':train' names nothing to train"),
        (lambda: Training(source="digits", steps=0), "steps: 0 must be between"),
        (lambda: BatchInference(model="", input="a", output="b"), "model: '' is not a name"),
        (lambda: BatchInference(model="m", input="a", output=""), "output: '' is not a path"),
        (lambda: BatchInference(model="m", input="a", output="b", batch=0), "batch: 0 must be between"),
        (lambda: Command(argv=()), "argv: a command needs a program"),
        (lambda: Command(argv=("a\0b",)), "null character"),
    ],
)
def test_work_that_names_nothing_is_refused_with_its_key(work: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        work()


@pytest.mark.parametrize(
    ("work", "reaches"),
    [
        (Training(source="digits"), False),
        (Training(source="train.py:epochs"), True),
        (BatchInference(model="m", input="a", output="b"), True),
        (Command(argv=("true",)), True),
    ],
)
def test_work_reaches_files_unless_the_zoo_trains(work: Work, reaches: bool) -> None:
    assert reaches_files(work) is reaches


def test_training_of_a_file_tells_file_and_function_apart() -> None:
    assert Training(source="a:b/train.py:epochs").file == ("a:b/train.py", "epochs")
    assert Training(source="digits").file is None


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (Training(source="digits"), "trains digits"),
        (BatchInference(model="minilm", input="rows.npz", output="vectors.npy"), "minilm over rows.npz"),
        (Command(argv=("sh", "-c", "echo two words")), "sh -c 'echo two words'"),
    ],
)
def test_work_is_described_in_a_few_words(work: Work, words: str) -> None:
    assert describe_work(work) == words


@pytest.mark.parametrize(
    ("work", "id"),
    [
        (Training(source="digits"), "digits-7"),
        (Training(source="/home/a/train it.py:epochs"), "train-it-7"),
        (BatchInference(model="bert base", input="a", output="b"), "bert-base-7"),
        (Command(argv=("/usr/bin/python3", "x.py")), "python3-7"),
        (Command(argv=("..",)), "job-7"),
        (Command(argv=("é" * 5,)), "job-7"),
        (Command(argv=("a" * 99,)), "a" * 64 + "-7"),
    ],
)
def test_job_without_a_name_gets_that_of_its_work(work: Work, id: str) -> None:
    assert JobRequest(work=work).job(7).id == id


@given(job=jobs)
def test_job_is_what_was_requested(job: Job) -> None:
    values = {key: value for key, value in msgspec.structs.asdict(job).items() if key != "id"}
    made = JobRequest(**values).job(3)
    assert made == msgspec.structs.replace(job, id=f"{job.name}-3")
