"""The pool with real worker processes: what it answers, and what it does when they die."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from cotenant.backends import Launch
from cotenant.backends.cpu import Cpu
from cotenant.backends.fake import Fake
from cotenant.control.events import PartitionClosed, SupervisorEvent, WorkersExited
from cotenant.control.supervisor_options import SupervisorOptions
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.tensor import Tensor
from cotenant.errors import DeviceError, FailedError, WorkerError
from cotenant.live import control_driver, share_audit
from cotenant.live import pool as pool_module
from cotenant.live.batch_listener import BatchListener
from cotenant.live.lane_workers import LaneSetup
from cotenant.live.process import private_memory
from cotenant.worker.arena import Arena
from cotenant.worker.wire import RunBatch, Setup, WorkerModel
from tests.cli.program import alive, workers_of
from tests.live.workers import PATIENCE, floats, pool_of, sleeper
from tests.worker import graphs

LANE, OTHER = LaneId.parse("cpu-0/0"), LaneId.parse("cpu-0/1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def stuck(folder: Path) -> WorkerModel:
    """A model that takes for ever to load: its file is a pipe that nobody writes to."""
    path = folder / "pipe.onnx"
    os.mkfifo(path)
    return WorkerModel(name="stuck", path=str(path), inputs=())


def await_data(connection: socket.socket) -> None:
    """Block, the event loop with it, until there is something to read. (`select` has no room for large descriptors.)"""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    assert poll.poll(1000 * PATIENCE)


def test_pool_batch_returns_outputs_of_each_request(folder: Path) -> None:
    async def scenario() -> None:
        async with pool_of(Cpu()) as (pool, told, _):
            await pool.start(LANE, share=500, models=[graphs.identity(folder / "m.onnx", 2)])
            assert await told.next() == ("ready", LANE)
            pool.run(LANE, 7, "identity", [floats(1, 2), floats(3, 4, 5, 6)])
            kind, lane, batch, answers, timing = await told.next()
            assert (kind, lane, batch) == ("finished", LANE, 7)
            assert [answer[0].array().tolist() for answer in answers] == [[[1, 2]], [[3, 4], [5, 6]]]
            assert 0 < timing.cpu < 1 and timing.latency >= timing.infer > 0
            (status,) = pool.status()
            assert (status.state, status.share, status.restarts, status.models) == ("ready", 500, 0, ("identity",))
            assert status.pid is not None and private_memory(status.pid) > 1 << 20

    asyncio.run(scenario())


def test_pool_large_tensors_travel_in_the_arena(folder: Path) -> None:
    async def scenario() -> None:
        async with pool_of(Cpu()) as (pool, told, arena):
            width = 50_000
            await pool.start(LANE, share=500, models=[graphs.identity(folder / "m.onnx", width)])
            await told.next()
            values = np.random.default_rng(0).random((1, width), np.float32)
            inside = arena.allocate(values.nbytes + 3)
            assert inside is not None
            inside.view[3:] = values.tobytes()
            copied = Tensor("x", "FP32", values.shape, values.tobytes())
            placed = Tensor("x", "FP32", values.shape, inside.view[3:], inside, 3)
            held = []
            for batch in range(3):
                pool.run(LANE, batch, "identity", [(copied,), (placed,)])
                held.append((await told.next())[3])
            # Answers of earlier batches are still what they were: nobody wrote over them.
            for answers in held:
                for (answer,) in answers:
                    assert answer.block is not None
                    np.testing.assert_array_equal(answer.array(), values)
            held.clear()
            del answer, answers, inside, placed

    asyncio.run(scenario())


def test_pool_without_room_in_the_arena_sends_tensors_inline(folder: Path) -> None:
    async def scenario() -> None:
        async with pool_of(Cpu(), size=4096) as (pool, told, _):
            width = 500_000  # more than the socket takes at once
            await pool.start(LANE, share=500, models=[graphs.identity(folder / "m.onnx", width, max_batch=1)])
            await told.next()
            values = np.random.default_rng(0).random((1, width), np.float32)
            for batch in range(2):
                pool.run(LANE, batch, "identity", [(Tensor("x", "FP32", values.shape, values.tobytes()),)])
                (answer,) = (await told.next())[3][0]
                np.testing.assert_array_equal(answer.array(), values)

    asyncio.run(scenario())


def test_pool_outputs_larger_than_expected_have_room_the_next_time(folder: Path) -> None:
    async def scenario() -> None:
        async with pool_of(Cpu()) as (pool, told, _):
            await pool.start(LANE, share=500, models=[graphs.lookup(folder / "m.onnx")])
            await told.next()
            indices = np.zeros((1, 20_000), np.int64)
            blocks = []
            for batch in range(2):
                pool.run(LANE, batch, "lookup", [(Tensor("x", "INT64", indices.shape, indices.tobytes()),)])
                (answer,) = (await told.next())[3][0]
                blocks.append(answer.block is not None)
                del answer
            assert blocks == [False, True]

    asyncio.run(scenario())


def test_pool_model_error_reaches_the_request_that_caused_it(folder: Path) -> None:
    def index(value: int) -> tuple[Tensor]:
        return (Tensor("x", "INT64", (1, 1), value.to_bytes(8, "little")),)

    async def scenario() -> None:
        async with pool_of(Cpu()) as (pool, told, _):
            await pool.start(LANE, share=500, models=[graphs.lookup(folder / "m.onnx")])
            await told.next()
            pool.run(LANE, 1, "lookup", [index(1), index(9), index(3)])
            kind, _, batch, (first, second, third), _ = await told.next()
            assert (kind, batch) == ("finished", 1)
            assert (first[0].array().tolist(), third[0].array().tolist()) == ([[10]], [[30]])
            assert isinstance(second, FailedError) and "idx=9" in str(second)
            pool.run(LANE, 2, "lookup", [index(9)])
            kind, _, batch, reason = await told.next()
            assert (kind, batch) == ("failed", 2) and "idx=9" in reason
            pool.run(LANE, 3, "lookup", [index(2)])
            assert (await told.next())[0] == "finished"

    asyncio.run(scenario())


def test_pool_lane_takes_one_batch_at_a_time() -> None:
    async def scenario() -> None:
        async with pool_of(Fake()) as (pool, told, _):
            with pytest.raises(WorkerError, match=rf"^lane '{LANE}' cannot take batch 1: there is no such lane$"):
                pool.run(LANE, 1, "sleeper", [floats(1, 2)])
            await pool.start(LANE, share=500, models=[sleeper(0.0)])
            await told.next()
            with pytest.raises(WorkerError, match=rf"^lane '{LANE}' has a worker already; stop it first$"):
                await pool.start(LANE, share=500, models=[sleeper(0.0)])
            pool.run(LANE, 1, "sleeper", [floats(1, 2)])
            with pytest.raises(WorkerError, match=rf"^lane '{LANE}' cannot take batch 2: it runs another$"):
                pool.run(LANE, 2, "sleeper", [floats(1, 2)])
            assert (await told.next())[:3] == ("finished", LANE, 1)
            with pytest.raises(WorkerError, match=r"cannot take batch 3: it has no model 'other', only sleeper$"):
                pool.run(LANE, 3, "other", [floats(1, 2)])

    asyncio.run(scenario())


def test_pool_workers_ignore_signals_to_the_process_group() -> None:
    """Ctrl-C and a supervisor's stop reach every process; those in a batch are still to answer."""

    async def scenario() -> None:
        async with pool_of(Fake()) as (pool, told, _):
            await pool.start(LANE, share=500, models=[sleeper(0.2)])
            await told.next()
            pool.run(LANE, 1, "sleeper", [floats(1, 2)])
            pid = pool.status()[0].pid
            assert pid is not None and os.getpgid(pid) != os.getpgid(0)
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
            assert (await told.next())[:3] == ("finished", LANE, 1)

    asyncio.run(scenario())


