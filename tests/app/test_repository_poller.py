"""The poller alone: what it does about failures, and about files that do not come to rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cotenant.app.repository_poller import RepositoryPoller, polling
from tests.worker import graphs


def model(root: Path, name: str) -> Path:
    (root / name / "1").mkdir(parents=True)
    graphs.identity(root / name / "1" / "model.onnx")
    return root / name


def test_failure_of_any_kind_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    followed: list[str] = []

    async def follow(changed: str, *, gone: bool) -> None:
        followed.append(changed)
        raise ValueError("a fault of ours")

    async def main() -> None:
        poller = RepositoryPoller(lambda: tmp_path, follow, settled=0.001)
        await poller.begin()
        async with polling(poller, 0.001), asyncio.timeout(20):
            for name in ("a", "b"):
                model(tmp_path, name)
                while name not in followed:
                    await asyncio.sleep(0.01)

    asyncio.run(main())
    assert "a fault of ours" in caplog.text


def test_failure_of_any_kind_with_one_model_keeps_no_other_from_being_followed(tmp_path: Path) -> None:
    followed: list[str] = []

    async def follow(changed: str, *, gone: bool) -> None:
        followed.append(changed)
        if changed == "a":
            raise ValueError("a fault of ours")

    async def main() -> None:
        poller = RepositoryPoller(lambda: tmp_path, follow, settled=0.001)
        await poller.begin()
        model(tmp_path, "a")
        model(tmp_path, "b")
        await poller.look()
        await poller.look()

    asyncio.run(main())
    assert followed == ["a", "b"]


def test_model_whose_files_keep_changing_holds_back_no_other(tmp_path: Path) -> None:
    followed: list[str] = []

    async def follow(changed: str, *, gone: bool) -> None:
        followed.append(changed)

    async def main() -> None:
        poller = RepositoryPoller(lambda: tmp_path, follow, settled=0.02)
        await poller.begin()
        restless = model(tmp_path, "restless")
        model(tmp_path, "quiet")

        async def write() -> None:
            for number in range(10_000):
                (restless / "1" / f"{number}.log").write_text("more")
                await asyncio.sleep(0.002)

        writing = asyncio.create_task(write())
        async with asyncio.timeout(20):
            while "quiet" not in followed:
                await poller.look()
        assert followed == ["quiet"]
        writing.cancel()

    asyncio.run(main())
