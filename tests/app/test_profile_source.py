"""Profiles that are measured, on several kinds of devices, and those that are known."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cotenant.app.profile_source import ProfileSource, Progress, describe_busy, ignore_progress
from cotenant.app.serving import serving
from cotenant.backends import Launch
from cotenant.backends.cpu import Cpu
from cotenant.core.identity import LaneId
from cotenant.core.model import Kind
from cotenant.core.profile import Point, Profile
from cotenant.errors import ConfigError, DeviceError, ModelError
from cotenant.profiling import cache
from cotenant.profiling.grid import Grid
from cotenant.profiling.machine_load import FOREIGN, MachineLoad, is_busy
from cotenant.worker.repository import Entry, describe, find_model
from tests.app.test_deployment_builder import CUT, LARGE


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


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no other program disturb what is measured here: its profiles would be measured again."""
    monkeypatch.setattr("cotenant.profiling.grid.ForeignLoad.read", lambda self, now: 0.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def grid(kind: Kind) -> Grid:
        return Grid(shares=kind.cuts[:1], batches=(1, 2), seconds=0.01)

    monkeypatch.setattr("cotenant.app.profile_source.coarse_grid_of", grid)


def source(backend: Cut, progress: Progress = ignore_progress) -> ProfileSource:
    return ProfileSource(backend, (LARGE, CUT), progress, force=False)


def profiles(profile_source: ProfileSource) -> list[Profile]:
    """Return the profiles of one model, on both kinds."""
    entry = find_model(Path("models"), "identity")
    return asyncio.run(profile_source.profiles(entry, describe(entry), {}))


@pytest.mark.usefixtures("quick")
def test_profile_source_unprofiled_model_is_measured_once_per_kind(folder: Path) -> None:
    backend = Cut()
    told: list[tuple[str, int, int, int, int]] = []
    measured = profiles(source(backend, lambda *point: told.append(point)))
    shares = {profile.kind: {point.share for point in profile.points} for profile in measured}
    assert shares == {"large": {500}, "cut": {142}}
    assert {lane.device for lane in backend.lanes} == {"large-0", "cut-0"}
    assert ("identity on large", 2, 2, 1, 1) in told and told[-1] == ("identity on cut", 2, 2, 1, 1)
    backend.lanes.clear()
    again = profiles(source(backend))
    assert [profile.kind for profile in again] == ["large", "cut"]
    assert [profile.points for profile in again] == [profile.points for profile in measured]  # to the last digit
    assert backend.lanes == []  # it is known


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("what", ["capacity_fingerprint", "isolation"])
def test_profile_source_profile_of_another_backend_is_not_used(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Cut()
    keys: list[str] = []
    monkeypatch.setattr(cache, "load_profile", keys.append)  # and gives nothing
    profiles(source(backend))
    monkeypatch.setattr(backend, what, lambda: "another driver, or another way to share")
    profiles(source(backend))
    assert len(set(keys)) == 8  # of the full grid and of the coarse one, on two kinds


@pytest.mark.usefixtures("quick")
def test_profile_source_device_without_room_is_named_in_the_error(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"^model 'identity' cannot be measured: .*cut-0/\S* has no room$"):
        profiles(source(Cut(broken="cut-0")))


@pytest.mark.usefixtures("quick")
def test_profile_source_missing_library_fails_only_its_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(distribution: str) -> str:
        raise PackageNotFoundError(distribution)  # that of ONNX Runtime for GPUs has another name

    monkeypatch.setattr("cotenant.app.profile_source.version", version)
    script = folder / "scripts" / "script"
    (script / "1").mkdir(parents=True)
    (script / "1" / "model.pt").write_text("not looked into")
    tensors = [f'{field} {{ name: "{field}__0" data_type: TYPE_FP32 dims: [1] }}' for field in ("input", "output")]
    (script / "config.pbtxt").write_text("\n".join(tensors))
    profile_source, entry = source(Cut()), find_model(folder / "scripts", "script")
    with pytest.raises(ModelError, match=r"model.pt: PyTorch is not installed; run `pip install 'cotenant\[torch\]'`$"):
        asyncio.run(profile_source.profiles(entry, describe(entry), {}))
    assert len(profiles(profile_source)) == 2


def test_profile_source_full_profile_is_used_where_there_is_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.app.profile_source.grid_of", lambda kind: Grid(shares=kind.cuts[:1], batches=(1, 2)))
    monkeypatch.setattr(
        "cotenant.app.profile_source.coarse_grid_of",
        lambda kind: Grid(shares=kind.cuts[:1], batches=(1,), seconds=0.01),
    )
    serving = source(Cut())
    assert {point.batch for profile in profiles(serving) for point in profile.points} == {1}
    full = ProfileSource(Cut(), (LARGE, CUT), ignore_progress, force=False, full=True)
    assert {point.batch for profile in profiles(full) for point in profile.points} == {1, 2}
    for later in (source(Cut()), serving):  # another start, and a reload
        assert {point.batch for profile in profiles(later) for point in profile.points} == {1, 2}


GRID = Grid(shares=(500,), batches=(1, 2), seconds=0.01)
KIND = msgspec.structs.replace(LARGE, name="cpu")


class Kept:
    """A source of profiles that have been given for one model, from the cache of a full or of a first profile."""

    def __init__(self, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cotenant.app.profile_source.grid_of", lambda kind: GRID)
        coarse = msgspec.structs.replace(GRID, batches=(1,))
        monkeypatch.setattr("cotenant.app.profile_source.coarse_grid_of", lambda kind: coarse)
        shutil.copytree("models", "copies")  # those are changed
        self.entry = find_model(Path("copies"), "identity")
        self.given(full=full)
        self.source, self.profile = self.given()
        points = [Point(share=500, batch=batch, latency=0.25 * batch, memory=1) for batch in (1, 2)]
        self.refined = Profile("identity", "cpu", points)

    def given(self, full: bool = False) -> tuple[ProfileSource, Profile]:
        """Begin anew."""
        source = ProfileSource(Cpu(), (KIND,), ignore_progress, force=False, full=full)
        (profile,) = asyncio.run(source.profiles(self.entry, describe(self.entry), {}))
        return source, profile

    def keep(self, entry: Entry | None = None) -> Profile:
        (kept,) = asyncio.run(self.source.keep(entry or self.entry, self.refined))
        assert kept[0] == self.entry
        return kept[1]


@pytest.mark.parametrize("full", [False, True])
def test_profile_with_more_points_is_found_by_the_next_start_in_place_of_the_one_before(
    full: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(full, monkeypatch)
    assert len(kept.profile.points) == (2 if full else 1)
    assert kept.keep().points == kept.given()[1].points == kept.refined.points
    assert len(list(cache.cache_folder().glob("*.csv"))) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "has changed since the model was loaded"),
        (Path.unlink, "cannot read the model: No such file or directory"),
    ],
)
def test_profile_of_a_model_whose_file_is_not_the_one_any_more_is_not_kept(
    change: Callable[[Path], object], told: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(False, monkeypatch)
    change(kept.entry.path)
    with pytest.raises(ModelError, match=rf"model\.onnx:? {told}$"):
        kept.keep()


def test_profile_of_a_version_that_is_being_replaced_is_not_kept_for_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next was looked up already, and the file is that of it."""
    kept = Kept(False, monkeypatch)
    before, kept.entry = kept.entry, msgspec.structs.replace(kept.entry, stamp="next")
    asyncio.run(kept.source.look_up(kept.entry, {}))
    with pytest.raises(ModelError, match="has changed since the model was loaded"):
        kept.keep(before)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("used", "measured_again"), [(0.0, True), (1.9, False)])
def test_profile_source_busy_profile_is_measured_again_on_a_quiet_machine(
    used: float, measured_again: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.profiling.grid.ForeignLoad.read", lambda self, now: 0.5)
    assert all(is_busy(profile) for profile in profiles(source(Cut())))
    monkeypatch.setattr("cotenant.profiling.grid.ForeignLoad.read", lambda self, now: 0.0)
    monkeypatch.setattr("cotenant.app.profile_source.measure_load", lambda: MachineLoad(used=used, processors=2))
    assert all(is_busy(profile) for profile in profiles(source(Cut()))) != measured_again


@pytest.mark.usefixtures("quick")
def test_profile_is_not_measured_with_every_look_on_a_machine_that_was_quiet_at_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.profiling.grid.ForeignLoad.read", lambda self, now: 0.5)
    profiles(source(Cut()))
    monkeypatch.setattr("cotenant.app.profile_source.measure_load", lambda: MachineLoad(used=0.0, processors=2))
    backend = Cut()
    again = source(backend)
    measured = profiles(again)
    assert backend.lanes and all(is_busy(profile) for profile in measured)  # others began meanwhile
    backend.lanes.clear()
    assert [profile.points for profile in profiles(again)] == [profile.points for profile in measured]
    assert backend.lanes == []


@pytest.mark.usefixtures("quick")
def test_profile_that_cannot_be_kept_is_used_and_kept_once_it_can_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "full").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "full"))
    with pytest.raises(ConfigError, match="cannot keep the profile"):  # nobody would hear of it
        profiles(source(Cut()))
    told: list[str] = []
    profile_source = ProfileSource(Cut(), (LARGE, CUT), ignore_progress, force=False, unkept=told.append)
    measured = profiles(profile_source)
    assert [profile.kind for profile in measured] == ["large", "cut"]
    assert [text.endswith("set XDG_CACHE_HOME to a folder that can be written") for text in told] == [True, True]
    assert told[0] in caplog.text
    (folder / "full").unlink()
    profile_source.kinds = (KIND,)
    profiles(profile_source)
    assert told[2:] == [""]
    assert len(list(cache.cache_folder().glob("*.csv"))) == 3, "those of before are kept, too"


def test_server_whose_profiles_cannot_be_kept_loads_a_model_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "full").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "full"))
    text = Path("serve.toml").read_text().replace('profiles = "profiles.csv"', 'load_models = ["lookup"]')
    Path("serve.toml").write_text(text)

    async def main() -> None:
        async with serving("serve.toml") as server:
            await server.load("identity")
            assert (await server.infer("identity", {"x": np.zeros((1, 16), np.float32)}))["y"].shape == (1, 16)
            errors = (await server.status()).file_errors
            assert [error for error in errors if "cannot keep the profile: Not a directory" in error]

    asyncio.run(main())


@pytest.mark.usefixtures("quick")
def test_profile_source_order_of_parameters_in_the_configuration_does_not_matter(folder: Path) -> None:
    backend = Cut()
    entry = find_model(Path("models"), "identity")
    one, other = (
        {"a": {"string_value": "1"}, "b": {"string_value": "2"}},
        {"b": {"string_value": "2"}, "a": {"string_value": "1"}},
    )
    for parameters in (one, other):
        config = msgspec.structs.replace(entry.config, fields={"parameters": parameters})
        configured = msgspec.structs.replace(entry, config=config)
        asyncio.run(source(backend).profiles(configured, describe(entry), {}))
    assert len(backend.lanes) == 2  # one for each kind


def test_profiles_of_a_busy_machine_are_told_in_one_line() -> None:
    def profile(model: str, foreign: float) -> Profile:
        return Profile(model, "cpu", [Point(share=1000, batch=1, latency=1.0, memory=1, features={FOREIGN: foreign})])

    told = "profiled while other programs used {} % of the processors; {} will be profiled again on a quiet machine"
    assert describe_busy([profile("a", 10.0)]) == ""
    assert describe_busy([profile("a", 10.0), profile("b", 48.2)]) == "b was " + told.format(48, "it")
    busy = [profile("a", 11.0), profile("b", 98.0), profile("c", 40.0)]
    assert describe_busy(busy) == "3 models were " + told.format("11 to 98", "they")
