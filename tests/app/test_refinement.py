"""Profiles that are refined by real workers, beside those of a real server."""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import aclosing, nullcontext
from pathlib import Path

import msgspec
import pytest

from cotenant.app import refinement
from cotenant.app.refinement import _MachineUse, _measuring, _Spent, refining
from cotenant.app.serving import serving
from cotenant.backends.cpu import Cpu
from cotenant.config import ModelSettings, Settings, read_settings
from cotenant.control.refinement_gate import MachineUse
from cotenant.core.model import Kind
from cotenant.core.profile import Point
from cotenant.profiling.grid import Grid
from tests.live.deployment import repository, sample_deployment

GRID = Grid(shares=(1000,), batches=(1, 2), seconds=0.01)
LIMIT = 60.0  # seconds, for a machine with much to do


def children() -> set[int]:
    return {int(pid) for names in Path("/proc/self/task").glob("*/children") for pid in names.read_text().split()}


@pytest.fixture
def backgrounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were to run in the background; here they do not, where other programs could keep them from
    running at all."""
    pids: list[int] = []
    monkeypatch.setattr("cotenant.live.confinement._put_into_background", pids.append)
    return pids


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no SCHED_IDLE")
def test_worker_that_measures_gets_what_nobody_else_wants_and_ends_with_the_measurement(
    backgrounded: list[int], tmp_path: Path
) -> None:
    servable = sample_deployment(repository(tmp_path)).offered["identity"]
    spent = _Spent()
    measure = _measuring(read_settings(), Cpu(), GRID, spent)
    known = [Point(share=1000, batch=1, latency=0.001, memory=1 << 20)]

    async def measured() -> list[Point | str]:
        points: list[Point | str] = []
        before = children()
        async with asyncio.timeout(LIMIT), aclosing(measure(servable, known)) as results:
            async for point in results:
                points.append(point)
                (worker,) = children() - before
                assert backgrounded == [worker]
        assert children() <= before
        return points

    (point,) = asyncio.run(measured())
    assert isinstance(point, Point) and (point.share, point.batch) == (1000, 2)
    assert spent.seconds > 0


class FakeTime:
    """Stand for `time`: the event loop uses its processor where it says so."""

    def __init__(self) -> None:
        self.now = self.used = 0.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.used


class Idle:
    """A server that runs no batch."""

    is_changing = runs_jobs = False

    def busy_seconds(self) -> float:
        return 0.0


@pytest.mark.parametrize("end", ["result", "error", "cancelled"])
def test_what_the_refinement_itself_uses_of_the_event_loop_is_no_load_that_it_yields_to(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, spent = FakeTime(), _Spent()
    monkeypatch.setattr(refinement, "time", clock)

    async def work() -> int:
        clock.used += 0.4
        try:
            await asyncio.sleep(0)
            if end == "error":
                raise ZeroDivisionError
            await asyncio.sleep(LIMIT if end == "cancelled" else 0)
        finally:
            clock.used += 0.3
        return 7

    async def counted() -> int:
        return await spent.count(work())

    async def scene() -> float:
        use = _MachineUse(Idle(), spent)  # type: ignore[arg-type]
        task = asyncio.create_task(counted())
        await asyncio.sleep(0)
        clock.used += 0.05  # for a caller
        await asyncio.sleep(0)
        if end == "cancelled":
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        wanted = {"result": int, "error": ZeroDivisionError, "cancelled": asyncio.CancelledError}
        assert isinstance(result, wanted[end])
        clock.now += 1.0
        return (await use()).own

    assert asyncio.run(scene()) == pytest.approx(0.05)
    assert spent.seconds == pytest.approx(0.7)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backgrounded: list[int]) -> Settings:
    """Of a server whose machine is quiet from the beginning, and whose grids are small."""

    class Quiet:
        def __init__(self, server: object, spent: object) -> None:
            pass

        async def __call__(self) -> MachineUse:
            return MachineUse(foreign=0.0, own=0.0, changing=False)

    def coarse(kind: Kind) -> Grid:
        return msgspec.structs.replace(GRID, batches=(1,))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("cotenant.app.profile_source.coarse_grid_of", coarse)
    monkeypatch.setattr("cotenant.app.profile_source.is_busy", lambda profile: False)  # whatever else runs here
    monkeypatch.setattr(refinement, "grid_of", lambda kind: GRID)
    monkeypatch.setattr(refinement, "_MachineUse", Quiet)
    monkeypatch.setattr(refinement, "QUIET", 0.0)
    monkeypatch.setattr(refinement, "PERIOD", 0.02)
    root = repository(tmp_path / "models")
    served = {"models": (ModelSettings(name="identity", slo=LIMIT),), "load_models": ("identity",)}
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    return msgspec.structs.replace(read_settings(), model_repository=root, **served, **ports)


def test_server_that_adapts_refines_its_profiles_and_the_next_one_begins_with_them(settings: Settings) -> None:
    async def served(until: int) -> tuple[Point, ...]:
        async with asyncio.timeout(LIMIT), serving(settings) as server:
            while len(profile := server.deployment.problem.profiles["identity", "cpu"].points) < until:
                await asyncio.sleep(0.01)
            while (seen := (await server.status()).adaptation) is None or seen.refinement:
                await asyncio.sleep(0.01)
            return profile

    refined = asyncio.run(served(until=2))
    assert [point.batch for point in refined] == [1, 2]
    assert asyncio.run(served(until=0)) == refined  # to the last digit: a plan that is kept would be of no use


def test_models_of_the_same_file_are_refined_as_one(settings: Settings) -> None:
    assert isinstance(settings.model_repository, Path)
    shutil.copytree(settings.model_repository / "identity", settings.model_repository / "twin")
    twins = tuple(ModelSettings(name=name, slo=LIMIT) for name in ("identity", "twin"))
    asked = msgspec.structs.replace(settings, models=twins, load_models=("identity", "twin"))

    async def served() -> list[tuple[Point, ...]]:
        async with asyncio.timeout(LIMIT), serving(asked) as server:
            found: list[tuple[Point, ...]] = [()]
            while min(map(len, found)) < 2:
                await asyncio.sleep(0.01)
                profiles = server.deployment.problem.profiles
                found = [profiles[model.name, "cpu"].points for model in twins]
            return found

    one, other = asyncio.run(served())
    assert one == other  # to the last digit


@pytest.mark.parametrize("change", [{"adapt": False}, {"refine_profiles": False}, {"enforcement": "quota"}])
def test_server_that_is_not_asked_to_refines_nothing(change: dict[str, object], settings: Settings) -> None:
    """Nor does one with quotas: its workers would need control groups beside those that serve."""

    class Server(Idle):
        deployment = sample_deployment(settings.model_repository)

    asked = msgspec.structs.replace(settings, **change)
    assert isinstance(refining(asked, Cpu(), Server(), None), nullcontext)  # type: ignore[arg-type]
