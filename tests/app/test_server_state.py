from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import shutil
import sqlite3
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from cotenant.app import server_state
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.lifecycle import running
from cotenant.app.server_state import StateFile, kept, restored, state_key, state_path
from cotenant.app.startup import prepare_deployment
from cotenant.backends.cpu import Cpu
from cotenant.cli.status import status_view
from cotenant.config import Settings, read_settings
from cotenant.core.plan import Plan
from cotenant.core.profile import slowed_profiles
from cotenant.live.adaptation import Learnt
from cotenant.live.deployment import Deployment
from cotenant.live.profile_corrections import ProfileCorrections
from cotenant.planners.check import check
from cotenant.planning import plan as plan_problem
from tests.live.deployment import csv, repository, sample_deployment

SERVE = """
model_repository = "models"
profiles = "profiles.csv"
state = "state.sqlite"
http_port = 0
grpc_port = 0
metrics_port = 0
[[models]]
name = "identity"
slo = "2s"
rate = 20
[[models]]
name = "lookup"
slo = "2s"
rate = 10
"""


def settings_of(root: Path) -> Settings:
    repository(root / "models")
    (root / "profiles.csv").write_text(csv())
    (root / "serve.toml").write_text(SERVE)
    return read_settings(root / "serve.toml")


def learnt_of(plan: Plan, rate: float = 20.0) -> Learnt:
    return Learnt(plan=plan, rates={"identity": rate, "lookup": 10.0}, slowdowns={"identity": 1.25})


def test_state_is_what_was_stored_under_its_key(tmp_path: Path) -> None:
    given = sample_deployment(repository(tmp_path / "models"))
    file = StateFile(tmp_path / "new" / "state.sqlite")
    assert file.load("a") is None and file.problem == ""
    file.store("a", learnt_of(given.plan))
    file.store("a", learnt_of(given.plan, 1 / 3))
    assert StateFile(tmp_path / "new" / "state.sqlite").load("a") == learnt_of(given.plan, 1 / 3)
    assert file.load("b") is None
    file.store("b", learnt_of(given.plan))
    assert file.load("a") is None


def test_correction_of_a_profile_outlives_the_plan_and_ends_with_the_profile(tmp_path: Path) -> None:
    given = sample_deployment(repository(tmp_path / "models")).problem
    corrections = ProfileCorrections()
    corrections.correct("identity", 1.3, 512, given)
    file = StateFile(tmp_path / "state.sqlite")
    assert file.corrections() == {}
    file.store("a", learnt_of(Plan(planner="none")), corrections.known)
    assert file.load("other settings") is None
    known = ProfileCorrections(file.corrections())
    assert known.known == corrections.known
    assert known.factors(given) == {"identity": 1.3}
    measured_again = slowed_profiles(given.profiles, {"identity": 1.01})
    assert known.factors(msgspec.structs.replace(given, profiles=measured_again)) == {}


def test_server_plans_with_corrected_profiles_after_a_restart(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    async def main() -> None:
        first = await prepare_deployment(DeploymentBuilder(settings, Cpu()))
        corrections = ProfileCorrections()
        corrections.correct("identity", 1.5, 512, first.deployment.problem)
        StateFile(tmp_path / "state.sqlite").store("a", learnt_of(first.deployment.plan), corrections.known)
        again = await prepare_deployment(DeploymentBuilder(settings, Cpu()))
        assert again.deployment.slowdowns == {"identity": 1.5}
        assert corrections.factors(again.deployment.problem) == {"identity": 1.5}, "profiles are as measured"
        slowed = slowed_profiles(first.deployment.problem.profiles, again.deployment.slowdowns)
        assert check(again.deployment.plan, msgspec.structs.replace(first.deployment.problem, profiles=slowed)) == []
        async with running(settings, Cpu()) as server:
            status = (await server.status()).adaptation
            assert status is not None
            assert status.models["identity"].slowdown == 1.5
            assert status.corrections["identity"].batches == 512

    asyncio.run(main())


def test_state_file_that_a_full_disk_left_empty_holds_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state.sqlite").touch()
    file = StateFile(tmp_path / "state.sqlite")
    assert file.load("key") is None and file.corrections() == {}
    assert file.problem == "" and caplog.text == ""


def test_broken_state_is_put_aside_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = sample_deployment(repository(tmp_path / "models"))
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"this is no database, and long enough to be taken for one" * 100)
    file = StateFile(path)
    assert file.load("a") is None
    assert "state.sqlite: the state of the last run is broken, and now state.sqlite.broken: " in file.problem
    assert (tmp_path / "state.sqlite.broken").exists()
    file.store("a", learnt_of(given.plan))
    assert file.problem == "" and file.load("a") is not None
    assert len(caplog.records) == 1