def test_pool_start_of_an_invalid_model_raises_with_the_reason(folder: Path) -> None:
    (folder / "m.onnx").write_text("no model")

    async def scenario() -> None:
        async with pool_of(Cpu()) as (pool, told, _):
            model = WorkerModel(name="m", path=str(folder / "m.onnx"), inputs=())
            with pytest.raises(WorkerError, match=r"^the worker of cpu-0/0 did not start: .*m\.onnx: no ONNX model: "):
                await pool.start(LANE, share=500, models=[model])
            assert pool.status() == [] and told.told.empty()
            await pool.start(LANE, share=500, models=[graphs.identity(folder / "good.onnx")])

    asyncio.run(scenario())


def test_pool_start_of_a_worker_that_exits_raises_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # it cannot even start Python

    async def scenario() -> None:
        async with pool_of(Cpu()) as (pool, _, _):
            with pytest.raises(WorkerError, match=r"^the worker of cpu-0/0 did not start: it exited with status 1: \S"):
                await pool.start(LANE, share=500, models=[])

    asyncio.run(scenario())


def test_pool_start_of_a_worker_that_is_killed_raises_with_the_signal(folder: Path) -> None:
    async def scenario() -> None:
        async with pool_of(Cpu()) as (pool, _, _):
            start = asyncio.create_task(pool.start(LANE, share=500, models=[stuck(folder)]))
            while not (children := workers_of(os.getpid())):
                await asyncio.sleep(0.01)
            os.kill(children[0], signal.SIGKILL)
            with pytest.raises(WorkerError, match=r"^the worker of cpu-0/0 did not start: it was killed by SIGKILL$"):
                await start

    asyncio.run(scenario())


def test_pool_start_beyond_its_timeout_raises(folder: Path) -> None:
    async def scenario() -> None:
        async with pool_of(Cpu(), options=SupervisorOptions(start_timeout=0.4)) as (pool, _, _):
            with pytest.raises(
                WorkerError, match=r"^the worker of cpu-0/0 did not start: it was not ready after 0\.4 s"
            ):
                await pool.start(LANE, share=500, models=[stuck(folder)])

    asyncio.run(scenario())


def test_pool_stop_of_a_starting_lane_ends_its_start(folder: Path) -> None:
    async def scenario() -> None:
        async with pool_of(Cpu()) as (pool, _, _):
            start = asyncio.create_task(pool.start(LANE, share=500, models=[stuck(folder)]))
            while not workers_of(os.getpid()):
                await asyncio.sleep(0.01)
            await pool.stop(LANE, grace=5.0)
            with pytest.raises(
                WorkerError, match=r"^the worker of cpu-0/0 did not start: it was stopped while it loaded its models$"
            ):
                await start

    asyncio.run(scenario())


