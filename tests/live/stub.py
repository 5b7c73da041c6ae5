"""A core without workers: it answers in process. For tests of the front ends, and to measure what they cost alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvloop

from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome, Request
from cotenant.core.tensor import ModelInfo, Tensor, TensorSpec
from cotenant.errors import CancelledError, FailedError, ModelError, NotFoundError, RequestError, UnavailableError
from cotenant.live.grpc import GrpcServer
from cotenant.live.http import HttpServer
from cotenant.live.metrics import LaneReading, ServerCollector
from cotenant.live.oip import Done, IndexEntry, InferRequest, InferResponse
from cotenant.live.partition_labels import PartitionLabel
from cotenant.live.shared_memory import SharedMemory
from cotenant.live.statistics import ModelCounts
from cotenant.runtime.events import Reply
from cotenant.worker.arena import Arena, Block
from cotenant.worker.wire import Timing

PARTITION = PartitionLabel("cpu-0", "0")


def _identity(name: str, datatype: str, shape: tuple[int, ...] = (-1, -1), rows: int = 64) -> ModelInfo:
    return ModelInfo(
        name=name,
        version="1",
        platform="onnxruntime_onnx",
        inputs=(TensorSpec("x", datatype, shape),),
        outputs=(TensorSpec("y", datatype, shape),),
        max_batch_size=rows,
    )


class StubCore:
    """Each model answers its inputs, in order, as its outputs, but `held`, which waits for `release`, and those named
    for how they end. Of the requests of the last, `cancelled` lists the handles. unread: requests that were rejected
    unread, and how long they had waited; lost: what the others had lost of their targets."""

    def __init__(self) -> None:
        infos = [
            _identity("identity", "FP32"),
            _identity("held", "FP32"),
            _identity("refused", "FP32"),
            _identity("broken", "FP32"),
            *(
                _identity(datatype.lower(), datatype)
                for datatype in ("BYTES", "FP16", "BF16", "BOOL", "INT8", "UINT64")
            ),
            _identity("flat", "FP32", (4,), rows=0),
            ModelInfo(
                name="pair",
                version="1",
                platform="onnxruntime_onnx",
                inputs=(TensorSpec("a", "INT64", (-1, 2)), TensorSpec("b", "FP64", (-1, 3))),
                outputs=(TensorSpec("c", "INT64", (-1, 2)), TensorSpec("d", "FP64", (-1, 3))),
                max_batch_size=8,
            ),
        ]
        self.shared_memory = SharedMemory()
        self.models = {info.name: info for info in infos}
        self.unloaded: set[str] = set()
        self.arena = Arena(64 << 20, beyond=64 << 20)
        self.blocks = 0
        self.requests: list[InferRequest] = []
        self.held: dict[int, tuple[InferRequest, Done]] = {}
        self.cancelled: list[int] = []
        self.handles = 0
        self.counts = {name: ModelCounts(name, "1") for name in self.models}
        self.log = {"log_file": "", "log_info": True, "log_verbose_level": 0, "log_format": "default"}
        self.trace: dict[str, Any] = {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1"}
        self.is_ready = True
        self.full: set[str] = set()  # models that have no time for another request
        self.unread: list[tuple[str, float]] = []
        self.lost: list[float] = []
        self.rooms: dict[str, tuple[int, float]] = {}
        self.changed: list[Callable[[], None]] = []  # called when the models change

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return self.is_ready

    def model(self, name: str, version: str = "") -> ModelInfo:
        info = self.models.get(name)
        if info is None or name in self.unloaded:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        if version not in ("", info.version):
            raise NotFoundError(f"Request for unknown model: '{name}' version {version} is not found")
        return info

    def model_ready(self, name: str, version: str = "") -> bool:
        return name in self.models and name not in self.unloaded and version in ("", "1")

    def config(self, name: str, version: str = "") -> dict[str, Any]:
        info = self.model(name, version)
        kinds = {"BYTES": "STRING"}
        return {
            "name": name,
            "platform": info.platform,
            "max_batch_size": info.max_batch_size,
            "version_policy": {"latest": {"num_versions": 1}},
            "input": [
                {"name": spec.name, "data_type": f"TYPE_{kinds.get(spec.datatype, spec.datatype)}", "dims": [-1]}
                for spec in info.inputs
            ],
            "dynamic_batching": {"preferred_batch_size": [64], "priority_queue_policy": {}},
            "instance_group": [{"name": f"{name}_0", "kind": "KIND_CPU", "count": 1}],
            "parameters": {"slo": {"string_value": "50ms"}},
        }

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        if name:
            self.model(name, version)
        return [counts.to_json(1.7e9) for counts in self.counts.values() if name in ("", counts.name)]

    def index(self, *, ready: bool = False) -> list[IndexEntry]:
        entries = [
            IndexEntry(name=name, version="1", state="UNAVAILABLE" if name in self.unloaded else "READY")
            for name in self.models
        ]
        return [entry for entry in entries if not ready or entry.state == "READY"]

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        await asyncio.sleep(0)
        if name not in self.models:
            raise ModelError(f"failed to load '{name}': the repository has no such model")
        self.unloaded.discard(name)
        self._change()

    async def unload(self, name: str, parameters: Mapping[str, Any]) -> None:
        await asyncio.sleep(0)
        self.unloaded.add(name)
        self._change()

    def _change(self) -> None:
        for changed in self.changed:
            changed()

    def trace_setting(self, model: str = "", update: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self.trace |= update or {}
        return self.trace

    def log_settings(self, update: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self.log |= update or {}
        return self.log

    def metrics(self) -> ServerCollector:
        reading = LaneReading(
            lane=LaneId.parse("cpu-0/0"), partition=PARTITION, up=True, share=500, waiting={"identity": 2}
        )
        return ServerCollector(self.counts.values(), [reading], backend="stub", isolation="nothing")

    def allocate(self, size: int) -> Block | None:
        self.blocks += 1
        return self.arena.allocate(size)

    @property
    def shortest_target(self) -> float:
        return 0.0

    def would_reject(self, model: str, version: str, lost: float) -> bool:
        return model in self.full

    def room(self, model: str) -> tuple[int, float]:
        return self.rooms.get(model, (-1, 0.0))

    def watch_models(self, changed: Callable[[], None]) -> None:
        self.changed.append(changed)

    def poll(self) -> None:
        """Do nothing: there are no workers."""

    def reject_unread(self, model: str, waited: float) -> None:
        self.unread.append((model, waited))

    def infer(self, request: InferRequest, done: Done, *, lost: float = 0.0) -> int:
        self.handles += 1
        self.lost.append(lost)
        self.requests.append(request)
        if request.model == "held":
            self.held[self.handles] = request, done
        elif request.model == "refused":
            done(UnavailableError("refused: it could not be answered in time", retry_after=1.2))
        elif request.model == "broken":
            done(FailedError("the model failed"))
        else:
            done(self._answer(request))
        return self.handles

    def cancel(self, handle: int) -> None:
        self.cancelled.append(handle)
        if handle in self.held:
            self.held.pop(handle)[1](CancelledError("the caller left"))

    def release(self, order: Callable[[list[int]], list[int]] = list) -> None:
        """Answer what is held, in that order of handles."""
        for handle in order(list(self.held)):
            request, done = self.held.pop(handle)
            done(self._answer(request))

    def _answer(self, request: InferRequest) -> InferResponse | RequestError:
        info = self.models[request.model]
        outputs = tuple(
            Tensor(spec.name, tensor.datatype, tensor.shape, tensor.data)
            for spec, tensor in zip(info.outputs, request.inputs, strict=True)
        )
        self._count(request)
        return InferResponse(model=request.model, version="1", id=request.id, outputs=outputs)

    def _count(self, request: InferRequest) -> None:
        """As if it had taken 1 ms in the queue and 3 in a batch of its own."""
        counts = self.counts[request.model]
        timing = Timing(started=9.0, gather=0.0005, infer=0.002, scatter=0.0005, pause=0, cpu=0)
        counts.ran(LaneId.parse("cpu-0/0"), PARTITION, 1, 0.002, 0.003, timing, alone=0.002)
        ended = (Request(1, request.model, 9.0, 9.05),)
        counts.ended(Reply(ended, Outcome.SERVED, lane=LaneId.parse("cpu-0/0"), batch=1, started=9.001), 9.004)


class Running:
    """Both front ends on a loop of their own, in a thread."""

    def __init__(self, core: StubCore) -> None:
        self.core = core
        self.loop = uvloop.new_event_loop()
        self.http = self.rpc = ""
        self.port = 0
        self.server: HttpServer
        self.thread = threading.Thread(target=self._run)
        self.started = threading.Event()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.stopping = asyncio.Event()
        self.server = HttpServer(self.core)
        rpc = GrpcServer(self.core)
        self.port = await self.server.listen("127.0.0.1", 0)
        self.http = f"127.0.0.1:{self.port}"
        self.rpc = f"127.0.0.1:{await rpc.listen('127.0.0.1', 0)}"
        self.started.set()
        await self.stopping.wait()
        await self.server.stop(1.0)
        await rpc.stop(1.0)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the server's thread."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(5)


@contextmanager
def running() -> Iterator[Running]:
    served = Running(StubCore())
    served.thread.start()
    try:
        assert served.started.wait(10)
        yield served
    finally:
        served.loop.call_soon_threadsafe(served.stopping.set)
        served.thread.join(10)
        served.core.arena.close()
