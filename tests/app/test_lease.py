"""The lease of front ends: one holds it at a time, and whoever loses it lets go."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from cotenant.app import lease as lease_module
from cotenant.app.lease import FrontEndLease, LeaseFile
from cotenant.errors import ConfigError, LeaseError
from tests.live.workers import PATIENCE


def ignore(words: str) -> None:
    pass


def test_lease_is_held_by_one_until_it_is_released(tmp_path: Path) -> None:
    one, two = LeaseFile(tmp_path / "lease"), LeaseFile(tmp_path / "lease")
    assert one.holds(one.claim(None))
    seen = two.claim(None)
    assert not two.holds(seen) and not two.renew() and not two.release()
    assert one.renew() and one.release() and not one.renew()
    assert two.holds(two.claim(None))


def test_lease_that_was_renewed_is_not_taken(tmp_path: Path) -> None:
    one, two = LeaseFile(tmp_path / "lease"), LeaseFile(tmp_path / "lease")
    one.claim(None)
    seen = two.claim(None)
    assert one.renew()
    assert one.holds(two.claim(seen))  # as whoever slept for long would try to
    assert two.holds(two.claim(two.claim(None)))
    assert not one.renew()


def test_lease_of_two_that_take_it_at_once_has_one_holder(tmp_path: Path) -> None:
    files = [LeaseFile(tmp_path / "lease") for _ in range(3)]
    files[0].claim(None)
    seen = files[1].claim(None)
    rows = [file.claim(seen) for file in files[1:]]
    assert rows[0] == rows[1] and files[1].holds(rows[0])


def test_front_end_that_loses_its_lease_lets_go_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "RENEW", 0.01)
    fenced: list[str] = []

    async def scenario() -> None:
        async with FrontEndLease(tmp_path / "lease") as lease, lease.held(ignore, fenced.append):
            other = LeaseFile(tmp_path / "lease")
            while not other.holds(other.claim(other.claim(None))):
                pass
            await asyncio.sleep(60)

    with pytest.raises(LeaseError, match=r"^another front end has taken over; restart it to stand by$"):
        asyncio.run(scenario())
    assert fenced == ["another front end has taken over"]


def test_front_end_that_cannot_renew_its_lease_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "RENEW", 0.01)
    monkeypatch.setattr(lease_module, "LOCKED", 0.01)

    async def scenario() -> None:
        async with FrontEndLease(tmp_path / "lease") as lease, lease.held(ignore, ignore):
            blocking = sqlite3.connect(tmp_path / "lease", isolation_level=None)
            try:
                blocking.execute("BEGIN EXCLUSIVE")
                await asyncio.sleep(60)
            finally:
                blocking.close()

    with pytest.raises(LeaseError, match=r"could not be renewed 2 times in a row \(database is locked\)"):
        asyncio.run(scenario())


def test_front_end_that_is_cancelled_releases_its_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        held = asyncio.Event()

        async def serve() -> None:
            async with FrontEndLease(tmp_path / "lease") as lease, lease.held(ignore, ignore):
                held.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(serve())
        await held.wait()
        other = LeaseFile(tmp_path / "lease")
        assert not other.holds(other.claim(None))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert other.holds(other.claim(None))

    asyncio.run(scenario())


def test_lease_is_renewed_while_the_server_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "RENEW", 0.01)

    async def scenario() -> None:
        other = LeaseFile(tmp_path / "lease")
        async with FrontEndLease(tmp_path / "lease") as lease:
            async with lease.held(ignore, ignore):
                pass
            seen = other.claim(None)
            async with asyncio.timeout(PATIENCE):
                while other.claim(None) == seen:
                    await asyncio.sleep(0.01)
            assert not other.holds(other.claim(seen))
        assert other.holds(other.claim(None))

    asyncio.run(scenario())


def test_server_that_loses_its_lease_while_it_drains_lets_go_and_ends_in_good_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "RENEW", 0.01)
    fenced: list[str] = []

    async def scenario() -> None:
        other = LeaseFile(tmp_path / "lease")
        async with FrontEndLease(tmp_path / "lease") as lease:
            async with lease.held(ignore, fenced.append):
                pass
            while not other.holds(other.claim(other.claim(None))):
                pass
            async with asyncio.timeout(PATIENCE):
                while not fenced:
                    await asyncio.sleep(0.01)
        assert other.renew()

    asyncio.run(scenario())
    assert fenced == ["another front end has taken over"]


def test_standby_says_who_serves_and_takes_a_lease_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "EXPIRES", 0.1)
    said: list[str] = []
    LeaseFile(tmp_path / "lease").claim(None)  # and then it dies

    async def scenario() -> None:
        async with FrontEndLease(tmp_path / "lease") as lease, lease.held(said.append, ignore):
            pass

    asyncio.run(scenario())
    assert said and all(words.startswith("standing by: the front end on ") for words in said)


def test_lease_in_a_file_of_something_else_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "lease").write_text("something else, which is long enough to be no database at all" * 20)

    async def scenario() -> None:
        async with FrontEndLease(tmp_path / "lease") as lease, lease.held(ignore, ignore):
            pass

    with pytest.raises(
        ConfigError, match=r"lease: it is not a lease, but file is not a database; remove it, or set clu"
    ):
        asyncio.run(scenario())


def test_front_end_without_a_lease_serves_at_once() -> None:
    async def scenario() -> str:
        async with FrontEndLease(None) as lease, lease.held(ignore, ignore):
            return "served"

    assert asyncio.run(scenario()) == "served"