def test_pool_lane_stopped_while_it_starts_can_start_again_at_once(folder: Path) -> None:
    async def scenario() -> None:
        async with pool_of(Cpu()) as (pool, told, _):
            start = asyncio.create_task(pool.start(LANE, share=500, models=[stuck(folder)]))
            while not workers_of(os.getpid()):
                await asyncio.sleep(0.01)
            await pool.stop(LANE, grace=5.0)
            await pool.start(LANE, share=500, models=[graphs.identity(folder / "m.onnx", 2)])
            with pytest.raises(WorkerError):
                await start
            assert await told.next() == ("ready", LANE)
            pool.run(LANE, 1, "identity", [floats(1, 2)])
            assert (await told.next())[:3] == ("finished", LANE, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("busy", [False, True])
def test_pool_worker_that_dies_is_restarted(busy: bool, number: signal.Signals) -> None:
    async def scenario() -> None:
        async with pool_of(Fake()) as (pool, told, _):
            await pool.start(LANE, share=500, models=[sleeper(100.0, name="long"), sleeper(0.0)])
            assert await told.next() == ("ready", LANE)
            (before,) = pool.status()
            if busy:
                pool.run(LANE, 1, "long", [floats(1, 2)])
            assert before.pid is not None
            os.kill(before.pid, number)
            assert await told.next() == ("died", LANE, f"it was killed by {number.name}")
            with pytest.raises(WorkerError, match=r"^lane 'cpu-0/0' cannot take batch 2: its worker is restarting$"):
                pool.run(LANE, 2, "sleeper", [floats(1, 2)])
            assert await told.next() == ("ready", LANE)
            pool.run(LANE, 3, "sleeper", [floats(1, 2)])
            assert (await told.next())[:3] == ("finished", LANE, 3)
            (after,) = pool.status()
            assert (after.restarts, after.reason) == (1, f"it was killed by {number.name}")
            assert after.pid != before.pid

    asyncio.run(scenario())


def test_pool_worker_in_a_crash_loop_fails_permanently(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with pool_of(Cpu(), options=SupervisorOptions(lives=3)) as (pool, told, _):
            model = graphs.identity(folder / "m.onnx")
            await pool.start(LANE, share=500, models=[model])
            await told.next()
            Path(model.path).unlink()
            pid = pool.status()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert (await told.next())[0] == "died"
            async with asyncio.timeout(PATIENCE):
                while pool.status()[0].state != "failed":
                    await asyncio.sleep(0.01)
            (status,) = pool.status()
            assert (status.pid, status.restarts) == (None, 2)
            assert "m.onnx: cannot read it: " in status.reason
            assert told.told.empty()

    asyncio.run(scenario())
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and errors[0].startswith("cpu-0/0 permanently failed: its worker died 3 times in a row: ")


@contextmanager
def no_more_files() -> Iterator[None]:
    """As on a server with too many connections."""
    gc.collect()  # what earlier tests left open would be room later
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(least := os.dup(0))  # all below it are taken
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("shared", [False, True])
def test_pool_worker_without_file_descriptors_restarts_once_there_are_some(shared: bool) -> None:
    """However long that takes: it is not given up for what it does not cause."""
    backend = Together() if shared else Fake()

    async def scenario() -> None:
        async with pool_of(backend, options=SupervisorOptions(lives=2)) as (pool, told, _):
            await pool.start(LANE, share=500, models=[sleeper(0.0)])
            await told.next()
            pid = pool.status()[0].pid
            assert pid is not None
            pool._driver.pool.processes.descriptors.close()  # with what is kept for workers one would start
            with no_more_files():
                refused = (
                    r"^the worker of cpu-0/1 did not start: no process for cpu-0\S*: Too many open files; are there"
                )
                with pytest.raises(WorkerError, match=refused):
                    await pool.start(LaneId.parse("cpu-0/1"), share=500, models=[sleeper(0.0)])
                os.kill(pid, signal.SIGKILL)
                assert (await told.next())[0] == "died"
                async with asyncio.timeout(PATIENCE):
                    while pool.status()[0].restarts < 2:
                        await asyncio.sleep(0.01)
                assert "Too many open files" in pool.status()[0].reason
            assert await told.next() == ("ready", LANE)

    asyncio.run(scenario())


def test_pool_batch_that_hangs_costs_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_driver, "TICK", 0.05)

    async def scenario() -> None:
        async with pool_of(Fake(), options=SupervisorOptions(hang_timeout=0.2)) as (pool, told, _):
            await pool.start(LANE, share=500, models=[sleeper(100.0)])
            await told.next()
            pool.run(LANE, 1, "sleeper", [floats(1, 2)])
            assert await told.next() == ("died", LANE, "a batch of 1 of 'sleeper' took longer than 0.2 s")
            assert await told.next() == ("ready", LANE)

    asyncio.run(scenario())


class Lent(Fake):
    """Idle time of one core is lent."""

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        return Launch(fake=True, cores=tuple(os.sched_getaffinity(0)), cpu_limit=1.0, lend=True)


def test_lane_has_work_on_the_board_as_long_as_it_has_a_batch() -> None:
    async def scenario() -> None:
        async with pool_of(Lent()) as (pool, told, _):
            for lane in (LANE, OTHER):
                await pool.start(lane, share=500, models=[sleeper(0.05)])
                await told.next()
            lending = pool._driver.pool._lending
            board, slot, other = lending.board, lending.place(LANE)[1], lending.place(OTHER)[1]
            assert board is not None and slot and other
            board.hold(other, math.inf)
            assert board.may_resume(other)
            pool.run(LANE, 1, "sleeper", [floats(1, 2)])
            assert not board.may_resume(other)
            assert (await told.next())[:2] == ("finished", LANE)
            assert board.may_resume(other)
            pool.run(LANE, 2, "sleeper", [floats(1, 2)])
            os.kill(pool.status()[0].pid or 0, signal.SIGKILL)
            assert (await told.next())[:2] == ("died", LANE)
            assert board.may_resume(other)
            await pool.stop(LANE, grace=1.0)
            assert board.open((0,)) == slot  # it was given back
            del board  # what it shows is part of the arena

    asyncio.run(scenario())


class Lax(Cpu):
    """Nothing holds its workers."""

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        return Launch(budget=0.001)


def test_pool_worker_above_its_share_is_reported_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control_driver, "TICK", 0.05)
    monkeypatch.setattr(share_audit, "WINDOW", 0.2)

    async def scenario() -> None:
        async with pool_of(Lax()) as (pool, told, _):
            await pool.start(LANE, share=50, models=[graphs.convolutions(folder / "m.onnx", max_batch=2, layers=3)])
            await told.next()
            assert (pool.status()[0].used_share, pool.status()[0].over_share) == (None, False)
            picture = np.zeros((1, 3, 32, 32), np.float32)
            async with asyncio.timeout(PATIENCE):
                while not pool.status()[0].over_share:
                    pool.run(LANE, 1, "convolutions", [(Tensor("x", "FP32", picture.shape, picture.tobytes()),)])
                    await told.next()
                assert (pool.status()[0].used_share or 0) > 80
                while pool.status()[0].over_share:  # it does nothing any more
                    await asyncio.sleep(0.02)

    asyncio.run(scenario())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith("cpu-0/0 uses ")
    assert warnings[0].endswith(" of its device, and its share is 5 %")


