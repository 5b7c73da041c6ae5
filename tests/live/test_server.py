"""The whole server in one process, with real workers and the stock client."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import uvloop
from tritonclient.utils import InferenceServerException

from cotenant.backends.cpu import Cpu
from cotenant.backends.fake import Fake
from cotenant.cli.client import fetch
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.plan import Device, Partition, Placement
from cotenant.core.profile import Point, Profile
from cotenant.core.tensor import Tensor
from cotenant.errors import ConfigError, FailedError, RequestError, UnavailableError, WorkerError
from cotenant.live import interference_observer, status_reporter
from cotenant.live.control_driver import WorkerStatus
from cotenant.live.deployment import Deployment, KeptModels, without_model
from cotenant.live.grpc import GrpcServer
from cotenant.live.http import HttpServer
from cotenant.live.metrics import render
from cotenant.live.oip import InferRequest, InferResponse
from cotenant.live.server import Server
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample
from tests.live.deployment import repository, sample_deployment

PATIENCE = 60.0


def run(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(main, 3 * PATIENCE))


@asynccontextmanager
async def started(root: Path, names: tuple[str, ...] = ("identity", "lookup")) -> AsyncIterator[Server]:
    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
        if not (root / "identity").exists():
            raise FailedError("the repository is gone")
        return sample_deployment(root, tuple(sorted(wanted)))

    server = Server(sample_deployment(root, names), Cpu(), prepare)
    try:
        await server.start()
        yield server
    finally:
        await server.drain(1.0)
        await server.stop(1.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


async def ask(server: Server, model: str, *tensors: Tensor) -> InferResponse | RequestError:
    answered: asyncio.Future[InferResponse | RequestError] = asyncio.get_running_loop().create_future()
    server.infer(InferRequest(model=model, inputs=tensors), answered.set_result)
    return await asyncio.wait_for(answered, PATIENCE)


def floats(rows: int = 1) -> Tensor:
    data = np.arange(16 * rows, dtype=np.float32)
    return Tensor("x", "FP32", (rows, 16), data.tobytes())


def indices(*values: int) -> Tensor:
    return Tensor("x", "INT64", (1, len(values)), np.array(values, np.int64).tobytes())


def use(client: Any, module: Any) -> None:
    """Every step blocks: in a thread of its own."""
    x = np.arange(16, dtype=np.float32).reshape(1, 16)
    given = module.InferInput("x", x.shape, "FP32")
    given.set_data_from_numpy(x)
    result = client.infer("identity", [given])
    assert result.as_numpy("y").tolist() == x.tolist()
    assert client.is_model_ready("identity")
    assert not client.is_model_ready("broken")
    client.unload_model("identity")
    assert not client.is_model_ready("identity")
    with pytest.raises(InferenceServerException, match="'identity' rejected: it is unloaded"):
        client.infer("identity", [given])
    client.load_model("identity")
    assert client.infer("identity", [given]).as_numpy("y").tolist() == x.tolist()
    with pytest.raises(InferenceServerException, match="failed to load"):
        client.load_model("nowhere")
    client.close()


def test_server_with_real_workers_answers_stock_clients(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            http, rpc = (
                HttpServer(server, page=server.page, status=server.status),
                GrpcServer(server),
            )
            address = f"127.0.0.1:{await http.listen('127.0.0.1', 0)}"
            grpc_address = f"127.0.0.1:{await rpc.listen('127.0.0.1', 0)}"
            try:
                for client, module in (
                    (triton_http.InferenceServerClient(address), triton_http),
                    (triton_grpc.InferenceServerClient(grpc_address), triton_grpc),
                ):
                    await asyncio.to_thread(use, client, module)
                (counts,) = server.statistics("identity")
                assert counts["inference_stats"]["success"]["count"] == 4, "two of each client"
            finally:
                await http.stop(1.0)
                await rpc.stop(1.0)

    run(main())


def test_batch_with_one_bad_request_fails_that_request_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            wanted: list[Awaitable[InferResponse | RequestError]] = [
                ask(server, "lookup", indices(n % 4, 9 if n == 7 else 1)) for n in range(24)
            ]
            answers = await asyncio.gather(*wanted)
            bad = [n for n, answer in enumerate(answers) if isinstance(answer, RequestError)]
            assert bad == [7]
            assert isinstance(answers[7], FailedError)
            good = answers[3]
            assert isinstance(good, InferResponse)
            assert good.outputs[0].array().tolist() == [[30.0, 10.0]]

    run(main())


def test_infer_without_turns_of_the_event_loop_still_polls_workers(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            served: list[InferResponse] = []

            def note(result: InferResponse | RequestError) -> None:
                if isinstance(result, InferResponse):
                    served.append(result)

            end = time.monotonic() + PATIENCE
            while not served and time.monotonic() < end:  # the event loop never has its turn
                server.infer(InferRequest(model="identity", inputs=(floats(),)), note)
            assert served

    run(main())


def test_killed_worker_loses_no_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            (worker,) = [w for w in server._rollouts.workers() if "identity" in w.models]
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGSTOP)  # so that it answers nothing before it is killed
            asking = [asyncio.create_task(ask(server, "identity", floats())) for _ in range(8)]
            await until(lambda: server._driver.busy_since(worker.lane) is not None)
            os.kill(worker.pid, signal.SIGKILL)
            answers = await asyncio.gather(*asking)
            assert [answer for answer in answers if not isinstance(answer, InferResponse)] == []
            assert [w.restarts for w in server._rollouts.workers() if "identity" in w.models] == [1]

    # What the worker had is tried again, and the rest waits.
    run(main())


def test_load_and_unload_under_requests_lose_none(tmp_path: Path) -> None:
    async def main() -> None:
        root = repository(tmp_path)
        async with started(root, ("identity",)) as server:
            answers: list[InferResponse | RequestError] = []
            changing = True

            async def keep_asking() -> None:
                while changing:
                    answers.append(await ask(server, "identity", floats()))

            asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
            await server.load("lookup", {})
            assert {entry.name for entry in server.index(ready=True)} == {"identity", "lookup"}
            before = len(answers)
            await until(lambda: len(answers) > before + 20)
            await server.unload("lookup", {})
            changing = False
            await asyncio.gather(*asking)
            assert all(isinstance(answer, InferResponse) for answer in answers)
            # What was left over is gone.
            await until(lambda: len(server._rollouts.workers()) == 1)

    run(main())


def test_unload_with_requests_waiting_answers_them_unavailable(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path), ("identity",)) as server:
            asked = [asyncio.ensure_future(ask(server, "identity", floats())) for _ in range(50)]
            await asyncio.sleep(0)
            await server.unload("identity", {})
            answers = await asyncio.gather(*asked)
            rejections = [answer for answer in answers if isinstance(answer, UnavailableError)]
            assert rejections and all(isinstance(answer, InferResponse | UnavailableError) for answer in answers)
            assert str(rejections[0]).startswith("request for model 'identity' expired: its partition was taken out")

    run(main())


def test_model_that_the_plan_leaves_out_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            given = server.deployment
            await server.apply(msgspec.structs.replace(given, plan=without_model(given, "identity").plan))
            states = {entry.name: (entry.state, entry.reason) for entry in server.index()}
            left = "nobody asks for it, and no share of the devices is left for it"
            assert (states["identity"], states["lookup"]) == (("UNAVAILABLE", left), ("READY", ""))
            await server.load("lookup", {})  # nobody has unloaded the other: it has a place where there is one
            assert isinstance(await ask(server, "identity", floats()), InferResponse)

    run(main())


def test_worker_that_hangs_as_it_is_revived_holds_up_no_other_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            hanging, answers, revived = asyncio.Event(), asyncio.Event(), server._rollouts.revive

            async def hangs(model: str) -> None:
                if model == "identity":
                    hanging.set()
                    await answers.wait()
                    raise WorkerError("it failed again")
                await revived(model)

            monkeypatch.setattr(server._rollouts, "revive", hangs)
            loading = asyncio.create_task(server.load("identity", {}))
            await asyncio.wait_for(hanging.wait(), PATIENCE)
            await asyncio.wait_for(server.unload("lookup", {}), PATIENCE)
            await asyncio.wait_for(server.load("lookup", {}), PATIENCE)
            assert server._state.transitions == {"identity": "LOADING"}
            answers.set()
            with pytest.raises(FailedError, match="failed to load 'identity': it failed again"):
                await loading
            assert server._state.failures == {"identity": "it failed again"} and server._state.transitions == {}

    run(main())


def test_requests_for_an_unloaded_model_are_unavailable_and_miss_no_target(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            assert isinstance(await ask(server, "identity", floats()), InferResponse)
            await server.unload("identity", {})
            with pytest.raises(UnavailableError, match=r"^request for model 'identity' rejected: it is unloaded$"):
                await ask(server, "identity", floats())
            server.reject_unread("identity", 0.001)
            server.reject_unread("lookup", 0.001)
            await asyncio.sleep(0)
            counts = server._observer.models
            assert counts["identity"].ledger.attainment == 1 and counts["identity"].ledger.arrived == 1
            assert counts["lookup"].ledger.attainment == 0
            assert server._driver.arrived == {"identity": 1, "lookup": 1}
            assert (
                'cotenant_attainment_ratio{model="identity",version="1"} 1.0'
                in render(server.metrics(), "")[0].decode()
            )
            (fail,) = (each["inference_stats"]["fail"] for each in server.statistics("identity"))
            assert fail["count"] == 0
            await server.load("identity", {})
            assert isinstance(await ask(server, "identity", floats()), InferResponse)

    run(main())


def test_requests_for_a_model_that_the_plan_leaves_out_miss_their_target(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            given = server.deployment
            await server.apply(msgspec.structs.replace(given, plan=without_model(given, "identity").plan))
            answer = await ask(server, "identity", floats())
            assert str(answer) == "request for model 'identity' rejected: no partition holds the model"
            assert server._observer.models["identity"].ledger.attainment == 0

    run(main())


def test_unloaded_model_while_another_is_loaded_stays_in_the_index(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            await server.unload("identity", {})
            await server.unload("lookup", {})
            await server.load("lookup", {})
            states = {entry.name: (entry.state, entry.reason) for entry in server.index()}
            assert states["identity"] == ("UNAVAILABLE", "unloaded")
            assert states["lookup"] == ("READY", "")
            await server.load("identity", {})
            assert isinstance(await ask(server, "identity", floats()), InferResponse)

    run(main())


def test_stop_after_all_models_were_unloaded_and_loaded_waits_for_every_lane(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path), ("identity",)) as server:
            await server.unload("identity", {})
            await until(lambda: not server._rollouts.status().requested)
            await server.load("identity", {})
            assert server._rollouts.status().requested
        assert not server._rollouts.status().requested

    run(main())


def test_model_while_it_is_loaded_again_is_ready(tmp_path: Path) -> None:
    root = repository(tmp_path)
    servers: list[Server] = []
    states = []

    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
        states.append([(entry.name, entry.state) for entry in servers[0].index() if entry.name in wanted])
        return sample_deployment(root, tuple(sorted(wanted)))

    async def main() -> None:
        servers.append(server := Server(sample_deployment(root), Cpu(), prepare))
        try:
            await server.start()
            await server.load("identity", {})
            await server.unload("lookup", {})
            await server.load("lookup", {})
        finally:
            await server.stop(1.0)
        assert states == [
            [("identity", "READY"), ("lookup", "READY")],
            [("identity", "READY"), ("lookup", "LOADING")],
        ]

    run(main())


def test_unload_of_a_model_that_is_being_loaded_comes_after_the_load(tmp_path: Path) -> None:
    root, may, loads = repository(tmp_path), asyncio.Event(), asyncio.Event()

    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
        loads.set()
        await may.wait()
        return sample_deployment(root, tuple(sorted(wanted)))

    async def main() -> None:
        server = Server(sample_deployment(root, ("identity",)), Cpu(), prepare)
        try:
            await server.start()
            load = asyncio.create_task(server.load("lookup", {}))
            await loads.wait()
            unload = asyncio.create_task(server.unload("lookup", {}))
            await asyncio.sleep(0)
            may.set()
            await asyncio.gather(load, unload)
            assert not server.model_ready("lookup") and server.model_ready("identity")
            await server.unload("nobody", {})
            assert {entry.name for entry in server.index()} == {"identity", "lookup", "broken"}
        finally:
            await server.stop(1.0)

    run(main())


def test_model_that_is_loaded_again_is_planned_for_the_rate_that_it_is_asked_for(tmp_path: Path) -> None:
    root, rates = repository(tmp_path), []

    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: KeptModels) -> Deployment:
        assert kept.models.keys() == set(wanted) - {"identity"}
        rates.append(kept.rates)
        return sample_deployment(root, tuple(sorted(wanted)))

    async def main() -> None:
        given = sample_deployment(root)
        problem = msgspec.structs.replace(given.problem, rates={"identity": 70.0, "lookup": 5.0})
        server = Server(msgspec.structs.replace(given, problem=problem), Cpu(), prepare)
        try:
            await server.start()
            await server.load("identity", {})
            await server.unload("identity", {})
            await server.load("identity", {})
        finally:
            await server.stop(1.0)
        default = given.problem.rates["lookup"]
        assert rates == [{"identity": 70.0, "lookup": 5.0}, {"lookup": default}], "one that was unloaded has none"

    run(main())


class Slow(Cpu):
    """The second worker waits for `may`."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self._workers = 0

    def on_worker_started(self, lane: LaneId, pid: int) -> None:
        self._workers += 1
        assert self._workers != 2 or self.may.wait(PATIENCE)


