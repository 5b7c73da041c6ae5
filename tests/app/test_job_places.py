"""A job whose steps are profiled stands only where every SLO still validates; of others nothing is predicted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from cotenant.app import job_places
from cotenant.app.job_places import PlaceChooser, judge, profiled
from cotenant.control.jobs.events import JobPlaced, PlaceJob
from cotenant.core.identity import DeviceId
from cotenant.core.job import BatchInference, Command, Job, Training, Work
from cotenant.live.deployment import Deployment
from cotenant.predictors import ConstantMargin
from tests.live.deployment import repository, sample_deployment

INFERENCE = BatchInference(model="identity", input="/in", output="/out")


def job(work: Work, id: str = "job-1", memory: int | None = 1 << 20) -> Job:
    return Job(id=id, name="job", work=work, memory=memory)


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return sample_deployment(repository(tmp_path / "models"))


def chosen(deployment: Deployment, *asked: Job) -> list[JobPlaced]:
    devices: dict[DeviceId, tuple[Job, ...]] = {device.id: () for device in deployment.plan.devices}
    chooser = PlaceChooser(lambda: deployment)

    async def choose() -> list[JobPlaced]:
        return [await chooser(PlaceJob(each, devices)) for each in asked]

    return asyncio.run(choose())


def test_profiled_job_is_judged_and_its_device_chosen(deployment: Deployment) -> None:
    (device,) = (device.id for device in deployment.plan.devices)
    assert chosen(deployment, job(INFERENCE)) == [JobPlaced("job-1", device)]


def test_profiled_job_that_would_violate_an_slo_gets_no_place_and_is_told_why(deployment: Deployment) -> None:
    problem = msgspec.structs.replace(deployment.problem, interference=ConstantMargin(1000.0))
    (placed,) = chosen(msgspec.structs.replace(deployment, problem=problem), job(INFERENCE))
    assert placed.device is None
    assert "identity" in placed.reason or "lookup" in placed.reason


def test_job_that_needs_more_memory_than_is_free_gets_no_place(deployment: Deployment) -> None:
    (placed,) = chosen(deployment, job(INFERENCE, memory=1 << 62))
    assert placed.device is None
    assert "it needs" in placed.reason


@pytest.mark.parametrize(
    "work",
    [
        Command(argv=("true",)),
        Training(source="digits"),
        Training(source="/train.py:epochs"),
        BatchInference(model="nobody", input="/in", output="/out"),
    ],
)
def test_job_that_was_not_profiled_stands_where_the_fewest_do(deployment: Deployment, work: Work) -> None:
    problem = msgspec.structs.replace(deployment.problem, interference=ConstantMargin(1000.0))
    (placed,) = chosen(msgspec.structs.replace(deployment, problem=problem), job(work))
    assert placed.device is not None


def test_jobs_that_run_there_count(deployment: Deployment) -> None:
    (device,) = (device.id for device in deployment.plan.devices)
    other = job(INFERENCE, "job-2", memory=1 << 62)
    places = judge(
        job(INFERENCE), deployment.plan, deployment.problem, {device: (other, job(Command(argv=("a",)), "a-3"))}
    )
    assert places.devices == ()
    assert "it needs" in places.reason


def test_batch_is_at_most_what_was_profiled(deployment: Deployment) -> None:
    largest = max(p.max_batch for (name, _), p in deployment.problem.profiles.items() if name == "identity")
    for batch, known in ((None, largest), (10**6, largest), (1, 1)):
        background = profiled(job(msgspec.structs.replace(INFERENCE, batch=batch)), deployment.problem)
        assert background is not None
        assert background.batch == known


def test_same_question_is_judged_once_for_each_deployment(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def count(each: Job, *rest: object) -> object:
        asked.append(each.id)
        return judge(each, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(job_places, "judge", count)
    chosen(deployment, job(INFERENCE), job(INFERENCE), job(INFERENCE, "job-2"))
    assert asked == ["job-1", "job-2"]
