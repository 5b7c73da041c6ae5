"""Measure what a request costs the server's own process: from the socket of its caller to a worker's, and back.

The real front end, dispatcher and driver answer requests over loopback, with threads in the place of a caller and of a
worker; only the processor time of the event loop counts. One request at a time is the dearest way: where several arrive
in one round of the loop, as under load, each costs down to half as much. It takes some 30 ms.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Sequence
from typing import cast

import msgspec
import uvloop

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.tensor import ModelInfo, TensorSpec
from cotenant.errors import RequestError
from cotenant.live.batch_tensors import tensor_of
from cotenant.live.driver import Driver, Tensors
from cotenant.live.http import HttpServer
from cotenant.live.http.load_shedding import Admission
from cotenant.live.oip import Core, Done, InferRequest, InferResponse
from cotenant.live.process import WorkerConnection, WorkerProcess
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Applied, LaneModel, LaneSpec, Ready, Reply
from cotenant.worker.wire import BatchResult, Inbox, RunBatch, TensorPart, Timing, encode_message

REQUESTS = (20, 60, 60, 60)  # one after the other; the first are to warm up, and of the others the cheapest count
ROWS = 16  # numbers in a request
PATIENCE = 5.0  # seconds for each of these

MODEL = ModelInfo(
    name="m",
    version="1",
    platform="onnxruntime_onnx",
    inputs=(TensorSpec("x", "FP32", (-1, ROWS)),),
    outputs=(TensorSpec("x", "FP32", (-1, ROWS)),),
    max_batch_size=1,
)
LANE = LaneId(DeviceId("cpu", 0), 0)
_BODY = msgspec.json.encode({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, ROWS], "data": [0.5] * ROWS}]})
_REQUEST = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)


def measure_front_end() -> float | None:
    """Return the seconds of a processor that a small request over HTTP takes of the server's process; None where that
    cannot be measured. For a thread that has no event loop."""
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(_measure())
    except (OSError, TimeoutError):
        return None
    finally:
        loop.close()


async def _measure() -> float:
    core = _Core()
    server = HttpServer(cast(Core, core))
    port = await server.listen("127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as caller:
            costs = [await _cost(caller, count) for count in REQUESTS]
    finally:
        await server.stop(0.0)
        core.stop()
    return min(costs[1:])


async def _cost(caller: socket.socket, count: int) -> float:
    """Return the processor seconds of this thread for each request, while another sends them."""
    used = time.thread_time()
    await asyncio.wait_for(asyncio.to_thread(_call, caller, count), PATIENCE)
    return (time.thread_time() - used) / count


def _call(caller: socket.socket, count: int) -> None:
    for _ in range(count):
        caller.sendall(_REQUEST)
        if not caller.recv(1 << 16).startswith(b"HTTP/1.1 200"):
            raise OSError("the front end did not answer")


class _Core(Admission):
    """What the HTTP front end needs of a server to infer, with one lane and a stand-in for its worker."""

    shortest_target = 0.0  # there is none

    def __init__(self) -> None:
        self._worker, theirs = socket.socketpair()
        self.lines: set[WorkerConnection] = set()
        self._connection = WorkerConnection(cast(WorkerProcess, self), answered=self._answered)
        self._driver = Driver(
            Dispatcher(), self._run, _Nobody(), clock=time.monotonic, drained=lambda _: None, rounding=0.0
        )
        model = LaneModel(model=MODEL.name, latencies=(1e-4,))
        self._driver.tell(Applied((LaneSpec(id=LANE, models=(model,)),)))
        self._driver.tell(Ready(LANE))
        self._thread = threading.Thread(target=_work, args=(theirs,), daemon=True)
        self._thread.start()

    def connect(self) -> socket.socket:
        """Return the server's end of the socket to the stand-in."""
        return self._worker

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._worker.fileno())
        self._worker.close()
        self._thread.join(PATIENCE)

    def model(self, name: str, version: str = "") -> ModelInfo:
        return MODEL

    def allocate(self, size: int) -> None:
        return None

    def would_reject(self, model: str, version: str, lost: float) -> bool:
        return False

    def poll(self) -> None:
        """Leave the stand-in's answers to the event loop."""

    def cancel(self, handle: int) -> None:
        self._driver.cancel(handle)

    def infer(self, request: InferRequest, done: Done, *, lost: float = 0.0) -> int:
        def answered(result: Tensors | RequestError) -> None:
            if isinstance(result, RequestError):
                done(result)
            else:
                done(InferResponse(model=MODEL.name, version=MODEL.version, id=request.id, outputs=result))

        return self._driver.submit(MODEL.name, request.inputs, answered, within=PATIENCE)

    def _run(self, lane: LaneId, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        parts = [
            [TensorPart(each.name, each.datatype, each.shape, cast(memoryview, each.data)) for each in payload]
            for payload in payloads
        ]
        self._connection.send(RunBatch(batch, model, parts))

    def _answered(self, line: WorkerConnection, answer: BatchResult, size: int) -> None:
        answers = [
            tuple([tensor_of(part, None) for part in parts if not isinstance(part, str)]) for parts in answer.requests
        ]
        self._driver.finished(LANE, answer.batch, answers, answer.timing)


class _Nobody:
    """Observe nothing."""

    def ended(self, reply: Reply, now: float) -> None: ...

    def ran(self, lane: LaneId, model: str, rows: int, since: float, ended: float, timing: Timing) -> None: ...


def _work(connection: socket.socket) -> None:
    """Answer batches with their inputs, in a thread, until the other end is closed."""
    inbox, decoder = Inbox(connection), msgspec.msgpack.Decoder(RunBatch)
    with connection:
        while inbox.fill():
            while (data := inbox.take()) is not None:
                batch = decoder.decode(data)
                answer = BatchResult(batch.batch, list(batch.requests), Timing(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
                connection.sendall(encode_message(answer))