def test_worker_that_dies_while_others_start_is_waited_for(tmp_path: Path) -> None:
    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
        raise FailedError("nothing else is to be served")

    async def main() -> None:
        backend = Slow()
        given = sample_deployment(repository(tmp_path))
        apart = tuple(
            Partition(share=500, placements=(Placement(model=name, batch=1, rate=1.0, duty=0.01, latency=0.002),))
            for name in given.offered
        )
        plan = msgspec.structs.replace(given.plan, devices=(Device(id=DeviceId("cpu"), partitions=apart),))
        server = Server(msgspec.structs.replace(given, plan=plan), backend, prepare)

        def ready() -> list[WorkerStatus]:
            return [worker for worker in server._rollouts.workers() if worker.state == "ready"]

        starting = asyncio.create_task(server.start())
        try:
            await until(lambda: bool(ready()))
            (worker,) = ready()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            await until(lambda: not ready())
            assert not starting.done() and not server.model_ready("identity")
            backend.may.set()
            await starting
            assert sorted(worker.restarts for worker in ready()) == [0, 1]
            assert isinstance(await ask(server, "identity", floats()), InferResponse)
            assert isinstance(await ask(server, "lookup", indices(1)), InferResponse)
        finally:
            backend.may.set()
            await server.stop(1.0)

    run(main())