def test_state_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    file = StateFile(tmp_path / "file" / "state.sqlite")
    for _ in range(3):
        file.store("a", learnt_of(Plan(planner="none")))
    assert file.problem.startswith(f"the state for a restart cannot be kept in {tmp_path}/file/state.sqlite: ")
    assert len(caplog.records) == 1


def may_claim(path: Path) -> bool:
    file = StateFile(path)
    try:
        return file.claim()
    finally:
        file.release()


def test_second_server_keeps_no_state_in_the_file_of_a_living_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_state, "PERIOD", 0.001)
    path = tmp_path / "new" / "state.sqlite"
    first, second = learnt_of(Plan(planner="first")), learnt_of(Plan(planner="second"))
    told: list[str] = []

    async def until(stored: Learnt) -> None:
        async with asyncio.timeout(60):
            while StateFile(path).load("a") != stored:
                await asyncio.sleep(0.001)

    async def main() -> None:
        async with AsyncExitStack() as ends_later:
            async with kept(StateFile(path), lambda: "a", lambda: first):
                await until(first)
                await ends_later.enter_async_context(
                    kept(StateFile(path), lambda: "a", lambda: second, told=told.append)
                )
                while len(told) < 3:
                    await asyncio.sleep(0.001)
                assert StateFile(path).load("a") == first
                assert set(told) == {
                    f"another server keeps its state in {path}, so this one keeps none; give it a file of its own "
                    "(`state` in the settings, or --state)"
                }
            await until(second)  # the first has ended
        assert told[-1] == ""

    asyncio.run(main())
    assert caplog.text.count("another server keeps its state") == 1
    assert may_claim(path), "both have ended"


def test_second_server_shows_that_another_keeps_the_state(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    async def main() -> None:
        async with running(settings, Cpu()) as first, running(settings, Cpu()) as second:
            async with asyncio.timeout(60):
                while not (errors := (await second.status()).file_errors):
                    await asyncio.sleep(0.01)
            assert errors[0].startswith(f"another server keeps its state in {tmp_path / 'state.sqlite'}, so this one")
            assert (await first.status()).file_errors == ()

    asyncio.run(main())


def test_server_that_was_killed_leaves_its_state_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    claims = (
        "import sys, time; from pathlib import Path; from cotenant.app.server_state import StateFile\n"
        "file = StateFile(Path(sys.argv[1])); print(file.claim(), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", claims, path], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "True\n"
        assert not may_claim(path)
        killed.kill()
    assert may_claim(path)


def test_state_that_could_not_be_written_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_state, "PERIOD", 0.001)
    folder = tmp_path / "folder"
    folder.write_text("")
    file, learnt = StateFile(folder / "state.sqlite"), learnt_of(Plan(planner="none"))
    told: list[str] = []

    async def main() -> None:
        async with kept(file, lambda: "a", lambda: learnt, told=told.append):
            while not file.problem:
                await asyncio.sleep(0.001)
            folder.unlink()
        assert file.load("a") == learnt
        assert told[0].startswith("the state for a restart cannot be kept in ") and told[-1] == ""

    asyncio.run(main())