def test_pool_status_of_a_dead_worker_has_no_used_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_driver, "TICK", 0.05)
    monkeypatch.setattr(share_audit, "WINDOW", 0.2)

    async def scenario() -> None:
        async with pool_of(Lax(), options=SupervisorOptions(first_delay=30.0)) as (pool, told, _):
            await pool.start(LANE, share=50, models=[graphs.convolutions(folder / "m.onnx", max_batch=2, layers=3)])
            await told.next()
            async with asyncio.timeout(PATIENCE):
                while pool.status()[0].used_share is None:
                    await asyncio.sleep(0.02)
            pid = pool.status()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert (await told.next())[0] == "died"
            status = pool.status()[0]
            assert (status.state, status.used_share, status.over_share) == ("restarting", None, False)

    asyncio.run(scenario())


def test_pool_worker_that_waits_too_long_in_the_background_leaves_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(pool_module, "PATIENCE", 0.01)
    monkeypatch.setattr(pool_module, "leave_background", left.append)

    async def scenario() -> None:
        async with pool_of(Cpu()) as (pool, _, _):
            starting = asyncio.ensure_future(pool.start(LANE, share=50, models=[stuck(folder)]))
            async with asyncio.timeout(PATIENCE):
                while not left:
                    await asyncio.sleep(0.01)
            assert left == workers_of(os.getpid())
            starting.cancel()
            await asyncio.wait([starting])

    asyncio.run(scenario())


def test_pool_lane_starts_in_the_background_of_those_that_serve_and_restarts_to_serve_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setups: list[tuple[bool, bool]] = []

    def noted(**given: Any) -> Setup:
        setups.append((given["background"], given["serve_first"]))
        return Setup(**given)

    monkeypatch.setattr(pool_module, "Setup", noted)

    async def scenario() -> None:
        async with pool_of(Fake()) as (pool, told, _):
            for lane in (LANE, OTHER):
                await pool.start(lane, share=50, models=[sleeper(0.0)])
                await told.next()
            pid = pool.status()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert [(await told.next())[0] for _ in range(2)] == ["died", "ready"]

    asyncio.run(scenario())
    assert setups == [(False, False), (True, False), (False, True)], "the first disturbs nobody"


def test_pool_stop_during_a_pause_keeps_the_response() -> None:
    async def scenario() -> None:
        async with pool_of(Fake()) as (pool, told, _):
            await pool.start(LANE, share=500, models=[sleeper(100.0)])
            await told.next()
            pool.run(LANE, 1, "sleeper", [floats(1, 2)])
            begun = time.monotonic()
            await pool.stop(LANE, grace=50.0)
            assert time.monotonic() - begun < 50.0
            assert (await told.next())[:3] == ("finished", LANE, 1)
            assert pool.status() == []

    asyncio.run(scenario())


class Together(Fake):
    """One process serves all lanes of a device."""

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        return Launch(fake=True, process=str(lane.device))


