"""A pool on a node, with real worker processes: what a pool of this machine does, it does too."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cotenant.backends.cpu import Cpu
from cotenant.backends.fake import Fake
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.tensor import Tensor
from cotenant.errors import FailedError, WorkerError
from cotenant.live.lane_workers import LaneSetup
from cotenant.live.nodes.messages import Message, NodeModel
from cotenant.live.nodes.remote_pool import RemotePool
from cotenant.worker.wire import WorkerModel
from tests.cli.program import workers_of
from tests.live.nodes.agents import agent_of, nodes_of, remote_pool, up
from tests.live.workers import Recorder, floats, sleeper
from tests.worker import graphs

FAKE = LaneId(DeviceId("fake", node="node-a"), 0)
LANE, OTHER = LaneId.parse("node-a/cpu-0/0"), LaneId.parse("node-a/cpu-0/1")


def test_remote_batch_returns_outputs_of_each_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Cpu(), tmp_path / "cache") as agent, nodes_of(agent.address) as nodes:
            node = await up(nodes)
            (kind,) = node.fleet()
            assert (kind.name, kind.cuts) == ("node-a/cpu", Cpu().fleet()[0].cuts)
            assert node.devices() == (DeviceId("cpu", node="node-a"),)
            async with remote_pool(nodes) as (pool, told):
                await pool.start(LANE, share=500, models=[graphs.identity(tmp_path / "m.onnx", 2)])
                assert await told.next() == ("ready", LANE)
                pool.run(LANE, 7, "identity", [floats(1, 2), floats(3, 4, 5, 6)])
                what, lane, batch, answers, timing = await told.next()
                assert (what, lane, batch) == ("finished", LANE, 7)
                assert [answer[0].array().tolist() for answer in answers] == [[[1, 2]], [[3, 4], [5, 6]]]
                assert 0 < timing.cpu < 1 and timing.latency >= timing.infer > 0
                (status,) = pool.status()
                assert (status.state, status.share, status.pid) == ("ready", 500, None)
                assert status.memory > 1 << 20

    asyncio.run(scenario())


def test_remote_large_tensors_are_received_where_workers_read_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Cpu(), tmp_path / "cache") as agent, nodes_of(agent.address) as nodes:
            await up(nodes)
            async with remote_pool(nodes) as (pool, told):
                width = 50_000
                await pool.start(LANE, share=500, models=[graphs.identity(tmp_path / "m.onnx", width)])
                await told.next()
                values = np.random.default_rng(0).random((1, width), np.float32)
                odd = values + 1
                held = []
                for batch in range(3):
                    pool.run(
                        LANE,
                        batch,
                        "identity",
                        [(Tensor("x", "FP32", each.shape, each.tobytes()),) for each in (values, odd)],
                    )
                    held.append((await told.next())[3])
                for answers in held:  # those of earlier batches are still what they were
                    for (answer,), wanted in zip(answers, (values, odd), strict=True):
                        assert answer.block is not None
                        np.testing.assert_array_equal(answer.array(), wanted)
                held.clear()
                del answers, answer

    asyncio.run(scenario())


def test_remote_worker_that_dies_is_reported_and_restarted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path / "cache") as agent, nodes_of(agent.address) as nodes:
            await up(nodes)
            async with remote_pool(nodes) as (pool, told):
                await pool.start(FAKE, share=500, models=[sleeper(30.0)])
                await told.next()
                pool.run(FAKE, 1, "sleeper", [floats(1, 2)])
                (worker,) = workers_of(os.getpid())
                os.kill(worker, signal.SIGKILL)
                what, died, why = await told.next()
                assert (what, died) == ("died", FAKE)
                assert why == "node-a: it was killed by SIGKILL"
                assert await told.next() == ("ready", FAKE)
                (status,) = pool.status()
                assert (status.state, status.restarts) == ("ready", 1)

    asyncio.run(scenario())


def test_remote_model_that_fails_tells_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Cpu(), tmp_path / "cache") as agent, nodes_of(agent.address) as nodes:
            await up(nodes)
            async with remote_pool(nodes) as (pool, _):
                (tmp_path / "bad.onnx").write_bytes(b"no model")
                good = graphs.identity(tmp_path / "m.onnx", 2)
                bad = type(good)(name="bad", path=str(tmp_path / "bad.onnx"), inputs=good.inputs)
                with pytest.raises(WorkerError, match=r"^the worker of node-a/cpu-0/0 did not start: node-a: .*bad"):
                    await pool.start(LANE, share=500, models=[bad])
                missing = type(good)(name="gone", path=str(tmp_path / "gone.onnx"), inputs=good.inputs)
                with pytest.raises(WorkerError, match=r"gone\.onnx: cannot read the model: No such file"):
                    await pool.start(OTHER, share=500, models=[missing])

    asyncio.run(scenario())


def test_remote_request_that_fails_fails_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Cpu(), tmp_path / "cache") as agent, nodes_of(agent.address) as nodes:
            node = await up(nodes)
            async with remote_pool(nodes) as (pool, told):
                await pool.start(LANE, share=500, models=[graphs.lookup(tmp_path / "m.onnx")])
                await told.next()
                pool.run(LANE, 1, "lookup", [indexes(1, 2), indexes(1, 9)])
                what, _, _, (good, bad), _ = await told.next()
                assert what == "finished" and good[0].array().tolist() == [[10, 20]]
                assert isinstance(bad, FailedError) and "out of data bounds" in str(bad)
                pool.run(LANE, 2, "lookup", [indexes(9, 9)])
                assert (await told.next())[:3] == ("failed", LANE, 2)
                assert node.is_up

    asyncio.run(scenario())


def test_remote_lane_that_is_busy_or_without_the_model_takes_no_batch(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path / "cache") as agent, nodes_of(agent.address) as nodes:
            await up(nodes)
            async with remote_pool(nodes) as (pool, told):
                await pool.start(FAKE, share=500, models=[sleeper(0.2)])
                await told.next()
                pool.run(FAKE, 1, "sleeper", [floats(1, 2)])
                for batch, model in ((2, "sleeper"), (3, "other")):
                    with pytest.raises(WorkerError, match=rf"^lane 'node-a/fake-0/0' cannot take batch {batch}"):
                        pool.run(FAKE, batch, model, [floats(1, 2)])
                assert (await told.next())[:3] == ("finished", FAKE, 1)

    asyncio.run(scenario())


def test_remote_pool_that_is_closed_while_models_are_sent_starts_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path / "cache") as agent, nodes_of(agent.address) as nodes:
            node = await up(nodes)
            sending, sent = asyncio.Event(), asyncio.Event()
            commands: list[str] = []
            send = node.link.send

            async def send_models(models: Sequence[WorkerModel]) -> tuple[NodeModel, ...]:
                sending.set()
                await sent.wait()
                return tuple(NodeModel(model, b"") for model in models)

            def record(message: Message, body: Sequence[bytes | bytearray | memoryview] = ()) -> None:
                commands.append(type(message).__name__)
                send(message, body)

            monkeypatch.setattr(node, "send_models", send_models)
            monkeypatch.setattr(node.link, "send", record)
            pool = RemotePool(node, lambda event: None, Recorder())
            pool.spawn(FAKE, 1, LaneSetup(500, (sleeper(0.1),)), fresh=True)
            await sending.wait()
            closing = asyncio.ensure_future(pool.close())
            await asyncio.sleep(0)
            sent.set()
            await closing
            assert "ClosePool" in commands and "Spawn" not in commands

    asyncio.run(scenario())


def test_remote_worker_that_is_killed_at_once_is_not_started(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent_of(Fake(), tmp_path / "cache") as agent, nodes_of(agent.address) as nodes:
            pool = RemotePool(await up(nodes), lambda event: None, Recorder())
            pool.spawn(FAKE, 1, LaneSetup(500, (sleeper(0.1),)), fresh=True)
            pool.kill(FAKE, 1, "the test does not want it", abandon=True)
            pool.close_partition(FAKE, 1)
            await pool.close()  # raises what its tasks have raised

    asyncio.run(scenario())


def indexes(*values: int) -> tuple[Tensor, ...]:
    array = np.array([values], np.int64)
    return (Tensor("x", "INT64", array.shape, array.tobytes()),)
