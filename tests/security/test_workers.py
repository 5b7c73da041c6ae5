"""Workers see no secrets of the server, take no more memory than they may, and can be revived."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from benchmarks.onnx_models import save, worker_model
from cotenant.backends.cpu import Cpu
from cotenant.backends.fake import Fake
from cotenant.control.supervisor_options import SupervisorOptions
from cotenant.core.identity import LaneId
from cotenant.core.tensor import Tensor
from cotenant.errors import FailedError
from cotenant.live.confinement import Confinement
from cotenant.worker.wire import WorkerModel
from tests.live.deployment import repository
from tests.live.test_server import started, until
from tests.live.workers import pool_of, sleeper

LANE = LaneId.parse("cpu-0/0")
MIB = 1 << 20


def hungry(path: Path) -> WorkerModel:
    """y = the sum of as many ones as x says: four bytes of memory each."""
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    nodes = [
        helper.make_node("ConstantOfShape", ["x"], ["ones"], value=one),
        helper.make_node("ReduceSum", ["ones"], ["y"], keepdims=1),
    ]
    save(path, nodes, {"x": (TensorProto.INT64, [1])}, {"y": (TensorProto.FLOAT, [1])})
    model = worker_model("hungry", path, 1, "INT64", (1,))
    return WorkerModel(name="hungry", path=model.path, inputs=model.inputs, outputs=model.outputs, batched=False)


def count(number: int) -> tuple[Tensor, ...]:
    return (Tensor("x", "INT64", (1,), np.array([number], np.int64).tobytes()),)


def test_batch_that_wants_more_memory_than_its_worker_may_have_fails_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool_of(Cpu(), confinement=Confinement(memory=1024 * MIB)) as (pool, told, _):
            await pool.start(LANE, share=1000, models=[hungry(tmp_path / "hungry.onnx")])
            assert (await told.next())[0] == "ready"
            for batch, (numbers, fails) in enumerate(((1 << 20, False), (1 << 30, True), (1 << 20, False))):
                pool.run(LANE, batch, "hungry", [count(numbers)])
                kind, *rest = await told.next()
                assert kind == ("failed" if fails else "finished"), rest
                if fails:
                    assert "llocat" in rest[-1]  # "Failed to allocate memory", "bad allocation"

    asyncio.run(main())


def test_worker_without_memory_for_itself_dies_and_the_server_lives(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool_of(Fake(), confinement=Confinement(memory=MIB), options=SupervisorOptions(lives=2)) as (
            pool,
            *_,
        ):
            with pytest.raises(Exception, match="did not start"):
                await pool.start(LANE, share=1000, models=[sleeper(0.0)])

    asyncio.run(main())


def test_worker_sees_no_secret_and_is_the_first_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = {"AWS_SECRET_ACCESS_KEY": "s1", "DATABASE_URL": "s2", "HF_TOKEN": "s3", "COTENANT_TOKEN_FILE": "s4"}
    shown = {"LD_LIBRARY_PATH": "/opt/lib", "CUDA_MODULE_LOADING": "LAZY", "OWN_SETTING": "given"}
    for name, value in (hidden | shown).items():
        monkeypatch.setenv(name, value)

    async def main() -> None:
        async with pool_of(Fake(), confinement=Confinement(environment=("OWN_SETTING",))) as (pool, told, _):
            await pool.start(LANE, share=1000, models=[sleeper(0.0)])
            await told.next()
            (worker,) = pool.status()
            environ = Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")
            names = {entry.partition(b"=")[0].decode() for entry in environ}
            assert not names & hidden.keys()
            assert names >= {*shown, "PATH", "OMP_NUM_THREADS"}
            own = int(Path("/proc/self/oom_score_adj").read_text())
            assert int(Path(f"/proc/{worker.pid}/oom_score_adj").read_text()) == max(500, own)

    asyncio.run(main())


def test_lane_that_does_not_start_again_holds_up_the_load_that_revives_it_for_a_while_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with started(repository(tmp_path), ("identity",)) as server:
            supervisor = server._rollouts.supervisor
            supervisor.options = SupervisorOptions(lives=1, steady=3600.0)
            (worker,) = server._rollouts.workers()
            assert worker.pid
            os.kill(worker.pid, signal.SIGKILL)
            await until(lambda: server._rollouts.workers()[0].state == "failed")
            supervisor.options = SupervisorOptions(lives=1000, longest_delay=0.01, start_timeout=0.01)
            reason = r"^failed to load 'identity': cpu-0/0 has not started again in 0\.01 s$"
            with pytest.raises(FailedError, match=reason):
                await asyncio.wait_for(server.load("identity", {}), 60)
            assert server.index()[0].reason
            supervisor.options = SupervisorOptions()
            await until(lambda: server.model_ready("identity"))  # it was tried further

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_load_revives_a_lane_that_failed_permanently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with started(repository(tmp_path), ("identity",)) as server:
            supervisor = server._rollouts.supervisor
            supervisor.options = SupervisorOptions(lives=2, first_delay=0.01)

            def state() -> str:
                (worker,) = server._rollouts.workers()
                return worker.state

            assert server.ready()
            while state() != "failed":
                (worker,) = server._rollouts.workers()
                if worker.pid:
                    os.kill(worker.pid, signal.SIGKILL)
                await until(lambda: state() != "ready")
                await until(lambda: state() in ("ready", "failed"))
            assert not server.ready() and not server.model_ready("identity")

            file = tmp_path / "identity" / "1" / "model.onnx"
            kept = file.read_bytes()
            file.write_bytes(b"this is no model")
            with pytest.raises(FailedError, match="failed to load 'identity': "):
                await server.load("identity", {})
            assert not server.ready()
            file.write_bytes(kept)
            await server.load("identity", {})
            assert state() == "ready" and server.ready() and server.model_ready("identity")

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())
