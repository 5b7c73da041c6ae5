"""The gRPC front end: Triton's codes, both dialects of load, callers that leave, health and reflection."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cotenant.core.tensor import DTYPES
from cotenant.errors import ConfigError, InvalidError
from cotenant.live.grpc import GrpcServer, health
from cotenant.live.grpc.tensors import _CONTENTS, _MANY, _contents
from cotenant.protocol import messages
from tests.live.stub import Running, StubCore

SERVICE = "/inference.GRPCInferenceService/"
ONE = np.array([[1, 2]], np.float32).tobytes()


@pytest.fixture
def call(front: Running) -> Iterator[Callable[..., Any]]:
    with grpc.insecure_channel(front.rpc) as channel:

        def ask(method: str, timeout: float | None = 5, **fields: Any) -> Any:
            request, response = getattr(messages, f"{method}Request"), getattr(messages, f"{method}Response")
            stub = channel.unary_unary(SERVICE + method, request.SerializeToString, response.FromString)
            return stub(request(**fields), timeout=timeout)

        yield ask


def tensor(**fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [1, 2]} | fields


def test_infer_with_raw_or_typed_contents_answers_raw(call: Callable[..., Any]) -> None:
    raw = call("ModelInfer", model_name="identity", id="7", inputs=[tensor()], raw_input_contents=[ONE])
    typed = call("ModelInfer", model_name="identity", inputs=[tensor(contents={"fp32_contents": [1, 2]})])
    assert (raw.model_version, raw.id, raw.outputs[0].name, raw.outputs[0].shape) == ("1", "7", "y", [1, 2])
    assert list(raw.raw_output_contents) == list(typed.raw_output_contents) == [ONE]


@pytest.mark.parametrize(
    ("name", "field", "items", "raw"),
    [
        ("bool", "bool_contents", [True, False], b"\1\0"),
        ("int8", "int_contents", [-1, 2], b"\xff\2"),
        ("uint64", "uint64_contents", [1, 2], (1).to_bytes(8, "little") + (2).to_bytes(8, "little")),
        ("bytes", "bytes_contents", [b"a", b""], b"\1\0\0\0a\0\0\0\0"),
    ],
)
def test_typed_contents_of_each_datatype_are_read_or_rejected(
    call: Callable[..., Any], name: str, field: str, items: list[Any], raw: bytes
) -> None:
    asked = tensor(datatype=name.upper(), contents={field: items})
    assert list(call("ModelInfer", model_name=name, inputs=[asked]).raw_output_contents) == [raw]


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name not in ("FP16", "BF16")])
@pytest.mark.parametrize("count", [_MANY - 1, _MANY, 3 * _MANY])
def test_many_typed_contents_are_read_as_few_are(datatype: str, count: int) -> None:
    rng, dtype = np.random.default_rng(count), DTYPES[datatype]
    if dtype.kind in "iu":
        values = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, count, dtype, endpoint=True)
        values[:2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    else:
        values = (rng.standard_normal(count) * 1e3).astype(dtype)
    asked = messages.ModelInferRequest().inputs.add(datatype=datatype)
    getattr(asked.contents, _CONTENTS[datatype]).extend(values.tolist())
    assert _contents(asked, count) == values.tobytes()
    asked.contents.fp32_contents.extend([0.5] * (datatype != "FP32"))  # which is not read
    asked.contents.bool_contents.extend([True] * (datatype != "BOOL"))
    assert _contents(asked, count) == values.tobytes()


@pytest.mark.parametrize(
    ("datatype", "values"), [("INT8", [-129]), ("INT16", [1 << 15]), ("UINT8", [256]), ("UINT16", [1 << 16])]
)
def test_one_of_many_typed_contents_that_does_not_fit_is_rejected(datatype: str, values: list[int]) -> None:
    asked = messages.ModelInferRequest().inputs.add(name="x", datatype=datatype)
    getattr(asked.contents, _CONTENTS[datatype]).extend([1] * _MANY + values)
    with pytest.raises(InvalidError, match=rf"^input 'x': u?int_contents does not fit {datatype}: "):
        _contents(asked, 2 * _MANY)


def infer(
    model: str = "identity", given: dict[str, Any] | None = None, raw: bytes = ONE, **more: Any
) -> dict[str, Any]:
    return {"model_name": model, "inputs": [tensor(**(given or {}))], "raw_input_contents": [raw] if raw else []} | more


@pytest.mark.parametrize(
    ("method", "fields", "code"),
    [
        ("ModelMetadata", {"name": "nope"}, "NOT_FOUND"),
        ("ModelInfer", infer("nope"), "NOT_FOUND"),
        ("ModelInfer", infer(model_version="9"), "NOT_FOUND"),
        ("ModelInfer", infer(model_version="abc"), "INVALID_ARGUMENT"),
        ("ModelInfer", infer(given={"name": "zz"}), "INVALID_ARGUMENT"),
        ("ModelInfer", infer(given={"datatype": "INT32"}), "INVALID_ARGUMENT"),
        ("ModelInfer", infer(given={"datatype": "FP31"}), "INVALID_ARGUMENT"),
        ("ModelInfer", infer(given={"datatype": "FP31"}, raw=b""), "INVALID_ARGUMENT"),
        ("ModelInfer", infer("fp16", given={"datatype": "FP16"}, raw=b""), "INVALID_ARGUMENT"),
        ("ModelInfer", infer(given={"shape": [1, 5]}), "INVALID_ARGUMENT"),
        ("ModelInfer", infer(given={"shape": [-1, -2]}), "INVALID_ARGUMENT"),
        ("ModelInfer", infer(given={"contents": {"fp32_contents": [1, 2]}}), "INVALID_ARGUMENT"),
        ("ModelInfer", infer(raw_input_contents=[ONE, ONE]), "INVALID_ARGUMENT"),
        (
            "ModelInfer",
            infer("int8", {"datatype": "INT8", "contents": {"int_contents": [1, 200]}}, raw=b""),
            "INVALID_ARGUMENT",
        ),
        ("ModelInfer", infer("bytes", {"datatype": "BYTES"}, raw=b"\x09\0\0\0a"), "INVALID_ARGUMENT"),
        ("ModelInfer", infer(parameters={"priority": {"string_param": "1"}}), "INVALID_ARGUMENT"),
        ("ModelInfer", infer(parameters={"triton_x": {"bool_param": True}}), "INVALID_ARGUMENT"),
        ("ModelInfer", infer(outputs=[{"name": "nope"}]), "INVALID_ARGUMENT"),
        (
            "ModelInfer",
            infer(outputs=[{"name": "y", "parameters": {"shared_memory_region": {"string_param": "r"}}}]),
            "UNIMPLEMENTED",
        ),
        ("ModelInfer", infer("refused"), "UNAVAILABLE"),
        ("ModelInfer", infer("broken"), "INTERNAL"),
        ("RepositoryModelLoad", {"model_name": "nope"}, "INTERNAL"),
        ("RepositoryModelLoad", {"repository_name": "r", "model_name": "flat"}, "UNIMPLEMENTED"),
        ("RepositoryIndex", {"repository_name": "r"}, "UNIMPLEMENTED"),
    ],
)
def test_call_of_each_kind_gets_the_status_code_of_triton(
    call: Callable[..., Any], method: str, fields: dict[str, Any], code: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(method, **fields)
    assert caught.value.code().name == code
    assert caught.value.details()


def test_bytes_that_are_not_the_message_are_an_invalid_argument(front: Running) -> None:
    with grpc.insecure_channel(front.rpc) as channel:
        for method in ("ModelInfer", "ModelConfig"):
            raw: Any = channel.unary_unary(SERVICE + method)
            with pytest.raises(grpc.RpcError) as caught:
                raw(b"\xff garbage", timeout=5)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stream: Any = channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        (answer,) = map(messages.ModelStreamInferResponse.FromString, stream(iter([b"\xff garbage"]), timeout=5))
        assert answer.error_message == "not the message inference.ModelInferRequest"


def test_priority_and_timeout_may_be_of_either_integer_type(front: Running, call: Callable[..., Any]) -> None:
    call("ModelInfer", **infer(parameters={"priority": {"uint64_param": 3}, "timeout": {"int64_param": 9}}))
    assert front.core.requests[-1].priority == 2
    assert front.core.requests[-1].timeout == pytest.approx(9e-6)


def test_deadline_of_the_call_becomes_the_patience_of_the_request(front: Running, call: Callable[..., Any]) -> None:
    call("ModelInfer", timeout=3, **infer(parameters={"timeout": {"int64_param": 9_000_000}}))
    asked = front.core.requests[-1]
    assert asked.timeout == pytest.approx(9.0)
    assert asked.patience is not None
    assert 0 < asked.patience <= 3.01  # gRPC writes seconds in steps of 10 ms, rounded up


def test_load_in_the_dialect_of_kserve_names_the_model(call: Callable[..., Any]) -> None:
    """It has the name of the model in the field where Triton has the repository's."""
    answer = call("RepositoryModelUnload", repository_name="flat")
    assert (answer.model_name, answer.isUnloaded) == ("flat", True)
    assert not call("ModelReady", name="flat").ready
    answer = call("RepositoryModelLoad", repository_name="flat")
    assert (answer.model_name, answer.isLoaded) == ("flat", True)
    assert call("ModelReady", name="flat").ready


