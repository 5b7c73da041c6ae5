"""Requests with more rows than the planned batch, through the stock clients, whatever happens to the plan."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from cotenant.backends.cpu import Cpu
from cotenant.control.event_log import replay
from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement
from cotenant.core.request import Request
from cotenant.core.tensor import Tensor
from cotenant.errors import FailedError, RequestError
from cotenant.live.deployment import Deployment
from cotenant.live.grpc import GrpcServer
from cotenant.live.http import HttpServer
from cotenant.live.oip import InferRequest, InferResponse
from cotenant.live.server import Server
from cotenant.live.split_tensors import SplitTensors
from cotenant.predictors.samples import Sample
from tests.live.deployment import repository, sample_deployment
from tests.live.test_server import ask, floats, run, until

OWN = 32  # rows that the model takes in one request
BATCH = 3  # of the first plan
SIZES = (1, 3, BATCH + 1, 10 * BATCH)


def planned(given: Deployment, *placed: tuple[int, int]) -> Deployment:
    """Model `identity` on a partition of each (share, largest batch)."""
    partitions = tuple(
        Partition(
            share=share, placements=(Placement(model="identity", batch=batch, rate=1.0, duty=0.01, latency=0.01),)
        )
        for share, batch in placed
    )
    plan = msgspec.structs.replace(given.plan, devices=(Device(id=DeviceId("cpu"), partitions=partitions),))
    return msgspec.structs.replace(given, plan=plan)


@asynccontextmanager
async def served(root: Path, *placed: tuple[int, int], log: io.BytesIO | None = None) -> AsyncIterator[Any]:
    """A server with front ends: itself, its deployment, and the addresses of HTTP and gRPC."""

    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
        raise FailedError("nothing else is to be served")

    given = sample_deployment(repository(root), ("identity", "lookup"))
    server = Server(planned(given, *placed), Cpu(), prepare, log=log)
    http, rpc = HttpServer(server, page=server.page, status=server.status), GrpcServer(server)
    try:
        await server.start()
        ports = await http.listen("127.0.0.1", 0), await rpc.listen("127.0.0.1", 0)
        yield server, given, *(f"127.0.0.1:{port}" for port in ports)
    finally:
        await http.stop(1.0)
        await rpc.stop(1.0)
        await server.drain(1.0)
        await server.stop(1.0)


def asker(module: Any, address: str, binary: bool) -> tuple[Any, Callable[[int], None]]:
    """A client, and what asks with so many rows and compares the answer."""
    client = module.InferenceServerClient(address)
    form = {"binary_data": binary} if module is triton_http else {}

    def ask(rows: int) -> None:
        x = np.random.default_rng(rows).random((rows, 16)).astype(np.float32)
        given = module.InferInput("x", x.shape, "FP32")
        given.set_data_from_numpy(x, **form)
        result = client.infer("identity", [given], outputs=[module.InferRequestedOutput("y", **form)])
        np.testing.assert_array_equal(result.as_numpy("y"), x)

    return client, ask


def own_limit(client: Any) -> int:
    config = client.get_model_config("identity")
    return int(config["max_batch_size"] if isinstance(config, dict) else config.config.max_batch_size)


@pytest.mark.parametrize("changed", [((500, 2),), ((200, 1), (200, 2), (200, 8))], ids=["smaller", "others"])
@pytest.mark.parametrize("kind", ["json", "binary", "grpc"])
def test_requests_of_any_size_are_answered_before_during_and_after_a_change_of_plan(
    tmp_path: Path, kind: str, changed: tuple[tuple[int, int], ...]
) -> None:
    log = io.BytesIO()

    async def main() -> None:
        async with served(tmp_path, (400, BATCH), log=log) as (server, given, http, rpc):
            module, address = (triton_grpc, rpc) if kind == "grpc" else (triton_http, http)
            client, ask = asker(module, address, kind == "binary")
            asked, stop = 0, threading.Event()

            def once() -> None:
                nonlocal asked
                for size in SIZES:
                    ask(size)
                    asked += 1

            def keep_asking() -> None:
                _, again = asker(module, address, kind == "binary")
                nonlocal asked
                while not stop.is_set():
                    for size in SIZES:
                        again(size)
                        asked += 1

            # The HTTP client's connections belong to the thread that opened them.
            in_thread = partial(asyncio.get_running_loop().run_in_executor, ThreadPoolExecutor(1))
            assert await in_thread(own_limit, client) == OWN
            await in_thread(once)
            during = asyncio.create_task(asyncio.to_thread(keep_asking))
            await until(lambda: asked > 2 * len(SIZES))
            await server.apply(planned(given, *changed))
            seen = asked
            await until(lambda: asked > seen + 2 * len(SIZES))
            stop.set()
            await during
            assert await in_thread(own_limit, client) == OWN
            await in_thread(once)
            (counts,) = server.statistics("identity")
            assert counts["inference_stats"]["success"]["count"] == asked, "each is counted once"
            assert counts["inference_stats"]["fail"]["count"] == 0
            assert counts["inference_count"] > asked
            largest = max(BATCH, *(batch for _, batch in changed))
            assert max(batch["batch_size"] for batch in counts["batch_stats"]) <= largest
            with pytest.raises(InferenceServerException, match=f"takes 1 to {OWN} in one request"):
                await in_thread(ask, OWN + 1)
            client.close()

    run(main())
    replayed = replay(log.getvalue().splitlines())
    assert replayed.difference == "" and replayed.events > 0
    assert {outcome for _, outcome in replayed.outcomes} == {"served"}


def test_killed_worker_costs_a_large_request_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path, (300, 2), (300, 3)) as (server, _, _, _):
            worker = server._rollouts.workers()[0]
            os.kill(worker.pid, signal.SIGKILL)
            answers = await asyncio.gather(*(ask(server, "identity", floats(OWN)) for _ in range(4)))
            for answer in answers:
                assert isinstance(answer, InferResponse)
                np.testing.assert_array_equal(answer.outputs[0].array(), floats(OWN).array())

    run(main())


def test_caller_of_a_large_request_that_leaves_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path, (50, 1)) as (server, _, _, _):
            gone: list[InferResponse | RequestError] = []
            server.cancel(server.infer(InferRequest(model="identity", inputs=(floats(OWN),)), gone.append))
            assert isinstance(await ask(server, "identity", floats(2)), InferResponse)
            (error,) = gone
            assert "cancelled: the caller left" in str(error)
            driver = server._driver
            assert (driver.in_flight, driver._callers, driver._split, driver._split_of) == (0, {}, {}, {})

    run(main())


def part(number: int, size: int) -> Request:
    return Request(number, "m", 0.0, 1.0, size)


def rows(*values: int) -> tuple[Tensor, ...]:
    return (Tensor("x", "UINT8", (len(values),), bytes(values)),)


def test_parts_that_were_split_again_keep_their_place() -> None:
    split = SplitTensors(1)
    first, second = split.split(1, rows(1, 2, 3, 4, 5), [part(-1, 3), part(-2, 2)])
    assert [bytes(tensor.data) for (tensor,) in (first, second)] == [b"\1\2\3", b"\4\5"]
    third, fourth = split.split(-1, first, [part(-3, 1), part(-4, 2)])
    assert split.take(-2, second) is None
    assert split.take(-4, fourth) is None
    assert split.take(-4, fourth) is None, "a part that was retried may come twice"
    assert split.take(-3, third) == rows(1, 2, 3, 4, 5)


def test_answer_of_a_part_that_was_split_later_does_not_count() -> None:
    """Its lane died before the dispatcher heard of the answer, and it is retried in smaller batches."""
    split = SplitTensors(1)
    first, second = split.split(1, rows(1, 2, 3), [part(-1, 2), part(-2, 1)])
    split.take(-1, rows(9, 9))
    third, fourth = split.split(-1, first, [part(-3, 1), part(-4, 1)])
    assert split.take(-3, third) is None
    assert split.take(-2, second) is None
    assert split.take(-4, fourth) == rows(1, 2, 3)


def test_part_whose_outputs_have_other_rows_fails() -> None:
    split = SplitTensors(1)
    split.split(1, rows(1, 2, 3), [part(-1, 2), part(-2, 1)])
    with pytest.raises(FailedError, match=r"output 'x' has the shape \[3\] for 2 rows"):
        split.take(-1, rows(1, 2, 3))
