"""From a repository to a site, for several devices of several kinds."""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import msgspec
import pytest

from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.backends import Launch
from cotenant.backends.cpu import Cpu
from cotenant.backends.fake import Fake
from cotenant.config import Settings, read_settings
from cotenant.core.identity import LaneId
from cotenant.core.mig import fixed_geometry
from cotenant.core.model import Kind
from cotenant.core.profile import Point, Profile, write_profiles
from cotenant.errors import DeviceError, ModelError
from cotenant.planners.check import check
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample, write_samples
from cotenant.profiling import cache
from cotenant.profiling.grid import Grid
from cotenant.worker.repository import describe, find_model

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


def test_each_kind_has_its_profile_and_its_own_shares(folder: Path) -> None:
    profiles = [measured("identity", LARGE, 0.001), measured("identity", CUT, 0.01)]
    (folder / "given.csv").write_text(write_profiles(profiles))
    preparation = DeploymentBuilder(settings(folder, 'profiles = "given.csv"'), Fake((LARGE, CUT)))
    site = asyncio.run(preparation.site(["identity"]))
    assert site.problem.fleet == (LARGE, CUT)
    assert set(site.problem.profiles) == {("identity", "large"), ("identity", "cut")}
    # The slower kind must keep the usual target, too: twice 8 rows on the largest instance, which is less than half.
    assert site.problem.models[0].slo == pytest.approx(2 * 0.08 / 0.428, rel=1e-3)
    assert {device.id for device in site.plan.devices} == {"large-0", "large-1", "cut-0"}
    assert sum(len(device.partitions) for device in site.plan.devices if device.kind == "cut") <= 2
    assert check(site.plan, site.problem) == []


def test_what_was_seen_corrects_what_is_predicted(folder: Path) -> None:
    names = ("identity", "lookup")
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, 0.001) for name in names]))
    loads = [Load(name, "large", batch, 500) for name in names for batch in (1, 8)]
    runs = [(one, (other,)) for one in loads for other in loads]
    pairs = [Sample(victim, beside, 0.01, 0.011 + 0.0001 * beside[0].batch) for victim, beside in runs]
    (folder / "pairs.csv").write_text(write_samples(pairs))
    text = 'profiles = "given.csv"\ninterference = { model = "gaussian-process", fit = "pairs.csv" }'
    preparation = DeploymentBuilder(settings(folder, text), Fake((LARGE,)))
    seen = [Sample(*runs[1], 0.01, 0.02)] * 9
    before, after = (
        asyncio.run(preparation.site(names, samples)).problem.interference.slowdown(*runs[1]) for samples in ((), seen)
    )
    assert before == pytest.approx(1.18, abs=0.1)
    assert after > 1.6


class Cut(Cpu):
    """A processor that says that it is two kinds of devices."""

    def __init__(self, broken: str = "") -> None:
        super().__init__()
        self.broken = broken
        self.lanes: list[LaneId] = []

    def fleet(self) -> tuple[Kind, ...]:
        return (LARGE, CUT)

    def open(self, lane: LaneId, share: int, leaving: object = ()) -> Launch:
        if lane.startswith(self.broken) and self.broken:
            raise DeviceError(f"{lane} has no room")
        self.lanes.append(lane)
        return super().open(lane, share)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def grid(kind: Kind) -> Grid:
        return Grid(shares=kind.cuts[:1], batches=(1, 2), seconds=0.01)

    monkeypatch.setattr("cotenant.app.deployment_builder.grid_of", grid)


async def profiles(preparation: DeploymentBuilder) -> list[Profile]:
    """Of one model, on both kinds."""
    entry = find_model(Path("models"), "identity")
    return [await preparation.profile(entry, describe(entry), kind) for kind in (LARGE, CUT)]


@pytest.mark.usefixtures("quick")
def test_a_model_is_measured_on_the_first_device_of_every_kind(folder: Path) -> None:
    backend = Cut()
    told: list[tuple[str, int, int]] = []
    known = settings(folder)
    found = asyncio.run(profiles(DeploymentBuilder(known, backend, lambda *progress: told.append(progress))))
    shares = {profile.kind: {point.share for point in profile.points} for profile in found}
    assert shares == {"large": {500}, "cut": {142}}
    assert {lane.device for lane in backend.lanes} == {"large-0", "cut-0"}
    assert ("identity on large", 2, 2) in told and told[-1] == ("identity on cut", 2, 2)
    backend.lanes.clear()
    again = asyncio.run(profiles(DeploymentBuilder(known, backend)))
    assert [profile.kind for profile in again] == ["large", "cut"]
    assert backend.lanes == []  # it is known


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("what", ["capacity_fingerprint", "isolation"])
def test_what_was_measured_otherwise_is_measured_anew(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Cut()
    keys: list[str] = []
    monkeypatch.setattr(cache, "load_profile", keys.append)  # and gives nothing
    asyncio.run(profiles(DeploymentBuilder(settings(folder), backend)))
    monkeypatch.setattr(backend, what, lambda: "another driver, or another way to share")
    asyncio.run(profiles(DeploymentBuilder(settings(folder), backend)))
    assert len(set(keys)) == 4


@pytest.mark.usefixtures("quick")
def test_a_device_on_which_nothing_can_be_measured_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"^model 'identity' cannot be measured: .*cut-0/profile\S* has no room$"):
        asyncio.run(profiles(DeploymentBuilder(settings(folder), Cut(broken="cut-0"))))


@pytest.mark.usefixtures("quick")
def test_a_library_that_is_not_installed_costs_its_models_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(distribution: str) -> str:
        raise PackageNotFoundError(distribution)  # that of ONNX Runtime for GPUs has another name

    monkeypatch.setattr("cotenant.app.deployment_builder.version", version)
    script = folder / "scripts" / "script"
    (script / "1").mkdir(parents=True)
    (script / "1" / "model.pt").write_text("not looked into")
    tensors = [f'{it} {{ name: "{it}__0" data_type: TYPE_FP32 dims: [1] }}' for it in ("input", "output")]
    (script / "config.pbtxt").write_text("\n".join(tensors))
    preparation, entry = DeploymentBuilder(settings(folder), Cut()), find_model(folder / "scripts", "script")
    with pytest.raises(ModelError, match=r"model.pt: PyTorch is not installed; run `pip install 'cotenant\[torch\]'`$"):
        asyncio.run(preparation.profile(entry, describe(entry), LARGE))
    assert len(asyncio.run(profiles(preparation))) == 2


def test_a_kind_keeps_what_settings_do_not_say(folder: Path) -> None:
    path = folder / "fake.toml"
    path.write_text('backend = "fake"\nmodel_repository = "models"\nprofiles = "given.csv"\ncpu = { cuts = [50, 100] }')
    kinds = (msgspec.structs.replace(LARGE, cuts=(100, 1000)),)
    (folder / "given.csv").write_text(write_profiles([measured("identity", LARGE, 0.001)]))
    site = asyncio.run(DeploymentBuilder(read_settings(path), Fake(kinds)).site(["identity"]))
    assert site.problem.fleet[0] == LARGE
