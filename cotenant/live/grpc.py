"""The gRPC front end: Triton's GRPCInferenceService, with gRPC's health and reflection services."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import grpc
import grpc.aio
import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from cotenant.core.tensor import Tensor
from cotenant.errors import (
    CancelledError,
    ConfigError,
    CotenantError,
    FailedError,
    ForbiddenError,
    InvalidError,
    MalformedError,
    NotFoundError,
    RequestError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from cotenant.live.access import Access, Permission
from cotenant.live.grpc_access import METHODS, caller_of, permission_of
from cotenant.live.grpc_health import INFERENCE_SERVICE, add_health_and_reflection
from cotenant.live.limits import MAX_BODY, MAX_FIELDS, MAX_LISTED, MAX_RANK
from cotenant.live.oip import (
    FORMATS,
    UNEXPECTED,
    Core,
    Data,
    InferRequest,
    InferResponse,
    RequestedOutput,
    check_elements,
    check_request,
    check_size,
    model_metadata,
    pack_strings,
    public_message,
    requested_outputs,
    scheduling,
    server_metadata,
)
from cotenant.protocol import messages

logger = logging.getLogger(__name__)

_MESSAGE_SIZE = (1 << 31) - 1  # bytes; the largest that gRPC's setting allows
_MAX_STREAMED = 64  # requests of one stream that may wait for their responses

_CODES: dict[type[CotenantError], grpc.StatusCode] = {
    MalformedError: grpc.StatusCode.INVALID_ARGUMENT,
    InvalidError: grpc.StatusCode.INVALID_ARGUMENT,
    CancelledError: grpc.StatusCode.CANCELLED,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
}
# Datatype → field of InferTensorContents.
_CONTENTS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class GrpcServer:
    """Serve a core over gRPC. message_size: of the largest request, in bytes. access: who may do what. tls: None to
    serve in the clear."""

    def __init__(
        self,
        core: Core,
        *,
        message_size: int = MAX_BODY,
        access: Access | None = None,
        tls: grpc.ServerCredentials | None = None,
    ) -> None:
        self._access = access or Access()
        self._tls = tls
        self._infers_freely = self._access.is_free(Permission.INFER)
        self._core = core
        self._message_size = message_size
        self._server: grpc.aio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Start to serve; return the port (a free one for port 0). Raises ConfigError."""
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._message_size),
                ("grpc.max_send_message_length", _MESSAGE_SIZE),
                ("grpc.so_reuseport", 0),  # a second server on the same port is a mistake, not a worker process
            ]
        )
        server.add_generic_rpc_handlers((self._inference(),))
        add_health_and_reflection(server, self._core)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, self._tls)
        except RuntimeError:
            raise ConfigError(
                f"cannot serve gRPC on {address}; choose another address or port, or stop what holds it"
            ) from None
        self._server = server  # set now: a caller cancelled during the start has to stop it
        await server.start()
        return bound

    async def stop(self, grace: float) -> None:
        """Reject new calls, finish those in flight within `grace` seconds, then abort the rest."""
        if self._server is not None:
            await self._server.stop(grace)

    # The services

    def _inference(self) -> grpc.GenericRpcHandler:
        plain: dict[str, Callable[[Any], Any]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "SystemSharedMemoryStatus": self._shared_memory_status,
            "SystemSharedMemoryRegister": self._reject_registration,
            "SystemSharedMemoryUnregister": self._unregister,
            "CudaSharedMemoryStatus": self._shared_memory_status,
            "CudaSharedMemoryRegister": self._reject_registration,
            "CudaSharedMemoryUnregister": self._unregister,
            "TraceSetting": self._trace_setting,
            "LogSettings": self._log_settings,
        }
        handlers = {name: self._unary(name, method) for name, method in plain.items()}
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._infer)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        assert handlers.keys() == METHODS.keys()
        return grpc.method_handlers_generic_handler(INFERENCE_SERVICE, handlers)

    def _unary(self, name: str, method: Callable[[Any], Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of a method that returns its response's fields, or an awaitable of them."""
        request, response = getattr(messages, f"{name}Request"), getattr(messages, f"{name}Response")

        async def call(wire: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                message = _parse(request, wire)
                if not self._access.is_free(permission := permission_of(name, message)):
                    self._access.check(permission, caller_of(context))
                fields = method(message)
                return response(**(await fields if isinstance(fields, Awaitable) else fields))
            except Exception as error:  # noqa: BLE001  # `_expected` logs it
                return await _abort(context, _expected(error))

        return grpc.unary_unary_rpc_method_handler(call, response_serializer=response.SerializeToString)

    # Inference

    async def _infer(self, wire: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        try:
            if not self._infers_freely:
                self._access.check(Permission.INFER, caller_of(context))
            _check_fields(wire)
            return await self._submit(_parse(messages.ModelInferRequest, wire), context)
        except Exception as error:  # noqa: BLE001  # `_expected` logs it
            return await _abort(context, _expected(error))

    def _submit(self, message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> asyncio.Future[bytes]:
        """Submit a request; the future becomes its response in wire form, and cancelling it cancels the request. Raises
        RequestError's children."""
        _check_version(message.model_version)
        info = self._core.model(message.model_name, message.model_version)
        request = _read_request(message, info, context.time_remaining())
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def done(result: InferResponse | RequestError) -> None:
            if answer.done():
                return
            try:
                if isinstance(result, RequestError):
                    raise result
                answer.set_result(_write_response(request, result, requested_outputs(request, result, info)))
            except Exception as error:  # noqa: BLE001  # `_expected` logs it
                answer.set_exception(_expected(error))

        handle = self._core.infer(request, done)
        answer.add_done_callback(lambda settled: self._core.cancel(handle) if settled.cancelled() else None)
        return answer

    async def _stream(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        """Submit requests as they arrive, and respond in order."""
        if not self._infers_freely:
            try:
                self._access.check(Permission.INFER, caller_of(context))
            except RequestError as error:
                await _abort(context, error)
        waiting: asyncio.Queue[tuple[str, asyncio.Future[bytes]] | None] = asyncio.Queue()
        room = asyncio.Semaphore(_MAX_STREAMED)

        async def read() -> None:
            try:
                async for wire in requests:
                    await room.acquire()
                    request_id = ""
                    try:
                        _check_fields(wire)
                        message = _parse(messages.ModelInferRequest, wire)
                        request_id = message.id
                        answer = self._submit(message, context)
                    except Exception as error:  # noqa: BLE001  # `_expected` logs it
                        answer = asyncio.get_running_loop().create_future()
                        answer.set_exception(_expected(error))
                    waiting.put_nowait((request_id, answer))
            finally:
                waiting.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (item := await waiting.get()) is not None:
                request_id, answer = item
                try:
                    response = _field(2, await answer + _FINAL)  # infer_response
                except CotenantError as error:
                    response = messages.ModelStreamInferResponse(
                        error_message=public_message(error), infer_response={"id": request_id}
                    ).SerializeToString()
                room.release()
                yield response
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
            while not waiting.empty():
                if (item := waiting.get_nowait()) is not None and not item[1].cancel():
                    item[1].exception()  # nobody reads it, and asyncio would complain

    # The other methods. Each takes the message and returns the fields of its response.

    def _server_live(self, message: Any) -> Mapping[str, Any]:
        return {"live": self._core.live()}

    def _server_ready(self, message: Any) -> Mapping[str, Any]:
        return {"ready": self._core.ready()}

    def _model_ready(self, message: Any) -> Mapping[str, Any]:
        _check_version(message.version)
        return {"ready": self._core.model_ready(message.name, message.version)}

    def _server_metadata(self, message: Any) -> Mapping[str, Any]:
        return server_metadata()

    def _model_metadata(self, message: Any) -> Mapping[str, Any]:
        _check_version(message.version)
        return model_metadata(self._core.model(message.name, message.version))

    def _model_config(self, message: Any) -> Mapping[str, Any]:
        _check_version(message.version)
        config = self._core.config(message.name, message.version)
        return {"config": json_format.ParseDict(config, messages.ModelConfig(), ignore_unknown_fields=True)}

    def _model_statistics(self, message: Any) -> Mapping[str, Any]:
        _check_version(message.version)
        # Both are Triton's, field by field: one shape serves JSON and protobuf.
        return {"model_stats": self._core.statistics(message.name, message.version)}

    def _index(self, message: Any) -> Mapping[str, Any]:
        if message.repository_name:
            raise UnsupportedError("there is one model repository; leave repository_name empty")
        return {"models": [msgspec.structs.asdict(entry) for entry in self._core.index(ready=message.ready)]}

    async def _load(self, message: Any) -> Mapping[str, Any]:
        name = _repository_model(message)
        await self._core.load(name, _parameters(message.parameters))
        return {"model_name": name, "isLoaded": True}

    async def _unload(self, message: Any) -> Mapping[str, Any]:
        name = _repository_model(message)
        await self._core.unload(name, _parameters(message.parameters))
        return {"model_name": name, "isUnloaded": True}

    def _trace_setting(self, message: Any) -> Mapping[str, Any]:
        # No value resets to the default.
        update = {name: _single_or_list(setting.value) for name, setting in message.settings.items()}
        settings = self._core.trace_setting(message.model_name, update or None)
        return {
            "settings": {
                name: {"value": value if isinstance(value, list) else [str(value)]} for name, value in settings.items()
            }
        }

    def _log_settings(self, message: Any) -> Mapping[str, Any]:
        update = _parameters(message.settings)
        kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
        settings = self._core.log_settings(update or None)
        return {"settings": {name: {kinds[type(value)]: value} for name, value in settings.items()}}

    def _shared_memory_status(self, message: Any) -> Mapping[str, Any]:
        return {}

    def _unregister(self, message: Any) -> Mapping[str, Any]:
        return {}

    def _reject_registration(self, message: Any) -> Mapping[str, Any]:
        raise UnsupportedError("no shared memory is registered here; send tensors in the message")


def _parse(message: Any, wire: bytes) -> Any:
    # Without this, gRPC would answer UNKNOWN.
    try:
        return message.FromString(wire)
    except DecodeError:
        raise MalformedError(f"not the message {message.DESCRIPTOR.full_name}") from None


def _expected(error: Exception) -> CotenantError:
    """Return what to tell a caller of an error, expected or not: it ends this request, and no other."""
    if isinstance(error, CotenantError):
        return error
    logger.error("a request over gRPC ended in an error of the server", exc_info=error)
    return FailedError(UNEXPECTED)


def _check_fields(wire: bytes) -> None:
    """Raise InvalidError where a message has more fields than an inference request needs: what an empty one of two
    bytes takes in memory is far more. What is no message at all is left to protobuf."""
    end = len(wire)
    if end <= 2 * MAX_FIELDS:
        return
    position = fields = 0
    while position < end:
        fields += 1
        if fields > MAX_FIELDS:
            raise InvalidError(f"an inference request of more than {MAX_FIELDS} fields")
        tag, position = _varint(wire, position)
        match tag & 7:
            case 0:
                _, position = _varint(wire, position)
            case 1:
                position += 8
            case 2:
                size, position = _varint(wire, position)
                position += size
            case 5:
                position += 4
            case _:  # a group, or no field at all
                raise MalformedError("not an inference request: it has a field of no known type")


def _varint(wire: bytes, position: int) -> tuple[int, int]:
    """Return an integer of at most ten bytes, and where it ends."""
    value = 0
    for shift, byte in zip(range(0, 70, 7), wire[position : position + 10], strict=False):
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise MalformedError("not an inference request: it ends within an integer, or holds one that is too long")


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: CotenantError) -> NoReturn:
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    await context.abort(code, public_message(error))


def _check_version(version: str) -> None:
    if version and not version.isdecimal():
        raise InvalidError(f"version {version!r} is not an integer; leave it empty for the newest")


def _repository_model(message: Any) -> str:
    """Return the model that a repository request names. In KServe's dialect, its name is where Triton's has the
    repository's."""
    if message.model_name and message.repository_name:
        raise UnsupportedError("there is one model repository; leave repository_name empty")
    name: str = message.model_name or message.repository_name
    return name


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a map of any of the protocol's oneofs as plain values."""
    return {
        name: getattr(value, kind) for name, value in given.items() if (kind := value.WhichOneof("parameter_choice"))
    }


def _single_or_list(value: Any) -> str | list[str] | None:
    if not value:
        return None
    return value[0] if len(value) == 1 else list(value)


def _read_request(message: Any, info: Any, remaining: float | None) -> InferRequest:
    parameters = _parameters(message.parameters)
    timeout, priority = scheduling(parameters)
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidError(f"{len(message.inputs)} inputs, but {len(raw)} raw_input_contents; give one to each or none")
    heads = [_read_head(given) for given in message.inputs]
    outputs = []
    for wanted in message.outputs:
        own = _parameters(wanted.parameters)
        if "shared_memory_region" in own:
            raise UnsupportedError(
                f"output {wanted.name!r}: no shared memory is registered here; take it in the answer"
            )
        count = own.get("classification", 0)
        if type(count) is not int or count < 0:
            raise InvalidError(f"output {wanted.name!r}: classification {count!r} is not a non-negative integer")
        outputs.append(RequestedOutput(wanted.name, count))
    # Before any data are read: what reading them may cost is bounded by what the model takes.
    check_request(info, heads, outputs)
    inputs = []
    for index, (given, head) in enumerate(zip(message.inputs, heads, strict=True)):
        if raw and given.HasField("contents"):
            raise InvalidError(f"input {given.name!r} has both contents and raw_input_contents; give one of them")
        data = raw[index] if raw else _contents(given, check_elements(head))
        tensor = Tensor(head.name, head.datatype, head.shape, data)
        check_size(tensor)
        inputs.append(tensor)
    return InferRequest(
        model=info.name,
        version=info.version,
        id=message.id,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        timeout=timeout,
        patience=None if remaining is None else max(remaining, 0.0),
        priority=priority,
        parameters=parameters,
    )


def _read_head(given: Any) -> Tensor:
    """Return an input without its data."""
    if "shared_memory_region" in given.parameters:
        raise UnsupportedError(f"input {given.name!r}: no shared memory is registered here; send the tensor")
    shape = tuple(given.shape)
    if len(shape) > MAX_RANK:
        raise InvalidError(f"input {given.name!r} has {len(shape)} dimensions; at most {MAX_RANK} are read")
    if any(size < 0 for size in shape):
        raise InvalidError(f"input {given.name!r}: shape {list(shape)} has a negative size")
    return Tensor(given.name, given.datatype, shape, b"")


def _contents(given: Any, expected: int) -> bytes:
    """Return the typed contents of an input as raw bytes. expected: elements that it has by its shape."""
    field = _CONTENTS.get(given.datatype)
    if field is None:
        raise InvalidError(f"input {given.name!r}: {given.datatype} has no typed contents; send raw_input_contents")
    items = getattr(given.contents, field)
    if len(items) > min(expected, MAX_LISTED):
        raise InvalidError(
            f"input {given.name!r} has {len(items)} {field}, but its shape {expected} elements; more than {MAX_LISTED} "
            "have to be sent as raw_input_contents"
        )
    if given.datatype == "BYTES":
        return pack_strings(items)
    try:
        return struct.pack(f"<{len(items)}{FORMATS[given.datatype]}", *items)
    except struct.error as error:
        raise InvalidError(f"input {given.name!r}: {field} does not fit {given.datatype}: {error}") from None


def _write_response(request: InferRequest, response: InferResponse, outputs: Sequence[Tensor]) -> bytes:
    """Return the wire form of a ModelInferResponse. Tensors are appended to protobuf's output; protobuf would write the
    same, but copy them twice."""
    head = messages.ModelInferResponse(
        model_name=response.model,
        model_version=response.version,
        id=request.id,
        outputs=[{"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape} for tensor in outputs],
    )
    return b"".join([head.SerializeToString(), *[part for tensor in outputs for part in _parts(6, tensor.data)]])


def _field(number: int, data: Data) -> bytes:
    return b"".join(_parts(number, data))


def _parts(number: int, data: Data) -> tuple[bytes, Data]:
    """Return a protobuf field that holds bytes: its tag and length, and the bytes."""
    head, size = bytearray([number << 3 | 2]), len(data)
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head), data


# Appended to the wire form of a response, this adds the only parameter that a response has.
_FINAL = messages.ModelInferResponse(parameters={"triton_final_response": {"bool_param": True}}).SerializeToString()