def test_pool_shared_process_runs_its_lanes_concurrently_and_stops_each_alone() -> None:
    async def scenario() -> None:
        async with pool_of(Together()) as (pool, told, _):
            for slot in range(3):
                await pool.start(LaneId(DeviceId("gpu"), slot), share=300, models=[sleeper(0.2 if slot else 100.0)])
                assert await told.next() == ("ready", LaneId(DeviceId("gpu"), slot))
            await pool.start(LaneId.parse("gpu-1/0"), share=300, models=[sleeper(0.0)])
            await told.next()
            pids = {status.lane: status.pid for status in pool.status()}
            assert (
                pids[LaneId.parse("gpu-0/0")]
                == pids[LaneId.parse("gpu-0/1")]
                == pids[LaneId.parse("gpu-0/2")]
                != pids[LaneId.parse("gpu-1/0")]
            )
            for slot in range(3):
                pool.run(LaneId(DeviceId("gpu"), slot), slot, "sleeper", [floats(slot, 2)])
            # The first takes for ever, and keeps nobody waiting.
            both = [await told.next(), await told.next()]
            assert {(it[0], it[1], it[3][0][0].array()[0, 0]) for it in both} == {
                ("finished", "gpu-0/1", 1.0),
                ("finished", "gpu-0/2", 2.0),
            }
            await pool.stop(LaneId.parse("gpu-0/1"), grace=5.0)
            await pool.start(LaneId.parse("gpu-0/3"), share=300, models=[sleeper(0.0)])
            assert await told.next() == ("ready", "gpu-0/3")
            assert {status.pid for status in pool.status()} == set(pids.values())
            for lane in (LaneId.parse("gpu-0/0"), LaneId.parse("gpu-0/2"), LaneId.parse("gpu-0/3")):
                await pool.stop(lane, grace=5.0)
            assert (await told.next())[:2] == ("finished", "gpu-0/0")  # a stop ends its pause
            assert not Path(f"/proc/{pids[LaneId.parse('gpu-0/0')]}").exists()
            assert [status.pid for status in pool.status()] == [pids[LaneId.parse("gpu-1/0")]]

    asyncio.run(scenario())


def test_pool_shared_process_that_ends_takes_all_its_lanes_down() -> None:
    async def scenario() -> None:
        async with pool_of(Together()) as (pool, told, _):
            lanes = {LaneId(DeviceId("gpu"), slot) for slot in range(3)}
            for lane in sorted(lanes):
                await pool.start(lane, share=300, models=[sleeper(100.0)])
                await told.next()
            pool.run(LaneId.parse("gpu-0/0"), 1, "sleeper", [floats(1, 2)])
            pid = pool.status()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            died = [await told.next() for _ in lanes]
            assert {it[1] for it in died} == lanes
            assert {(it[0], it[2]) for it in died} == {("died", "it was killed by SIGKILL")}
            assert {await told.next() for _ in lanes} == {("ready", lane) for lane in lanes}
            pids = {status.pid for status in pool.status()}
            assert len(pids) == 1 and pid not in pids

    asyncio.run(scenario())


def test_pool_status_of_a_shared_process_that_just_died_takes_all_its_lanes_down() -> None:
    async def scenario() -> None:
        async with pool_of(Together()) as (pool, told, _):
            lanes = {LaneId(DeviceId("gpu"), slot) for slot in range(3)}
            for lane in sorted(lanes):
                await pool.start(lane, share=300, models=[sleeper(100.0)])
                await told.next()
                pool.run(lane, 1, "sleeper", [floats(1, 2)])
            pid = pool.status()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            pool.poll()  # a request comes before the event loop does
            assert {(await told.next())[:2] for _ in lanes} == {("died", lane) for lane in lanes}

    asyncio.run(scenario())


