"""From a model repository to a deployment, for several devices of several kinds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from benchmarks.torch_models import double
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.problem import ASSUMED_RATE, MAX_ASSUMED_WORK
from cotenant.backends.fake import Fake
from cotenant.config import Settings, read_settings
from cotenant.core.identity import DeviceId
from cotenant.core.mig import fixed_geometry
from cotenant.core.model import Kind
from cotenant.core.profile import Point, Profile, write_profiles
from cotenant.live.confinement import Confinement
from cotenant.live.deployment import kept_models
from cotenant.planners.check import check
from cotenant.planners.one_worker_each import SOURCE
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample, write_samples

GIB = 1 << 30
LAYOUT = fixed_geometry([("3g.71gb", 428, 64 * GIB), ("1g.18gb", 142, 16 * GIB)])
LARGE = Kind(name="large", count=2, memory=64 * GIB, cuts=(500, 1000))
CUT = Kind(name="cut", count=1, memory=64 * GIB, cuts=(142, 428), geometry=LAYOUT)


def measured(model: str, kind: Kind, seconds: float) -> Profile:
    """One row on the whole device takes so many seconds, and proportionally longer on a part."""
    points = [
        Point(share=share, batch=batch, latency=seconds * batch * 1000 / share, memory=GIB)
        for share in kind.cuts
        for batch in (1, 8)
    ]
    return Profile(model, kind.name, points)


def settings(folder: Path, text: str = "") -> Settings:
    path = folder / "gpu.toml"
    path.write_text(
        f'backend = "green"\nmodel_repository = "models"\n{text}'
    )  # so that shares are those of the hardware
    return read_settings(path)


def test_deployment_builder_two_kinds_plans_with_profiles_and_cuts_of_each(folder: Path) -> None:
    profiles = [measured("identity", LARGE, 0.001), measured("identity", CUT, 0.01)]
    (folder / "given.csv").write_text(write_profiles(profiles))
    builder = DeploymentBuilder(settings(folder, 'profiles = "given.csv"\nobjective = "rate"'), Fake((LARGE, CUT)))
    deployment = asyncio.run(builder.build(["identity"]))
    assert deployment.problem.fleet == (LARGE, CUT)
    assert set(deployment.problem.profiles) == {("identity", "large"), ("identity", "cut")}
    # The slower kind must keep the usual target, too: twice 8 rows on the largest instance, which is less than half.
    assert deployment.problem.models[0].slo == pytest.approx(2 * 0.08 / 0.428, rel=1e-3)
    assert {device.id for device in deployment.plan.devices} == {"large-0", "large-1", "cut-0"}
    assert sum(len(device.partitions) for device in deployment.plan.devices if device.kind == "cut") <= 2
    assert check(deployment.plan, deployment.problem) == []


@pytest.mark.parametrize(("processors", "padded"), [(0.0, True), (4.0, False)])
def test_deployment_builder_plans_batches_on_a_gpu_as_long_as_the_size_they_are_padded_to(
    folder: Path, processors: float, padded: bool
) -> None:
    (folder / "models").unlink()  # it is a link to what other tests use
    version = folder / "models" / "scaled" / "1"
    version.mkdir(parents=True)
    double(version, "pytorch_export")
    (folder / "models" / "scaled" / "config.pbtxt").write_text("max_batch_size: 8")
    kind = msgspec.structs.replace(LARGE, processors=processors)
    (folder / "given.csv").write_text(write_profiles([measured("scaled", kind, 0.001)]))
    builder = DeploymentBuilder(settings(folder, 'profiles = "given.csv"'), Fake((kind,)))
    deployment = asyncio.run(builder.build(["scaled"]))
    planned = [round(1e3 * seconds, 6) for seconds in deployment.problem.profiles["scaled", "large"].curve(1000)]
    assert planned == ([1, 2, 3, 4, 6, 6, 8, 8] if padded else [1, 2, 3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize(("seconds", "rate"), [(0.001, ASSUMED_RATE), (2.0, MAX_ASSUMED_WORK / (2 * 2.0) * 2)])
def test_deployment_builder_without_rates_plans_one_worker_for_each_model(
    folder: Path, seconds: float, rate: float
) -> None:
    """Two devices: models of 2 s a request may take half of their time."""
    names = ("identity", "lookup")
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, seconds) for name in names]))
    builder = DeploymentBuilder(settings(folder, 'profiles = "given.csv"'), Fake((LARGE,)))
    deployment = asyncio.run(builder.build(names))
    assert deployment.problem.assumed == set(names) and deployment.problem.objective == "devices"
    assert deployment.problem.rates == pytest.approx(dict.fromkeys(names, rate))
    assert sorted(placement.model for _, _, placement in deployment.plan.placements()) == sorted(names)
    assert {device.id for device in deployment.plan.devices} == {"large-0", "large-1"}
    assert deployment.plan.provenance is not None and deployment.plan.provenance.source == SOURCE
    assert check(deployment.plan, deployment.problem) == []


def test_deployment_builder_given_rates_are_not_multiplied(folder: Path) -> None:
    names = ("identity", "lookup")
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, 0.001) for name in names]))
    text = 'profiles = "given.csv"\n[[models]]\nname = "lookup"\nrate = 50'
    deployment = asyncio.run(DeploymentBuilder(settings(folder, text), Fake((LARGE,))).build(names))
    assert deployment.problem.assumed == {"identity"}
    assert deployment.plan.rates() == pytest.approx({"identity": ASSUMED_RATE, "lookup": 50.0})


def test_deployment_builder_models_that_are_kept_keep_their_rates_and_slowdowns(folder: Path) -> None:
    """A load while the server is busy plans for what is going on, and not for what the settings once expected."""
    names = ("identity", "lookup")
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, 0.001) for name in names]))
    text = 'profiles = "given.csv"\n[[models]]\nname = "lookup"\nslo = "1s"\nrate = 50'
    builder = DeploymentBuilder(settings(folder, text), Fake((LARGE,)))
    before = asyncio.run(builder.build(["lookup"]))
    learnt = msgspec.structs.replace(
        before, problem=msgspec.structs.replace(before.problem, rates={"lookup": 80.0}), slowdowns={"lookup": 1.5}
    )
    deployment = asyncio.run(builder.build(names, kept=kept_models(learnt, {"lookup"})))
    assert deployment.problem.rates == pytest.approx({"identity": ASSUMED_RATE, "lookup": 80.0})
    assert deployment.problem.assumed == {"identity"}
    assert deployment.slowdowns == {"identity": 1.5, "lookup": 1.5}  # what slows all that there are slows others, too
    for _, partition, placed in deployment.plan.placements():
        profile = deployment.problem.profiles[placed.model, "large"]
        assert placed.latency == pytest.approx(1.5 * profile.latency(placed.batch, partition.share))
    hopeless = msgspec.structs.replace(learnt, slowdowns={"lookup": 5000.0})
    deployment = asyncio.run(builder.build(names, kept=kept_models(hopeless, {"lookup"})))
    assert not deployment.plan.unserved and not deployment.slowdowns  # late answers are better than none


def test_deployment_builder_front_end_has_the_reserve_of_a_processor(folder: Path) -> None:
    (folder / "given.csv").write_text(write_profiles([measured("identity", LARGE, 0.001)]))
    path = folder / "cpu.toml"
    path.write_text('model_repository = "models"\nprofiles = "given.csv"\nbackend = "fake"\ncpu = { reserve = "20%" }')
    kind = msgspec.structs.replace(LARGE, processors=1.6)
    deployment = asyncio.run(DeploymentBuilder(read_settings(path), Fake((kind,))).build(["identity"]))
    front_end = deployment.problem.front_end
    assert front_end is not None and front_end.processors == 1.6 and front_end.reserved == pytest.approx(0.4)
    assert front_end.noise > 1.0 and front_end.target(0.05) < 0.05


def test_deployment_builder_observed_samples_correct_the_predicted_slowdown(folder: Path) -> None:
    names = ("identity", "lookup")
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, 0.001) for name in names]))
    loads = [Load(name, "large", batch, 500) for name in names for batch in (1, 8)]
    runs = [(one, (other,)) for one in loads for other in loads]
    pairs = [Sample(victim, beside, 0.01, 0.011 + 0.0001 * beside[0].batch) for victim, beside in runs]
    (folder / "pairs.csv").write_text(write_samples(pairs))
    text = 'profiles = "given.csv"\ninterference = { model = "gaussian-process", fit = "pairs.csv" }'
    builder = DeploymentBuilder(settings(folder, text), Fake((LARGE,)))
    observed = [Sample(*runs[1], 0.01, 0.02)] * 9
    before, after = (
        asyncio.run(builder.build(names, samples)).problem.interference.slowdown(*runs[1]) for samples in ((), observed)
    )
    assert before == pytest.approx(1.18, abs=0.1)
    assert after > 1.6


def test_deployment_builder_cuts_of_another_backend_are_ignored(folder: Path) -> None:
    path = folder / "fake.toml"
    path.write_text('backend = "fake"\nmodel_repository = "models"\nprofiles = "given.csv"\ncpu = { cuts = [50, 100] }')
    kinds = (msgspec.structs.replace(LARGE, cuts=(100, 1000)),)
    (folder / "given.csv").write_text(write_profiles([measured("identity", LARGE, 0.001)]))
    deployment = asyncio.run(DeploymentBuilder(read_settings(path), Fake(kinds)).build(["identity"]))
    assert deployment.problem.fleet[0] == LARGE


def test_deployment_builder_profiles_in_workers_confined_as_those_that_serve(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may need a variable to load, and a batch more memory than a worker may have."""
    confined: list[Confinement | None] = []

    async def profiled(*args: object, confinement: Confinement | None = None, **more: object) -> Profile:
        confined.append(confinement)
        return measured("identity", LARGE, 0.001)

    monkeypatch.setattr("cotenant.app.profile_source.profile_model", profiled)
    monkeypatch.setattr(Fake, "name", "mps")  # `fake` measures nothing
    text = 'worker_memory = "2GiB"\nworker_environment = ["MODEL_KEY"]'
    asyncio.run(DeploymentBuilder(settings(folder, text), Fake((LARGE,))).build(["identity"]))
    assert confined == [Confinement(memory=2 * GIB, environment=("MODEL_KEY",))]


@pytest.mark.parametrize("lost", [0, 1])
def test_deployment_builder_plans_for_the_devices_that_are_not_lost(folder: Path, lost: int) -> None:
    (folder / "given.csv").write_text(write_profiles([measured("identity", LARGE, 0.001)]))

    class OneLost(Fake):
        def lost(self) -> dict[DeviceId, str]:
            return {DeviceId("large", lost): "it fell off the bus"}

    text = 'profiles = "given.csv"\n[[models]]\nname = "identity"\nslo = "1s"\nrate = 1500\n'
    builder = DeploymentBuilder(settings(folder, text), OneLost((LARGE,)))
    deployment = asyncio.run(builder.build(["identity"]))
    assert [device.id for device in deployment.plan.devices] == [DeviceId("large", 1 - lost)]
    assert deployment.plan.unserved, "it takes both"
    assert deployment.problem.fleet == (LARGE,), "the other may come back"
    assert not check(deployment.plan, deployment.problem)
