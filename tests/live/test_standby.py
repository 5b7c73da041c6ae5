"""Standby workers of a real server: a worker that is killed is replaced at once, and nothing that was asked is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from cotenant.backends.cpu import Cpu
from cotenant.core.identity import LaneId
from cotenant.errors import DeviceError, FailedError, RequestError
from cotenant.live.deployment import Deployment
from cotenant.live.metrics import render
from cotenant.live.server import Server
from cotenant.predictors.samples import Sample
from tests.live.deployment import repository, sample_deployment
from tests.live.test_rollouts import Asking, shared
from tests.live.test_server import run, until

KILLS = 5


@asynccontextmanager
async def asked(given: Deployment, backend: Cpu | None = None, *, lossless: bool = True) -> AsyncIterator[Asking]:
    """All that was asked has been answered in the end, and well."""

    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
        raise FailedError("nothing else is to be served")

    server = Server(given, backend or Cpu(), prepare, standby_workers=1, warm_workers=1)
    await server.start()
    asking = Asking(server, given)
    task = asyncio.create_task(asking.ask())
    try:
        yield asking
        task.cancel()
        await until(lambda: len(asking.answers) == asking.asked)
        assert not lossless or not [answer for answer in asking.answers if isinstance(answer, RequestError)]
    finally:
        task.cancel()
        await server.stop(1.0)


def given(root: Path, *, workers: float = 10.0) -> Deployment:
    """workers: how many the device has memory for."""
    deployment = shared(sample_deployment(repository(root), ("identity",)), 400)
    (kind,) = deployment.problem.fleet
    memory = int(workers * deployment.problem.profiles["identity", "cpu"].memory(1))
    fleet = (msgspec.structs.replace(kind, memory=memory),)
    return msgspec.structs.replace(deployment, problem=msgspec.structs.replace(deployment.problem, fleet=fleet))


def standby(server: Server) -> str:
    (worker,) = server._rollouts.workers()
    return worker.standby


def test_worker_that_is_killed_is_replaced_by_its_standby_and_no_request_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with asked(given(tmp_path)) as asking:
            seen = set(asking.pids())
            for _ in range(KILLS):
                await until(lambda: standby(asking.server) == "ready")
                (pid,) = asking.pids()
                os.kill(pid, signal.SIGKILL)
                await until(lambda pid=pid: asking.pids() not in ([], [pid]))  # type: ignore[misc]
                seen |= set(asking.pids())
            assert len(seen) == KILLS + 1
            (worker,) = asking.server._rollouts.workers()
            assert (worker.restarts, worker.promotions) == (KILLS, KILLS)
            metrics = render(asking.server.metrics(), "")[0].decode()
            assert f'cotenant_partition_promotions_total{{device="cpu-0",partition="0"}} {KILLS}.0' in metrics
            assert 'cotenant_partition_standby_up{device="cpu-0",partition="0"}' in metrics

    run(main())


def test_standby_is_not_started_where_memory_has_no_room_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with asked(given(tmp_path, workers=1.9)) as asking:
            await asyncio.sleep(0.3)
            assert standby(asking.server) == ""

    run(main())


def test_rollout_takes_the_memory_of_a_standby_and_leaves_the_new_partition_one(tmp_path: Path) -> None:
    async def main() -> None:
        tight = given(tmp_path, workers=2.5)
        async with asked(tight) as asking:
            server = asking.server
            await until(lambda: standby(server) == "ready")
            plan = shared(tight, 600)
            await server.apply(plan)
            await server._rollouts.idle()
            (worker,) = server._rollouts.workers()
            assert worker.share == 600 and worker.lane == LaneId.parse("cpu-0/1")
            await until(lambda: standby(server) == "ready")

    run(main())


def test_standby_that_the_backend_will_not_have_is_killed(tmp_path: Path) -> None:
    class Refusing(Cpu):
        refused = False

        def on_worker_started(self, lane: LaneId, pid: int) -> None:
            if self.refused:
                Refusing.refused = False
                raise DeviceError("no such client")

    async def main() -> None:
        async with asked(given(tmp_path), Refusing(), lossless=False) as asking:
            await until(lambda: standby(asking.server) == "ready")
            Refusing.refused = True
            os.kill(asking.pids()[0], signal.SIGKILL)
            await until(lambda: asking.server._rollouts.workers()[0].restarts == 2)
            await until(lambda: bool(asking.pids()))
            assert asking.server._rollouts.workers()[0].reason == "no such client"

    run(main())


@pytest.mark.parametrize("count", [0, 1])
def test_stop_leaves_no_process_of_a_standby(tmp_path: Path, count: int) -> None:
    async def main() -> None:
        async with asked(given(tmp_path)) as asking:
            if count:
                await until(lambda: standby(asking.server) == "ready")
            running = asking.server._rollouts._control.pool.processes._running
        assert not running

    run(main())