class SlowToClose(Fake):
    """Refuses the first partition, and takes its time to close. opened: partitions that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[LaneId] = []
        self.may_close = threading.Event()
        self._refused = False

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        if not self._refused:
            self._refused = True
            raise DeviceError("not now")
        self.opened.append(lane)
        return super().open(lane, share, leaving)

    def close(self, lane: LaneId) -> None:
        assert self.may_close.wait(PATIENCE)
        if lane in self.opened:
            self.opened.remove(lane)


def test_partition_of_a_worker_that_was_killed_while_the_former_is_closed_is_not_opened() -> None:
    async def scenario() -> None:
        told: asyncio.Queue[SupervisorEvent] = asyncio.Queue()
        backend, arena, setup = SlowToClose(), Arena(1 << 20), LaneSetup(500, (sleeper(0.0),))
        pool = pool_module.Pool(backend, arena, told.put_nowait, cast(BatchListener, None))
        pool.spawn(LANE, 1, setup, fresh=True)
        assert isinstance(await asyncio.wait_for(told.get(), PATIENCE), WorkersExited)
        pool.spawn(LANE, 2, setup, fresh=True)
        await asyncio.sleep(0)  # it waits for the partition of the first to be closed
        pool.kill(LANE, 2, "its device is lost", abandon=True)
        pool.close_partition(LANE, 2)
        backend.may_close.set()
        assert await asyncio.wait_for(told.get(), PATIENCE) == PartitionClosed(LANE, 2)
        await pool.close()
        arena.close()
        assert not backend.opened and told.empty()

    asyncio.run(scenario())


def test_pool_unexpected_error_ends_the_process_with_its_reason() -> None:
    async def scenario() -> None:
        async with pool_of(Together()) as (pool, told, _):
            for lane in (LaneId.parse("gpu-0/0"), LaneId.parse("gpu-0/1")):
                await pool.start(lane, share=300, models=[sleeper(0.0)])
                await told.next()
            line = next(iter(pool._driver.pool._workers))
            line.send(RunBatch(1, "unheard of", []))
            died = {await told.next(), await told.next()}
            assert died == {
                ("died", lane, "it exited with status 1: KeyError: 'unheard of'")
                for lane in (LaneId.parse("gpu-0/0"), LaneId.parse("gpu-0/1"))
            }
            assert {await told.next(), await told.next()} == {("ready", "gpu-0/0"), ("ready", "gpu-0/1")}

    asyncio.run(scenario())


class TogetherReal(Cpu):
    """As `Together`, with workers that run models."""

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        return Launch(process="cpu")


def test_pool_shared_process_lane_that_cannot_start_leaves_the_others(folder: Path) -> None:
    (folder / "bad.onnx").write_text("no model")
    good = graphs.identity(folder / "good.onnx", 2)

    async def scenario() -> None:
        async with pool_of(TogetherReal()) as (pool, told, _):
            await pool.start(LaneId.parse("cpu-0/0"), share=300, models=[good])
            await told.next()
            bad = WorkerModel(name="bad", path=str(folder / "bad.onnx"), inputs=())
            with pytest.raises(WorkerError, match=r"^the worker of cpu-0/1 did not start: .*bad\.onnx: no ONNX model"):
                await pool.start(LaneId.parse("cpu-0/1"), share=300, models=[bad])
            pool._supervisor.options = SupervisorOptions(start_timeout=0.3)
            with pytest.raises(
                WorkerError, match=r"^the worker of cpu-0/2 did not start: it was not ready after 0\.3 s"
            ):
                await pool.start(LaneId.parse("cpu-0/2"), share=300, models=[stuck(folder)])
            (status,) = pool.status()
            assert (status.lane, status.restarts) == ("cpu-0/0", 0)
            pool.run(LaneId.parse("cpu-0/0"), 1, "identity", [floats(1, 2)])
            assert (await told.next())[:3] == ("finished", "cpu-0/0", 1)

    asyncio.run(scenario())


def test_pool_shared_process_batch_beyond_the_grace_of_stop_costs_only_its_lane(folder: Path) -> None:
    """Its process goes on, and so it may still write to where its outputs belong."""
    heavy = graphs.convolutions(folder / "heavy.onnx", max_batch=64, layers=3)
    light = graphs.identity(folder / "light.onnx", 2)

    async def scenario() -> None:
        async with pool_of(TogetherReal(), size=1 << 26) as (pool, told, arena):
            await pool.start(LaneId.parse("cpu-0/0"), share=300, models=[heavy])
            await pool.start(LaneId.parse("cpu-0/1"), share=300, models=[light])
            await told.next()
            await told.next()
            picture = np.zeros((64, 3, 32, 32), np.float32)
            pool.run(
                LaneId.parse("cpu-0/0"), 1, "convolutions", [(Tensor("x", "FP32", picture.shape, picture.tobytes()),)]
            )
            await pool.stop(LaneId.parse("cpu-0/0"), grace=0.0)
            assert await told.next() == ("died", "cpu-0/0", "it did not stop within 0 s")
            assert arena.free < arena.size
            pool.run(LaneId.parse("cpu-0/1"), 2, "identity", [floats(1, 2)])
            assert (await told.next())[:3] == ("finished", "cpu-0/1", 2)
            async with asyncio.timeout(PATIENCE):
                while arena.free < arena.size:  # then it has ended
                    await asyncio.sleep(0.01)
            assert told.told.empty()

    asyncio.run(scenario())


def test_pool_close_waits_for_a_shared_process_without_lanes(folder: Path) -> None:
    heavy = graphs.convolutions(folder / "heavy.onnx", max_batch=8, layers=1)
    picture = np.zeros((8, 3, 32, 32), np.float32)

    async def scenario() -> None:
        async with pool_of(TogetherReal(), size=1 << 26) as (pool, told, _):
            await pool.start(LaneId.parse("cpu-0/0"), share=300, models=[heavy])
            await told.next()
            await pool.start(LaneId.parse("cpu-0/1"), share=300, models=[heavy])
            await told.next()
            pid = pool.status()[0].pid
            pool.run(
                LaneId.parse("cpu-0/0"), 1, "convolutions", [(Tensor("x", "FP32", picture.shape, picture.tobytes()),)]
            )
            await pool.stop(LaneId.parse("cpu-0/0"), grace=0.0)  # its process has another lane, and is not waited for
            await pool.stop(LaneId.parse("cpu-0/1"), grace=5.0)
            while pool._driver.pool._workers:
                await asyncio.sleep(0)
            await pool.close(grace=5.0)
            assert not Path(f"/proc/{pid}").exists()

    asyncio.run(scenario())


def test_pool_lane_stopped_at_the_moment_it_is_ready_does_not_return() -> None:
    async def scenario() -> None:
        async with pool_of(Fake()) as (pool, told, _):
            starting = asyncio.create_task(pool.start(LANE, share=500, models=[sleeper(0.0)]))
            while not pool._driver.pool._workers:
                await asyncio.sleep(0)
            (line,) = pool._driver.pool._workers
            await_data(line._connection)
            line.receive()  # it says that it is ready, and who waits for it has not had a turn yet
            await pool.stop(LANE, grace=5.0)
            with pytest.raises(WorkerError, match="it was stopped while it loaded its models"):
                await starting
            assert told.told.empty() and pool.status() == []
            assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    asyncio.run(scenario())


class Slow(Fake):
    """Its driver takes its time, and refuses processes where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Semaphore(0)
        self.may = threading.Semaphore(0)
        self.done: list[str] = []
        self.refuses = False

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        self.asked.release()
        assert self.may.acquire(timeout=PATIENCE)
        self.done.append(f"open {lane}")
        return Launch(fake=True)

    def on_worker_started(self, lane: LaneId, pid: int) -> None:
        if self.refuses:
            raise DeviceError("there is no room for it")

    def close(self, lane: LaneId) -> None:
        self.done.append(f"close {lane}")