def test_state_whose_place_is_not_known_for_a_moment_is_kept_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the working directory, to which paths are relative, is being replaced."""
    monkeypatch.setattr(server_state, "PERIOD", 0.001)
    place, learnt = tmp_path / "state.sqlite", learnt_of(Plan(planner="none"))
    told: list[str] = []

    def path() -> Path:
        if not told:
            raise FileNotFoundError(2, "No such file or directory")
        return place

    async def main() -> None:
        async with kept(StateFile(place), lambda: "a", lambda: learnt, told=told.append, path=path):
            async with asyncio.timeout(60):
                while len(told) < 2:
                    await asyncio.sleep(0.001)
        assert StateFile(place).load("a") == learnt
        assert told == ["the state for a restart cannot be kept: [Errno 2] No such file or directory", ""]

    asyncio.run(main())


def test_state_with_an_impossible_name_is_said_and_stops_no_start() -> None:
    file = StateFile(Path("x" * 300))
    assert file.load("a") is None and file.corrections() == {}
    assert "cannot read the state of the last run: [Errno 36] File name too long" in file.problem


def test_state_is_stored_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby may have to go on with the plan before the server that made it has looked again."""
    monkeypatch.setattr(server_state, "PERIOD", 1e6)
    file, learnt = StateFile(tmp_path / "state.sqlite"), learnt_of(Plan(planner="none"))

    async def main() -> None:
        async with kept(file, lambda: "a", lambda: learnt):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(60):
                    while file.load("a") is None:
                        await asyncio.sleep(0.001)
            assert file.load("a") == learnt

    asyncio.run(main())


def test_state_is_stored_under_its_new_key_where_profiles_alone_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_state, "PERIOD", 0.001)
    file, learnt = StateFile(tmp_path / "state.sqlite"), learnt_of(Plan(planner="none"))
    current, asked = "a", 0

    def key() -> str:
        nonlocal asked
        asked += 1
        return current

    async def main() -> None:
        nonlocal current
        async with kept(file, key, lambda: learnt):
            while asked < 3:  # so it was stored the first time
                await asyncio.sleep(0.001)
            assert file.load("a") == learnt
            current = "b"
        assert file.load("b") == learnt and file.load("a") is None

    asyncio.run(main())


def test_full_disk_under_the_state_is_said_and_what_was_stored_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = StateFile(tmp_path / "state.sqlite")
    first = learnt_of(Plan(planner="none"))
    file.store("a", first)
    connect = file._connect

    def full() -> sqlite3.Connection:
        database = connect()
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count = {pages}")
        return database

    monkeypatch.setattr(file, "_connect", full)
    large = msgspec.structs.replace(first, rates={f"model-{n}": float(n) for n in range(10_000)})
    file.store("a", large)
    assert file.problem.endswith("state.sqlite: database or disk is full")
    assert caplog.text.count("disk is full") == 1
    assert file.load("a") == first
    monkeypatch.undo()
    file.store("a", large)
    assert file.problem == ""
    assert file.load("a") == large


def test_files_that_cannot_be_written_are_shown_until_they_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_state, "PERIOD", 0.001)
    folder = tmp_path / "folder"
    folder.write_text("")
    settings = msgspec.structs.replace(
        settings_of(tmp_path), state=folder / "state.sqlite", event_log=Path("/dev/full")
    )

    async def main() -> None:
        async with running(settings, Cpu()) as server, asyncio.timeout(60):
            log = "the event log has ended, since it could not be written: No space left on device"
            while len((status := await server.status()).file_errors) < 2:
                await asyncio.sleep(0.001)
            shown = io.StringIO()
            Console(file=shown, width=300).print(status_view(status))
            assert log in shown.getvalue() and f"cannot be kept in {folder}/state.sqlite: " in shown.getvalue()
            folder.unlink()
            while (await server.status()).file_errors != (log,):
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_plan_that_is_not_valid_any_more_is_not_restored(tmp_path: Path) -> None:
    given = sample_deployment(repository(tmp_path))
    assert restored(given, Learnt(plan=given.plan, rates=given.problem.rates, slowdowns={})) is not None
    smaller = msgspec.structs.replace(given.problem.fleet[0], cuts=(10,))
    changed = msgspec.structs.replace(given, problem=msgspec.structs.replace(given.problem, fleet=(smaller,)))
    assert restored(changed, learnt_of(given.plan)) is None