def test_call_that_is_cancelled_or_late_cancels_its_request(front: Running) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(front.rpc) as channel:
            stub = channel.unary_unary(
                f"{SERVICE}ModelInfer",
                messages.ModelInferRequest.SerializeToString,
                messages.ModelInferResponse.FromString,
            )
            before = len(front.core.cancelled)
            request = messages.ModelInferRequest(**infer("held"))
            answer = stub(request)
            while not front.call(lambda: front.core.held):
                await asyncio.sleep(0.001)
            answer.cancel()
            with pytest.raises(grpc.RpcError) as caught:
                await stub(request, timeout=0.05)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            while front.call(lambda: front.core.held):
                await asyncio.sleep(0.001)
            assert len(front.core.cancelled) == before + 2

    asyncio.run(run())


def test_stream_that_breaks_off_cancels_its_requests(front: Running) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(front.rpc) as channel:
            stub = channel.stream_stream(
                f"{SERVICE}ModelStreamInfer",
                messages.ModelInferRequest.SerializeToString,
                messages.ModelStreamInferResponse.FromString,
            )
            before = len(front.core.cancelled)
            stream = stub()
            for model in ("held", "held", "nope"):
                await stream.write(messages.ModelInferRequest(**infer(model)))
            while front.call(lambda: len(front.core.held)) < 2:
                await asyncio.sleep(0.001)
            stream.cancel()
            while front.call(lambda: front.core.held):
                await asyncio.sleep(0.001)
            assert len(front.core.cancelled) == before + 2

    asyncio.run(run())


