"""What every backend must do: say what it has, open a partition for a real worker, close it, survive its death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cotenant.backends import Backend
from cotenant.backends.cpu import Cpu
from cotenant.backends.fake import Fake
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError
from cotenant.live import control_driver
from cotenant.worker.wire import WorkerModel
from tests.backends import test_green, test_mig
from tests.driver import mps
from tests.live.workers import floats, pool_of, sleeper, spare
from tests.worker import graphs

BACKENDS: dict[str, Callable[[pytest.MonkeyPatch, ExitStack], Backend]] = {
    "fake": lambda *_: Fake(),
    "cpu throttle": lambda *_: Cpu(),
    "cpu quota": lambda *_: Cpu(enforcement="quota"),
    "green": test_green.sleeping,
    "mig": test_mig.on_processor,
    "mps": mps.on_processor,
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    with ExitStack() as held:
        made = BACKENDS[request.param](monkeypatch, held)
        lane = lane_of(made)
        try:
            made.open(lane, WHOLE)
        except ConfigError as error:
            pytest.skip(str(error))
        made.close(lane)
        yield made


def lane_of(backend: Backend) -> LaneId:
    return LaneId(DeviceId(backend.fleet()[0].name), 0)


def model(backend: Backend, folder: Path) -> WorkerModel:
    return (
        sleeper(0.001, name="identity") if backend.name in ("fake", "green") else graphs.identity(folder / "m.onnx", 2)
    )


def test_backend_fleet_has_legal_cuts(backend: Backend) -> None:
    assert backend.fleet()
    for kind in backend.fleet():
        assert kind.memory > 0
        assert list(kind.cuts) == sorted(set(kind.cuts)) and kind.cuts[0] > 0 and kind.cuts[-1] == WHOLE
    assert backend.isolation()


def test_backend_partition_opens_runs_dies_and_closes(backend: Backend, tmp_path: Path) -> None:
    lane = lane_of(backend)

    async def scenario() -> None:
        async with pool_of(backend) as (pool, told, _):
            for _ in range(2):  # a lane may be used again
                await pool.start(lane, share=500, models=[model(backend, tmp_path)])
                assert await told.next() == ("ready", lane)
                pool.run(lane, 1, "identity", [floats(1, 2)])
                assert (await told.next())[:3] == ("finished", lane, 1)
                pid = pool.status()[0].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                assert (await told.next())[0] == "died"
                assert await told.next() == ("ready", lane)
                pool.run(lane, 2, "identity", [floats(3, 4)])
                assert (await told.next())[3][0][0].array().tolist() == [[3, 4]]
                await pool.stop(lane, grace=5.0)

    asyncio.run(scenario())


def test_backend_partition_reopens_in_a_prestarted_process(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_driver, "TICK", 0.05)
    lane = lane_of(backend)

    async def scenario() -> None:
        async with pool_of(backend, warm_workers=1) as (pool, told, _):
            await pool.start(lane, share=500, models=[model(backend, tmp_path)])
            assert await told.next() == ("ready", lane)
            waiting = await spare(pool)
            pid = pool.status()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert (await told.next())[0] == "died"
            assert await told.next() == ("ready", lane)
            assert pool.status()[0].pid == waiting
            pool.run(lane, 1, "identity", [floats(1, 2)])
            assert (await told.next())[3][0][0].array().tolist() == [[1, 2]]

    asyncio.run(scenario())


def test_backend_close_of_an_unopened_partition_does_nothing(backend: Backend) -> None:
    backend.close(LaneId(DeviceId("never"), 0))
    lane, share = lane_of(backend), backend.fleet()[0].cuts[0]
    for _ in range(2):  # and what is closed twice can be had again
        assert backend.open(lane, share)
        backend.close(lane)
        backend.close(lane)
