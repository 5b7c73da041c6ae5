"""Profiles that are refined while a server serves, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path

import pytest

from cotenant.app import profile_refiner
from cotenant.app.profile_refiner import ProfileRefiner
from cotenant.app.refinement import PERIOD, _looking
from cotenant.control.refinement_gate import MachineUse, RefinementGate
from cotenant.core.profile import Point, Profile
from cotenant.errors import ConfigError
from cotenant.live.deployment import Deployment, ServableModel, with_profile, without_model
from cotenant.profiling.grid import Grid
from tests.live.deployment import repository, sample_deployment
from tests.virtual_loop import virtual_loop

GRID = Grid(shares=(1000, 500), batches=(1, 2, 4))
POINT = 0.7  # seconds that a measurement takes
QUIET = MachineUse(foreign=0.0, own=0.0, changing=False)
BUSY = MachineUse(foreign=0.0, own=0.5, changing=False)


def point(share: int, batch: int, **features: float) -> Point:
    return Point(share=share, batch=batch, latency=0.01 * batch, memory=1 << 20, features=features)


COARSE = [point(1000, 1), point(1000, 4), point(500, 1), point(500, 4)]


class World:
    """A server whose models have coarse profiles, and measurements that take a while."""

    def __init__(self, folder: Path, profiles: Mapping[str, Sequence[Point]]) -> None:
        deployment = sample_deployment(repository(folder))
        for name, points in profiles.items():
            deployment = with_profile(deployment, Profile(name, "cpu", points))
        self.deployment: Deployment = deployment
        self.use = QUIET
        self.asked: list[tuple[str, int]] = []  # model, and how many points were known
        self.measured: list[tuple[str, int, int]] = []
        self.ended = 0  # measurements whose worker has ended
        self.told: list[str] = []
        self.refined: list[str] = []
        self.error: Exception | None = None
        self.failure = ""
        self.closing = 0.0  # seconds that the worker takes to end
        self.use_at: Callable[[float], MachineUse] = lambda now: self.use
        self.refiner = ProfileRefiner(
            RefinementGate(foreign=0.1, own=0.1, seconds=3.0),
            GRID,
            deployment=lambda: self.deployment,
            profiles=lambda deployment: {
                key: profile for key, profile in deployment.problem.profiles.items() if key[0] in profiles
            },
            use=self._use,
            measure=self._measure,
            refined=self._refined,
            tell=self.told.append,
            clock=self.now,
        )

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _use(self) -> MachineUse:
        return self.use_at(self.now())

    async def _measure(self, servable: ServableModel, known: Sequence[Point]) -> AsyncGenerator[Point | str]:
        name = servable.entry.name
        self.asked.append((name, len(known)))
        there = {(each.share, each.batch) for each in known}
        try:
            for share, batch in itertools.product(GRID.shares, GRID.batches):
                if (share, batch) not in there:
                    await asyncio.sleep(POINT)
                    if self.error is not None:
                        raise self.error
                    if self.failure:
                        yield self.failure
                        return
                    self.measured.append((name, share, batch))
                    yield point(share, batch, new=1.0)
        finally:
            await asyncio.sleep(self.closing)
            self.ended += 1

    async def _refined(self, servable: ServableModel, profile: Profile) -> None:
        self.refined.append(profile.model)
        self.deployment = with_profile(self.deployment, profile)

    def points(self, name: str) -> set[tuple[int, int]]:
        return {(each.share, each.batch) for each in self.deployment.problem.profiles[name, "cpu"].points}

    def run(self, seconds: float) -> None:
        async def looking() -> None:
            while self.now() < seconds:
                await asyncio.sleep(PERIOD)
                await self.refiner.look()
            await self.refiner.stop()

        in_virtual_time(looking())


def in_virtual_time(scene: Coroutine[object, object, None]) -> None:
    loop = virtual_loop()
    try:
        loop.run_until_complete(scene)
    finally:
        loop.close()


def world(folder: Path, *models: str) -> World:
    return World(folder, dict.fromkeys(models, COARSE))


ALL = set(itertools.product(GRID.shares, GRID.batches))


def test_missing_points_are_measured_one_model_after_the_other(tmp_path: Path) -> None:
    given = world(tmp_path, "identity", "lookup")
    plan = given.deployment.plan
    given.run(12.0)
    assert given.measured == [("identity", 1000, 2), ("identity", 500, 2), ("lookup", 1000, 2), ("lookup", 500, 2)]
    assert given.points("identity") == given.points("lookup") == ALL
    assert given.deployment.plan is plan  # that is the controller's
    assert given.told[0] == "2 profiles to refine, waiting: the machine has been quiet for less than 3 s"
    assert "profile of identity is being refined, 2 points left" in given.told
    assert "profile of lookup is being refined, 1 point left" in given.told
    assert given.told[-1] == ""


def test_busy_machine_is_left_alone(tmp_path: Path) -> None:
    given = world(tmp_path, "identity")
    given.use = BUSY
    given.run(20.0)
    assert given.asked == [] and given.told[-1] == "1 profile to refine, waiting: requests are served"


def test_measurement_yields_to_load_and_goes_on_from_what_it_had(tmp_path: Path) -> None:
    """The first point is there, and confirmed, before load comes; the second was measured beside it."""
    given = world(tmp_path, "identity")
    given.use_at = lambda now: BUSY if 4.7 < now < 5.2 else QUIET
    given.run(6.0)
    assert given.measured == [("identity", 1000, 2), ("identity", 500, 2)]
    assert given.ended == 1 and given.points("identity") == {(each.share, each.batch) for each in COARSE}
    given.use_at = lambda now: QUIET
    given.run(12.0)
    assert given.asked == [("identity", 4), ("identity", 5)]
    assert given.measured[2:] == [("identity", 500, 2)] and given.points("identity") == ALL


def test_points_of_a_busy_machine_are_measured_again(tmp_path: Path) -> None:
    spoilt = [point(1000, 1, foreign_pct=40.0), *COARSE[1:]]
    given = World(tmp_path, {"identity": spoilt})
    given.run(9.0)
    assert given.measured[0] == ("identity", 1000, 1)
    points = given.deployment.problem.profiles["identity", "cpu"].points
    assert {(each.share, each.batch): each.features for each in points}[1000, 1] == {"new": 1.0}


@pytest.mark.parametrize("how", ["reason", "typed", "unexpected"])
def test_model_that_cannot_be_measured_is_left_as_it_is_and_keeps_no_other(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = world(tmp_path, "identity", "lookup")
    if how == "reason":
        given.failure = "it ran out of memory"
    else:
        given.error = ConfigError("no") if how == "typed" else ZeroDivisionError("no")
    given.run(30.0)
    assert [name for name, _ in given.asked] == ["identity", "lookup"]  # once each
    assert given.ended == 2 and given.told[-1] == ""
    assert sum("stays as it is" in record.message for record in caplog.records) == 2


def test_profile_whose_other_points_are_of_no_use_is_complete(tmp_path: Path) -> None:
    given = world(tmp_path, "identity")
    given.refiner._measure = _nothing
    given.run(30.0)
    assert given.told[-1] == "" and given.refined == []


async def _nothing(servable: ServableModel, known: Sequence[Point]) -> AsyncGenerator[Point | str]:
    return
    yield


def test_machine_without_memory_for_another_worker_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_refiner, "ROOM", 1e12)
    given = world(tmp_path, "identity")
    given.run(9.0)
    assert given.asked == [] and given.told[-1].endswith("waiting: too little memory is available")


@pytest.mark.parametrize("until", [4.2, 30.0])
def test_model_that_is_loaded_again_is_measured_for_its_new_profile(until: float, tmp_path: Path) -> None:
    """In the middle of its measurement, or after it."""
    given = world(tmp_path, "identity")
    given.use_at = lambda now: QUIET if now < until else BUSY
    given.run(8.0)
    assert given.asked == [("identity", 4)]
    given.deployment = with_profile(given.deployment, Profile("identity", "cpu", COARSE))
    given.use_at = lambda now: QUIET
    given.run(12.0)
    assert given.asked == [("identity", 4), ("identity", 4)] and given.points("identity") == ALL


def test_model_that_is_unloaded_between_two_looks_is_measured_no_more(tmp_path: Path) -> None:
    given = world(tmp_path, "identity", "lookup")

    def use(now: float) -> MachineUse:
        if now > 4.0:
            given.deployment = without_model(given.deployment, "identity")
        return QUIET

    given.use_at = use
    given.run(12.0)
    assert given.asked == [("identity", 4), ("lookup", 4)] and given.ended == 2
    assert given.refined == ["lookup"] and given.told[-1] == ""


def test_model_that_is_not_loaded_is_not_measured(tmp_path: Path) -> None:
    given = world(tmp_path, "identity", "lookup")
    given.deployment = without_model(given.deployment, "identity")
    given.run(12.0)
    assert given.asked == [("lookup", 4)] and given.told[0].startswith("1 profile to refine")
    assert given.told[-1] == ""


def test_failure_that_ends_beside_load_is_forgotten(tmp_path: Path) -> None:
    """The measurement has failed when load is seen; it is begun anew, and succeeds."""
    given = world(tmp_path, "identity")
    given.failure = "no memory"
    given.use_at = lambda now: BUSY if 4.2 < now < 4.7 else QUIET
    given.run(4.6)
    given.failure = ""
    given.run(12.0)
    assert given.points("identity") == ALL


@pytest.mark.parametrize("pause", [0.0, 0.1])
@pytest.mark.parametrize("cancellations", [1, 2, 5])
def test_server_that_ends_ends_the_worker_that_measures_however_often_it_is_interrupted(
    cancellations: int, pause: float, tmp_path: Path
) -> None:
    given = world(tmp_path, "identity")
    given.closing = 1.0

    async def served() -> None:
        async with _looking(given.refiner):
            await asyncio.sleep(4.0)
            assert given.asked and not given.ended

    async def scene() -> None:
        server = asyncio.create_task(served())
        await asyncio.sleep(3.9)
        for _ in range(cancellations):
            server.cancel()
            await asyncio.sleep(pause)
        with pytest.raises(asyncio.CancelledError):
            await server
        assert given.ended == 1 and len(asyncio.all_tasks()) == 1

    in_virtual_time(scene())


def test_look_that_fails_again_and_again_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = world(tmp_path, "identity")
    failures = {1.0: "one", 1.5: "one", 2.0: "one", 2.5: "other", 3.5: "other"}

    def use(now: float) -> MachineUse:
        if now in failures:
            raise OSError(failures[now])
        return QUIET

    async def scene() -> None:
        async with _looking(given.refiner):
            await asyncio.sleep(12.2)

    given.use_at = use
    in_virtual_time(scene())
    told = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert told == ["one", "other", "other"]  # between the last two, one went well
    assert given.points("identity") == ALL