def test_stream_gets_responses_in_order(front: Running) -> None:
    async def run() -> list[str]:
        async with grpc.aio.insecure_channel(front.rpc) as channel:
            stub = channel.stream_stream(
                f"{SERVICE}ModelStreamInfer",
                messages.ModelInferRequest.SerializeToString,
                messages.ModelStreamInferResponse.FromString,
            )
            stream = stub()
            for number, model in enumerate(("held", "identity", "held")):
                await stream.write(messages.ModelInferRequest(**infer(model, id=str(number))))
            await stream.done_writing()
            while front.call(lambda: len(front.core.held)) < 2:
                await asyncio.sleep(0.001)
            front.call(lambda: front.core.release(order=lambda handles: sorted(handles, reverse=True)))
            return [answer.infer_response.id async for answer in stream]

    assert asyncio.run(run()) == ["0", "1", "2"]


def test_health_check_ready_or_not_gives_the_status_of_each_service(front: Running) -> None:
    with grpc.insecure_channel(front.rpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "inference.GRPCInferenceService"):
            assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == 1
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="nope"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        front.core.is_ready = False
        try:
            assert stub.Check(health_pb2.HealthCheckRequest()).status == 2
        finally:
            front.core.is_ready = True


def test_health_watch_change_of_readiness_reaches_watchers_after_another_has_left(
    front: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WATCH_INTERVAL", 0.01)
    with grpc.insecure_channel(front.rpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stays, leaves = stub.Watch(health_pb2.HealthCheckRequest()), stub.Watch(health_pb2.HealthCheckRequest())
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nope"))
        assert (next(stays).status, next(leaves).status, next(unknown).status) == (1, 1, 3)
        leaves.cancel()
        front.core.is_ready = False
        try:
            assert next(stays).status == 2
        finally:
            front.core.is_ready = True
        assert next(stays).status == 1


def test_reflection_lists_services_and_describes_their_messages(front: Running) -> None:
    with grpc.insecure_channel(front.rpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) == {
            "inference.GRPCInferenceService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName("inference.GRPCInferenceService").methods_by_name["ModelReady"]
        request = message_factory.GetMessageClass(method.input_type)(name="identity")
        ready = channel.unary_unary(
            f"{SERVICE}ModelReady",
            request_serializer=type(request).SerializeToString,
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        assert str(ready(request)) == "ready: true\n"
        assert pool.FindServiceByName("grpc.health.v1.Health").methods_by_name["Watch"].server_streaming


def test_grpc_server_port_in_use_raises(front: Running) -> None:
    async def run() -> None:
        host, _, port = front.rpc.rpartition(":")
        with pytest.raises(
            ConfigError, match=rf"^cannot serve gRPC on {front.rpc}: Address already in use; choose another"
        ):
            await GrpcServer(StubCore()).listen(host, int(port))

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(1, 5))
def test_grpc_server_cancelled_while_it_starts_is_stopped(turns: int) -> None:
    """Else gRPC would look for its event loop when that is long closed."""

    async def run() -> asyncio.Task[int]:
        core = StubCore()
        server = GrpcServer(core)
        listening = asyncio.create_task(server.listen("127.0.0.1", 0))
        for _ in range(turns):
            await asyncio.sleep(0)
        listening.cancel()
        await asyncio.wait([listening])
        await server.stop(0.0)
        core.arena.close()
        return listening

    listening = asyncio.run(run())  # which holds what its frames did
    assert listening.done()
    del listening
    gc.collect()