def test_pool_lanes_keep_running_while_a_partition_is_opened() -> None:
    backend = Slow()

    async def scenario() -> None:
        async with pool_of(backend) as (pool, told, _):
            backend.may.release()
            await pool.start(LANE, share=500, models=[sleeper(0.0)])
            await told.next()
            starting = asyncio.create_task(pool.start(LaneId.parse("cpu-0/1"), share=500, models=[sleeper(0.0)]))
            assert await asyncio.to_thread(lambda: backend.asked.acquire() and backend.asked.acquire(timeout=PATIENCE))
            pool.run(LANE, 1, "sleeper", [floats(1, 2)])
            assert (await told.next())[:3] == ("finished", LANE, 1)
            with pytest.raises(WorkerError, match=r"^lane 'cpu-0/1' has a worker already; stop it first$"):
                await pool.start(LaneId.parse("cpu-0/1"), share=500, models=[sleeper(0.0)])
            assert [status.state for status in pool.status()] == ["ready", "starting"] and not starting.done()
            backend.may.release()
            await starting
            assert await told.next() == ("ready", "cpu-0/1")

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_pool_partition_of_a_cancelled_start_is_opened_and_closed(how: str) -> None:
    backend = Slow()

    async def scenario() -> None:
        async with pool_of(backend) as (pool, told, _):
            starting = asyncio.create_task(pool.start(LANE, share=500, models=[sleeper(0.0)]))
            assert await asyncio.to_thread(backend.asked.acquire, timeout=PATIENCE)
            if how == "stop":
                stopping = asyncio.create_task(pool.stop(LANE, grace=5.0))
                await asyncio.sleep(0)
                backend.may.release()
                await stopping
                with pytest.raises(WorkerError, match=r"^the worker of cpu-0/0 did not start: it was stopped while it"):
                    await starting
            else:
                starting.cancel()
                await asyncio.sleep(0)
                backend.may.release()
                with pytest.raises(asyncio.CancelledError):
                    await starting
            assert backend.done == [f"open {LANE}", f"close {LANE}"]
            assert pool.status() == [] and workers_of(os.getpid()) == [] and told.told.empty()

    asyncio.run(scenario())


def test_pool_worker_that_its_partition_rejects_is_ended() -> None:
    backend = Slow()
    backend.refuses = True
    backend.may.release()

    async def scenario() -> None:
        async with pool_of(backend) as (pool, told, _):
            with pytest.raises(WorkerError, match=r"^the worker of cpu-0/0 did not start: there is no room for it$"):
                await pool.start(LANE, share=500, models=[sleeper(0.0)])
            assert pool.status() == [] and workers_of(os.getpid()) == [] and told.told.empty()
            assert backend.done == [f"open {LANE}", f"close {LANE}"]

    asyncio.run(scenario())


def test_pool_close_while_a_lane_is_stopping_closes_its_partition() -> None:
    backend = Slow()
    backend.may.release()

    async def scenario() -> None:
        async with pool_of(backend) as (pool, _, _):
            await pool.start(LANE, share=500, models=[sleeper(0.0)])
            stopping = asyncio.create_task(pool.stop(LANE, grace=5.0))
            await asyncio.sleep(0)
            await pool.close(grace=0.0)
            await stopping
            assert backend.done == [f"open {LANE}", f"close {LANE}"]

    asyncio.run(scenario())


def test_pool_start_after_close_raises() -> None:
    async def scenario() -> None:
        async with pool_of(Fake()) as (pool, _, _):
            await pool.close(grace=0.0)
            with pytest.raises(WorkerError, match=r"^the worker of cpu-0/0 did not start: the server stops$"):
                await pool.start(LANE, share=500, models=[sleeper(0.0)])

    asyncio.run(scenario())


def test_pool_close_with_any_number_of_hanging_lanes_leaves_no_process(folder: Path) -> None:
    heavy = graphs.convolutions(folder / "heavy.onnx", max_batch=32, layers=6)
    picture = np.zeros((32, 3, 32, 32), np.float32)
    lanes = (LaneId.parse("cpu-0/0"), LaneId.parse("cpu-0/1"))

    async def scenario() -> None:
        async with pool_of(TogetherReal(), size=1 << 26) as (pool, told, arena):
            for lane in lanes:
                await pool.start(lane, share=300, models=[heavy])
                await told.next()
            for lane in lanes:
                pool.run(lane, 1, "convolutions", [(Tensor("x", "FP32", picture.shape, picture.tobytes()),)])
            pid = pool.status()[0].pid
            await pool.close(grace=0.0)
            assert not Path(f"/proc/{pid}").exists()
            assert arena.free == arena.size

    asyncio.run(scenario())


