"""Serve ModelInfer and ModelStreamInfer: a request of a call or of a stream, to the core and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from cotenant.core.tensor import ModelInfo, total_bytes
from cotenant.errors import CotenantError, RequestError
from cotenant.live.access import Permission
from cotenant.live.grpc.call import MAX_MESSAGE, Call, Method
from cotenant.live.grpc.status import expected
from cotenant.live.grpc.tensors import (
    FINAL,
    check_fields,
    check_version,
    field,
    parse_message,
    read_request,
    write_response,
)
from cotenant.live.limits import MAX_AT_ONCE
from cotenant.live.oip import Core, InferRequest, InferResponse, public_message, requested_outputs
from cotenant.live.shared_memory import SharedMemoryNamedError
from cotenant.live.threads import run_in_thread
from cotenant.protocol import messages

_MAX_STREAMED = 64  # requests of one stream that may wait for their responses

Answer = Callable[[bytes | CotenantError], None]


class InferenceMethods:
    """Infer with the models of a core."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def methods(self) -> dict[str, Method]:
        """Return both by name."""
        return {
            "ModelInfer": Method(unary=self._infer, permission=Permission.INFER, message_size=MAX_MESSAGE),
            "ModelStreamInfer": Method(stream=self._stream, permission=Permission.INFER, message_size=MAX_MESSAGE),
        }

    def _infer(self, call: Call, wire: bytes) -> None:
        def answer(result: bytes | CotenantError) -> None:
            if isinstance(result, bytes):
                call.respond(result)
            else:
                call.fail(result)

        try:
            message = _read(wire)
            handle = self._submit(message, call, answer)
            call.on_cancel = lambda: self._core.cancel(handle)
        except Exception as error:  # noqa: BLE001  # `fail` logs what nobody expects
            call.fail(error)

    def _submit(self, message: Any, call: Call, answer: Answer) -> int:
        """Submit a request, and return its handle. `answer` gets its response in wire form, or how it ended. Raises
        RequestError's children."""
        check_version(message.model_version)
        info = self._core.model(message.model_name, message.model_version)
        try:
            request = read_request(message, info, call.remaining())
        except SharedMemoryNamedError:
            if not self._core.shared_memory.enabled:
                raise
            call.connection.check(Permission.SHARE, call)
            request = read_request(message, info, call.remaining(), self._core.shared_memory.tensors())

        if b"traceparent" in call.head.metadata:
            trace = call.head.metadata[b"traceparent"].decode("latin-1")
            request = msgspec.structs.replace(request, traceparent=trace)

        def done(result: InferResponse | RequestError) -> None:
            if isinstance(result, RequestError):
                answer(result)
            elif total_bytes(result.outputs) > MAX_AT_ONCE and (request.shared is not None or request.classifies):
                run_in_thread(lambda written: _answer(answer, written.result), _write, request, result, info)
            else:
                _answer(answer, _write, request, result, info)

        return self._core.infer(request, done)

    async def _stream(self, call: Call) -> None:
        """Submit requests as they arrive, and respond in order."""
        waiting: asyncio.Queue[tuple[str, asyncio.Future[bytes]] | None] = asyncio.Queue()
        room = asyncio.Semaphore(_MAX_STREAMED)

        async def read() -> None:
            try:
                while True:
                    await room.acquire()
                    wire = await call.receive()
                    if wire is None:
                        return
                    waiting.put_nowait(self._start_streamed(wire, call))
            finally:
                waiting.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (item := await waiting.get()) is not None:
                request_id, answer = item
                try:
                    result = await answer
                    call.keep(-len(result))
                    response = field(2, result + FINAL)  # infer_response
                except CotenantError as error:
                    response = messages.ModelStreamInferResponse(
                        error_message=public_message(error), infer_response={"id": request_id}
                    ).SerializeToString()
                room.release()
                await call.send(response)
            await reader  # which may have found what is no message
        finally:
            reader.cancel()
            with suppress(BaseException):
                await reader
            while not waiting.empty():
                if (item := waiting.get_nowait()) is not None and not item[1].cancel():
                    item[1].exception()  # nobody reads it, and asyncio would complain

    def _start_streamed(self, wire: bytes, call: Call) -> tuple[str, asyncio.Future[bytes]]:
        """Submit a request of a stream. Return its id, and a future of its response, which cancels it if cancelled."""
        future: asyncio.Future[bytes] = call.connection.loop.create_future()

        def answer(result: bytes | CotenantError) -> None:
            if future.done():
                return
            if isinstance(result, bytes):
                future.set_result(result)
                call.keep(len(result))
            else:
                # Its traceback has a frame that knows the future: they would hold each other, and the message.
                future.set_exception(result.with_traceback(None))

        request_id = ""
        try:
            message = _read(wire)
            request_id = message.id
            handle = self._submit(message, call, answer)
            future.add_done_callback(lambda settled: self._core.cancel(handle) if settled.cancelled() else None)
        except Exception as error:  # noqa: BLE001  # `expected` logs it
            answer(expected(error))
        return request_id, future


def _write(request: InferRequest, result: InferResponse, info: ModelInfo) -> bytes:
    return write_response(request, result, requested_outputs(request, result, info))


def _answer(answer: Answer, write: Callable[..., bytes], *args: Any) -> None:
    """Answer with a response, written by this call, or why there is none."""
    try:
        response = write(*args)
    except Exception as error:  # noqa: BLE001  # `expected` logs it
        answer(expected(error))
    else:
        answer(response)


def _read(wire: bytes) -> Any:
    check_fields(wire)
    return parse_message(messages.ModelInferRequest, wire)