def test_drain_with_requests_in_flight_answers_them_and_rejects_new_ones(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            taken = [asyncio.create_task(ask(server, "identity", floats())) for _ in range(5)]
            await asyncio.sleep(0)
            await server.drain(PATIENCE)
            assert all(isinstance(answer, InferResponse) for answer in await asyncio.gather(*taken))
            with pytest.raises(RequestError, match="shutting down"):
                await ask(server, "identity", floats())

    run(main())


def test_identity_of_large_and_small_tensors_returns_them_unchanged(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            rows = server.model("identity").max_batch_size
            for count in {1, rows}:
                answer = await ask(server, "identity", floats(count))
                assert isinstance(answer, InferResponse)
                assert bytes(answer.outputs[0].data) == floats(count).data
            free = server.allocate(1)
            assert free is not None

    run(main())


def test_server_after_a_request_shows_it_in_metrics_page_statistics_and_index(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            await ask(server, "identity", floats())
            assert b'cotenant_goodput_total{model="identity",version="1"} 1' in render(server.metrics(), "")[0]
            got: list[bytes] = []
            server.page.subscribe(got.append)()
            (tick,) = [
                msgspec.json.decode(event.split(b"data: ")[1]) for event in got if event.startswith(b"event: tick")
            ]
            views = {view["name"]: view for view in tick["models"]}
            assert (views["identity"]["health"], views["broken"]["health"]) == ("good", "off")
            assert {model for view in tick["partitions"] for model in view["models"]} == {"identity", "lookup"}
            assert server.statistics("identity")[0]["inference_count"] == 1
            states = {entry.name: entry.state for entry in server.index()}
            assert states == {"identity": "READY", "lookup": "READY", "broken": "UNAVAILABLE"}
            config = server.config("identity")
            assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [16]}]
            assert config["max_batch_size"] == server.model("identity").max_batch_size

    run(main())


def test_load_keeps_broken_models_in_the_index(tmp_path: Path) -> None:
    root = repository(tmp_path)
    first = msgspec.structs.replace(sample_deployment(root, ("identity",)), broken={"broken": "not a model"})

    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
        return msgspec.structs.replace(
            sample_deployment(root, tuple(sorted(wanted))), broken={}
        )  # it looks at no others

    async def main() -> None:
        server = Server(first, Cpu(), prepare)
        await server.start()
        try:
            await server.load("lookup", {})
            states = {entry.name: (entry.state, entry.reason) for entry in server.index()}
            assert states["lookup"][0] == "READY"
            assert states["broken"] == ("UNAVAILABLE", "not a model")
        finally:
            await server.stop(grace=1.0)

    run(main())


def test_status_reads_proc_in_a_thread_and_readiness_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []

    def memory(pid: int) -> int:
        readers.append(threading.current_thread())
        return 7

    monkeypatch.setattr(status_reporter, "private_memory", memory)

    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            assert server.ready() and server.model_ready("identity") and server.index() and server.metrics()
            assert readers == []
            status = await server.status()
            assert [worker.memory for worker in status.workers] == [7] * len(readers)
            assert readers and threading.current_thread() not in readers

    run(main())


def test_deadline_is_the_least_of_timeout_target_and_patience(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            answered: asyncio.Future[InferResponse | RequestError] = asyncio.get_running_loop().create_future()
            server.infer(InferRequest(model="identity", inputs=(floats(),), patience=1e-6), answered.set_result)
            assert isinstance(await answered, UnavailableError)
            # Patience beyond the target changes nothing: what cannot be done within the target is refused.
            late = InferRequest(model="identity", inputs=(floats(),), timeout=1e-6, patience=60.0)
            answered = asyncio.get_running_loop().create_future()
            server.infer(late, answered.set_result)
            assert isinstance(await answered, UnavailableError)

    run(main())


def test_load_after_interference_was_observed_plans_with_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models side by side, whose batches take half as long again as alone: 30 ms, as fake workers sleep."""
    monkeypatch.setattr(interference_observer, "MIN_BATCHES", 3)
    told: list[Sample] = []

    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
        told.extend(seen)
        return shared

    def partition(model: str) -> Partition:
        return Partition(share=500, placements=(Placement(model=model, batch=1, rate=10.0, duty=0.03, latency=0.03),))

    given = sample_deployment(repository(tmp_path))
    point = Point(share=500, batch=1, latency=0.02, memory=1)
    profiles = {(name, "cpu"): Profile(name, "cpu", [point]) for name in given.offered}
    plan = msgspec.structs.replace(
        given.plan, devices=(Device(id=DeviceId("cpu", 0), partitions=(partition("identity"), partition("lookup"))),)
    )
    problem = msgspec.structs.replace(given.problem, profiles=profiles)
    shared = msgspec.structs.replace(given, plan=plan, problem=problem)

    async def main() -> None:
        server = Server(shared, Fake(), prepare)
        await server.start()
        seen = server._observer.samples

        async def pump(model: str, tensor: Tensor) -> None:
            while {sample.victim.model for sample in seen()} != {"identity", "lookup"}:
                await ask(server, model, tensor)

        try:
            async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
                for _ in range(4):
                    tasks.create_task(pump("identity", floats()))
                    tasks.create_task(pump("lookup", indices(1)))
            await server.load("identity", {})
        finally:
            await server.drain(1.0)
            await server.stop(1.0)

    run(main())
    found = {sample.victim.model: sample for sample in told}
    assert found["identity"].colocated == (Load("lookup", "cpu", 1, 500),)
    assert found["lookup"].colocated == (Load("identity", "cpu", 1, 500),)
    assert all(sample.alone == pytest.approx(0.02) and sample.slowdown >= 1.5 for sample in told)


def test_metrics_address_serves_metrics_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path)) as server:
            http = HttpServer(server, only_metrics=True)
            address = f"127.0.0.1:{await http.listen('127.0.0.1', 0)}"
            try:
                assert b"cotenant_backend_info" in await asyncio.to_thread(fetch, address, "/metrics")
                with pytest.raises(ConfigError, match="404"):
                    await asyncio.to_thread(fetch, address, "/v2/models/identity")
            finally:
                await http.stop(1.0)

    run(main())
