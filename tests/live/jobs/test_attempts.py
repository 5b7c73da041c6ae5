from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cotenant.app.jobs import function_of
from cotenant.backends import Launch
from cotenant.core.job import BatchInference, Command, Job, Training, Work
from cotenant.errors import ConfigError
from cotenant.live.jobs.attempts import Preparation
from cotenant.worker.jobs.inference import InferenceWork
from cotenant.worker.jobs.steps import StepWork
from cotenant.worker.wire import WorkerModel

THREE = Launch(threads=3)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Preparation:
    """In a server that runs in `tmp_path`, with a repository that is relative to it."""
    monkeypatch.chdir(tmp_path)
    return Preparation(
        folder=tmp_path / "jobs",
        function=function_of,
        model=lambda name: WorkerModel(name=name, path=f"my/{name}/1/model.onnx", inputs=()),
    )


def steps_of(prepared: Preparation, work: Work, launch: Launch = THREE) -> StepWork:
    attempt = prepared.attempt(Job(id="job-1", name="job", work=work), 1, launch)
    return msgspec.json.decode(attempt.argv[-1], type=StepWork)


def test_paths_of_inference_hold_in_the_folder_of_the_job(prepared: Preparation, tmp_path: Path) -> None:
    steps = steps_of(prepared, BatchInference(model="digits", input="in.npy", output="out/y.npy", batch=4))
    work = msgspec.convert(steps.options, InferenceWork)
    assert (work.model.path, work.input, work.output) == (
        str(tmp_path / "my/digits/1/model.onnx"), str(tmp_path / "in.npy"), str(tmp_path / "out/y.npy")
    )  # fmt: skip
    assert (steps.batch, steps.threads) == (4, 3)


def test_python_job_begins_where_the_server_runs(prepared: Preparation, tmp_path: Path) -> None:
    job = Job(id="job-1", name="job", work=Training(source="train.py:epochs", steps=7), threads=2)
    attempt = prepared.attempt(job, 2, Launch(threads=3, cores=(0, 1)))
    steps = msgspec.json.decode(attempt.argv[-1], type=StepWork)
    assert attempt.directory == str(tmp_path) and attempt.cores == (0, 1) and attempt.header == "--- attempt 2 ---"
    assert (steps.function, steps.steps, steps.threads) == ("train.py:epochs", 7, 2)
    assert steps.directory == str(tmp_path / "jobs/job-1/checkpoint")


def test_command_runs_in_its_folder_or_one_of_its_own(prepared: Preparation, tmp_path: Path) -> None:
    own = prepared.attempt(Job(id="job-1", name="job", work=Command(argv=("true",))), 1, Launch())
    assert own.own_directory and own.directory == str(tmp_path / "jobs/job-1/work")
    named = Job(id="job-2", name="job", work=Command(argv=("true",), directory="/srv"))
    assert prepared.attempt(named, 1, Launch()).directory == "/srv"


def test_only_steps_on_a_gpu_wait_by_themselves(prepared: Preparation) -> None:
    gpu = Launch(cuda=True, process="h200-0")
    train, command = Training(source="digits"), Command(argv=("true",))
    for work, launch, waits in ((train, gpu, True), (train, Launch(), False), (command, gpu, False)):
        assert prepared.attempt(Job(id="job-1", name="job", work=work), 1, launch).waits is waits
    assert steps_of(prepared, train, gpu).groups and not steps_of(prepared, train).groups


def test_environment_lets_threads_that_wait_sleep(prepared: Preparation) -> None:
    job = Job(id="job-1", name="job", work=Training(source="digits"), threads=2)
    environ = prepared.environ(job, Launch(env={"CUDA_VISIBLE_DEVICES": "0"}), {"HOME": "/root", "API_TOKEN": "x"})
    assert environ["OMP_NUM_THREADS"] == "2" and environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environ["CUDA_VISIBLE_DEVICES"] == "0" and environ["HOME"] == "/root" and "API_TOKEN" not in environ


def test_unknown_trainer_is_a_typed_error(prepared: Preparation) -> None:
    with pytest.raises(ConfigError, match="the zoo trains no 'letters'"):
        steps_of(prepared, Training(source="letters"))