def on_node(deployment: Deployment, network: float) -> Deployment:
    """Return a deployment whose devices are a node's. network: seconds to the node and back."""
    problem = deployment.problem
    fleet = tuple(msgspec.structs.replace(kind, name=f"node-a/{kind.name}") for kind in problem.fleet)
    profiles = {
        (model, f"node-a/{kind}"): profile.on(f"node-a/{kind}", network)
        for (model, kind), profile in problem.profiles.items()
    }
    return msgspec.structs.replace(deployment, problem=msgspec.structs.replace(problem, fleet=fleet, profiles=profiles))


def test_plan_is_restored_where_the_network_to_a_node_takes_another_time(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    given = sample_deployment(settings.model_repository)
    first = on_node(given, 2e-4)
    plan = plan_problem(first.problem, "elastic", validate=False)
    assert check(plan, first.problem) == [] and plan.devices
    learnt = Learnt(plan=plan, rates=first.problem.rates, slowdowns={})
    for network in (1e-4, 5e-4):
        later = on_node(given, network)
        assert state_key(later, settings) == state_key(first, settings)
        again = restored(later, learnt)
        assert again is not None and check(again.plan, later.problem) == []
        before, after = (each.devices[0].partitions[0].placements[0] for each in (plan, again.plan))
        assert after.latency - before.latency == pytest.approx(network - 2e-4)
        assert again.plan.rates() == plan.rates()
        lower = {name: rate / 2 for name, rate in first.problem.rates.items()}
        again = restored(later, msgspec.structs.replace(learnt, rates=lower))
        assert again is not None and check(again.plan, again.problem) == [], "rates and the network differ"
    assert restored(on_node(given, 30.0), learnt) is None, "no target is that long"


def test_each_repository_has_a_state_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    usual = read_settings()
    other = msgspec.structs.replace(usual, model_repository=tmp_path)
    assert state_path(usual) != state_path(other)
    assert state_path(usual).parent == tmp_path / "cotenant" / "state"


def test_server_starts_with_the_plan_of_its_last_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_of(tmp_path)
    caplog.set_level(logging.INFO, "cotenant.app")

    async def main() -> None:
        builder = DeploymentBuilder(settings, Cpu())
        first = await prepare_deployment(builder)
        assert first.learnt is None
        async with running(settings, Cpu()) as server:
            planned = server.deployment.plan
        learnt = StateFile(tmp_path / "state.sqlite").load(state_key(first.deployment, settings))
        assert learnt is not None and learnt.plan == planned and learnt.rates == {"identity": 20.0, "lookup": 10.0}

        again = await prepare_deployment(builder)
        assert again.learnt == learnt and again.deployment.plan == planned
        async with running(settings, Cpu()) as server:
            status = (await server.status()).adaptation
            assert status is not None and status.models["identity"].planned == 20.0

        models = tuple(msgspec.structs.replace(model, rate=5.0) for model in settings.models)
        other = await prepare_deployment(DeploymentBuilder(msgspec.structs.replace(settings, models=models), Cpu()))
        assert other.learnt is None and other.deployment.plan.rate("identity") == pytest.approx(5.0)
        fixed = await prepare_deployment(DeploymentBuilder(msgspec.structs.replace(settings, adapt=False), Cpu()))
        assert fixed.learnt is None

    asyncio.run(main())


def test_state_is_where_the_next_start_looks_after_a_reload_of_another_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_state, "PERIOD", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = msgspec.structs.replace(settings_of(tmp_path), state=None)
    shutil.copytree(settings.model_repository, tmp_path / "copy")
    other = msgspec.structs.replace(settings, model_repository=tmp_path / "copy")

    async def main() -> None:
        async with running(settings, Cpu()) as server:
            await server.reload(other)
        again = await prepare_deployment(DeploymentBuilder(other, Cpu()))
        assert again.learnt is not None and again.deployment.plan == again.learnt.plan

    asyncio.run(main())