class Fragile(Fake):
    """Its devices can be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: dict[DeviceId, str] = {}

    def lost(self) -> dict[DeviceId, str]:
        return self.gone


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> Fragile:
    monkeypatch.setattr(control_driver, "TICK", 0.05)  # between two looks at what is lost
    return Fragile()


def test_pool_lost_device_costs_only_its_lanes_until_it_returns(
    fragile: Fragile, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with pool_of(fragile) as (pool, told, _):
            for lane in (LaneId.parse("gpu-0/0"), LaneId.parse("gpu-1/0")):
                await pool.start(lane, share=1000, models=[sleeper(100.0, name="long"), sleeper(0.0)])
                await told.next()
            pool.run(LaneId.parse("gpu-0/0"), 1, "long", [floats(1, 2)])
            fragile.gone = {DeviceId("gpu"): "Xid 79, it has fallen off the bus"}
            reason = "gpu-0 is lost: Xid 79, it has fallen off the bus"
            assert await told.next() == ("died", "gpu-0/0", reason)
            first, second = pool.status()
            assert (first.state, first.pid, first.reason) == ("lost", None, reason)
            assert (second.state, second.restarts) == ("ready", 0)
            with pytest.raises(WorkerError, match=r"^lane 'gpu-0/0' cannot take batch 2: its worker is lost$"):
                pool.run(LaneId.parse("gpu-0/0"), 2, "sleeper", [floats(1, 2)])
            with pytest.raises(WorkerError, match=rf"^the worker of gpu-0/1 did not start: {reason}$"):
                await pool.start(LaneId.parse("gpu-0/1"), share=500, models=[sleeper(0.0)])
            pool.run(LaneId.parse("gpu-1/0"), 3, "sleeper", [floats(1, 2)])
            assert (await told.next())[:3] == ("finished", "gpu-1/0", 3)
            fragile.gone = {}
            assert await told.next() == ("ready", "gpu-0/0")
            pool.run(LaneId.parse("gpu-0/0"), 4, "sleeper", [floats(1, 2)])
            assert (await told.next())[:3] == ("finished", "gpu-0/0", 4)

    asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text for text in said if "lost" in text or "back" in text] == [
        "gpu-0 is lost: Xid 79, it has fallen off the bus",
        "the worker of gpu-0/0 died: gpu-0 is lost: Xid 79, it has fallen off the bus",
        "gpu-0 is back",
    ]


def test_pool_close_waits_for_workers_of_a_device_just_lost(fragile: Fragile) -> None:
    async def scenario() -> None:
        async with pool_of(fragile) as (pool, told, _):
            await pool.start(LaneId.parse("gpu-0/0"), share=1000, models=[sleeper(0.0)])
            await told.next()
            pid = pool.status()[0].pid
            fragile.gone = {DeviceId("gpu"): "off the bus"}
            assert (await told.next())[0] == "died"
            await pool.close(grace=5.0)
            assert not Path(f"/proc/{pid}").exists()

    asyncio.run(scenario())


def test_pool_worker_that_dies_of_a_lost_device_is_not_restarted_on_it(
    fragile: Fragile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may notice before the driver tells."""

    async def scenario() -> None:
        async with pool_of(fragile, options=SupervisorOptions(first_delay=30.0)) as (pool, told, _):
            await pool.start(LaneId.parse("gpu-0/0"), share=1000, models=[sleeper(0.0)])
            await told.next()
            pid = pool.status()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert (await told.next())[0] == "died"
            assert pool.status()[0].state == "restarting"
            fragile.gone = {DeviceId("gpu"): "off the bus"}
            async with asyncio.timeout(PATIENCE):
                while pool.status()[0].state != "lost":
                    await asyncio.sleep(0.01)
            assert pool.status()[0].reason == "gpu-0 is lost: off the bus"
            fragile.gone = {}
            assert await told.next() == ("ready", "gpu-0/0")

    asyncio.run(scenario())


PARENT = """
import asyncio, sys
from pathlib import Path
from cotenant.backends.fake import Fake
from cotenant.core.identity import LaneId
from tests.live.workers import floats, pool_of, sleeper
from tests.cli.program import alive, workers_of
from tests.live.test_pool import Cpu, stuck

async def main():
    async with pool_of(Fake()) as (pool, told, _):
        await pool.start(LaneId.parse("fake-0/0"), share=500, models=[sleeper(100.0)])
        await pool.start(LaneId.parse("fake-0/1"), share=500, models=[sleeper(100.0)])
        pool.run(LaneId.parse("fake-0/0"), 1, "sleeper", [floats(1, 2)])
        print(*[status.pid for status in pool.status()], flush=True)
        pool._driver.pool._partitions.backend = Cpu()
        await pool.start(LaneId.parse("cpu-0/0"), share=500, models=[stuck(Path(sys.argv[1]))])

asyncio.run(main())
"""


def test_pool_workers_of_a_killed_server_end(folder: Path) -> None:
    """One that is idle, one in a batch, one that loads."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        deadline = time.monotonic() + PATIENCE
        while len(children := workers_of(parent.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(children) == 3 and set(pids) < set(children)
        parent.kill()
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in children if alive(pid)] == []
