"""Changes of shares in one process for all lanes: no request is lost, no process starts, no weights are copied."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import pytest

from benchmarks import share_change
from cotenant.backends import Launch
from cotenant.backends.cpu import Cpu
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.plan import Partition
from cotenant.errors import FailedError, RequestError, WorkerError
from cotenant.live.deployment import Deployment
from cotenant.live.oip import InferRequest, InferResponse
from cotenant.live.server import Server
from cotenant.predictors.samples import Sample
from tests.live.deployment import repository, sample_deployment
from tests.live.test_server import PATIENCE, floats, indices, run
from tests.live.workers import floats as rows
from tests.live.workers import pool_of
from tests.worker import modules

WEIGHTS = 48 << 20
LARGE = f"""
import torch

class Large(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.ones({WEIGHTS // 4}))

    def forward(self, x):
        return x * self.weights[0], x.sum(1, keepdim=True)
"""


# As a kernel does that reads where it must not: nothing of the process can run on the GPU any more.
BREAKS = """
import torch
from cotenant.worker.runners.torch_device import CpuDevice

CpuDevice.broken = lambda self: "an illegal memory access was encountered"

class Breaks(torch.nn.Module):
    def forward(self, x):
        if x[0, 0] > 8:
            raise RuntimeError("it broke")
        return x, x.sum(1, keepdim=True)
"""


class Shared(Cpu):
    """One process for all lanes, as on a GPU with green contexts."""

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        return Launch(process="cpu")


def swapped(given: Deployment, shares: tuple[int, ...]) -> Deployment:
    """The same placements on partitions of other shares."""
    (device,) = given.plan.devices
    placements = [placement for partition in device.partitions for placement in partition.placements]
    partitions = tuple(
        Partition(share=share, placements=(placement,)) for share, placement in zip(shares, placements, strict=True)
    )
    device = msgspec.structs.replace(device, partitions=partitions)
    return msgspec.structs.replace(given, plan=msgspec.structs.replace(given.plan, devices=(device,)))


def test_shares_changed_under_load_lose_no_request_and_start_no_process(tmp_path: Path) -> None:
    async def main() -> None:
        async def prepare(
            wanted: Collection[str], samples: Sequence[Sample], configs: object, kept: object
        ) -> Deployment:
            raise FailedError("nothing else is to be served")

        given = sample_deployment(repository(tmp_path))
        server = Server(swapped(given, (600, 400)), Shared(), prepare)
        await server.start()
        answers: list[InferResponse | RequestError] = []
        asked = 0
        (pid,) = {status.pid for status in server._rollouts.workers()}
        try:
            for shares in ((400, 600), (250, 750), (750, 250), (600, 400)):
                change = asyncio.ensure_future(server.apply(swapped(given, shares)))
                while not change.done():
                    for model, tensor in (("identity", floats()), ("lookup", indices(1))):
                        server.infer(InferRequest(model=model, inputs=(tensor,)), answers.append)
                        asked += 1
                    await asyncio.sleep(0.002)
                await change
            async with asyncio.timeout(PATIENCE):
                while len(answers) < asked or len(server._rollouts.workers()) > 2:
                    await asyncio.sleep(0.01)
            assert [answer for answer in answers if isinstance(answer, RequestError)] == []
            workers = server._rollouts.workers()
            assert {worker.pid for worker in workers} == {pid}
            assert [worker.restarts for worker in workers] == [0, 0]
            assert sorted(worker.share for worker in workers) == [400, 600]
        finally:
            await server.stop(1.0)

    run(main())


def test_workers_of_the_processor_go_on_with_other_shares(tmp_path: Path) -> None:
    """The same processes, and no request is lost; one that is to have another number of threads is a new one."""

    async def main() -> None:
        async def prepare(
            wanted: Collection[str], samples: Sequence[Sample], configs: object, kept: object
        ) -> Deployment:
            raise FailedError("nothing else is to be served")

        backend = Cpu()
        backend.capacity = 2.0  # whatever this machine has
        given = sample_deployment(repository(tmp_path))
        problem = msgspec.structs.replace(given.problem, fleet=backend.fleet())
        given = msgspec.structs.replace(given, problem=problem)
        server = Server(swapped(given, (500, 400)), backend, prepare)
        await server.start()
        answers: list[InferResponse | RequestError] = []
        asked = 0
        try:
            before = {worker.lane: worker.pid for worker in server._rollouts.workers()}
            for shares in ((400, 500), (100, 250), (500, 400)):
                change = asyncio.ensure_future(server.apply(swapped(given, shares)))
                while not change.done():
                    for model, tensor in (("identity", floats()), ("lookup", indices(1))):
                        server.infer(InferRequest(model=model, inputs=(tensor,)), answers.append)
                        asked += 1
                    await asyncio.sleep(0.002)
                await change
                workers = server._rollouts.workers()
                assert {worker.lane: worker.pid for worker in workers} == before
                assert tuple(worker.share for worker in workers) == shares
            await server.apply(swapped(given, (600, 400)))
            async with asyncio.timeout(PATIENCE):
                while len(answers) < asked or len(server._rollouts.workers()) > 2:
                    await asyncio.sleep(0.01)
            kept = before.items() & {worker.lane: worker.pid for worker in server._rollouts.workers()}.items()
            assert len(kept) == 1
            assert [answer for answer in answers if isinstance(answer, RequestError)] == []
        finally:
            await server.stop(1.0)

    run(main())


def test_share_change_wait_for_a_dead_worker_raises() -> None:
    busy = share_change._Busy("m", [])
    busy.died(LaneId.parse("cpu-0/0"), "it was killed")  # while nobody waited for an answer

    async def waiting() -> None:
        async with asyncio.timeout(PATIENCE):
            await busy.until(1)

    with pytest.raises(WorkerError, match=r"^cpu-0/0: it was killed$"):
        asyncio.run(waiting())


def test_shared_process_lanes_have_one_copy_of_weights_and_one_context(tmp_path: Path) -> None:
    (tmp_path / "breaks").mkdir()
    model, breaks = modules.python(tmp_path, LARGE), modules.python(tmp_path / "breaks", BREAKS)

    async def scenario() -> None:
        async with pool_of(Shared()) as (pool, told, _):
            await pool.start(LaneId.parse("cpu-0/0"), share=400, models=[model])
            await told.next()
            before = pool.status()[0]
            assert before.memory > WEIGHTS
            for slot in range(1, 4):
                await pool.start(
                    LaneId(DeviceId("cpu"), slot),
                    share=600,
                    models=[model],
                    leaving=[LaneId(DeviceId("cpu"), slot - 1)],
                )
                assert await told.next() == ("ready", LaneId(DeviceId("cpu"), slot))
                await pool.stop(LaneId(DeviceId("cpu"), slot - 1), grace=5.0)
                pool.run(LaneId(DeviceId("cpu"), slot), slot, "m", [rows(1, 2)])
                assert (await told.next())[3][0][0].array().tolist() == [[1, 2]]
            (after,) = pool.status()
            assert (after.pid, after.restarts) == (before.pid, 0)
            assert after.memory < before.memory + WEIGHTS / 2

            await pool.start(LaneId.parse("cpu-0/4"), share=400, models=[breaks])
            await told.next()
            pool.run(LaneId.parse("cpu-0/4"), 4, "m", [rows(9, 2)])
            reason = (
                "it exited with status 1: model 'm' corrupted its CUDA context:"
                " an illegal memory access was encountered"
            )
            lanes = (LaneId.parse("cpu-0/3"), LaneId.parse("cpu-0/4"))
            assert {await told.next(), await told.next()} == {("died", lane, reason) for lane in lanes}

    asyncio.run(scenario())
