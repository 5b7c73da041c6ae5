"""Callers of the soak: over HTTP and gRPC, valid and not, patient and not. Each valid request is checked."""

from __future__ import annotations

import asyncio
import json
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

import grpc
import numpy as np

from cotenant.protocol import messages

PATIENCE = 90.0  # seconds after which a request without an answer is lost
WIDTH = 16_384  # floats in a row of the wide model: large enough for the arena
SERVICE = "/inference.GRPCInferenceService/"
IDLE = 30.0  # seconds after which a connection is not used again: the server closes those that are idle for 75
# What tells a caller of a valid request why it has no answer: the model is unloaded or loading, the server has no time,
# the deadline passed; or its worker was killed when there was no time to try again.
DIED = "its worker died"
REASONS = {404, 429, 503, 504}
CODES = {
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
BAD = (
    b"GARBAGE\r\n\r\n",
    b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n",
    b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 7\r\n\r\n[[[[[[[",
    b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 130\r\n\r\n"
    + b'{"inputs":[{"name":"x","shape":[18446744073709551616,16],"datatype":"FP32","data":[]}]}'.ljust(130),
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nHost: a\r\nX: " + bytes(range(128, 256)) + b"\r\n\r\n",
)


class Callers:
    """Send requests, and keep what came of them. answered: by kind of request and outcome."""

    def __init__(self, addresses: dict[str, str], rng: np.random.Generator) -> None:
        self.sent = 0
        self.answered: Counter[str] = Counter()
        self.lost: list[str] = []
        self.wrong: list[str] = []
        self._http = addresses["http"].rsplit(":", 1)
        self._rng = rng
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._images: Any = None  # the answer to the one picture that is asked for
        self._address = addresses["grpc"]
        self._picture = np.random.default_rng(0).normal(size=(1, 3, 32, 32)).astype(np.float32)

    async def __aenter__(self) -> Callers:
        self._channel = grpc.aio.insecure_channel(self._address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()
        for _, _, writer in self._idle:
            writer.close()

    async def call(self, seconds: float, rate: float) -> None:
        """Send requests at random times, for as long."""
        kinds: list[tuple[str, float, Callable[[], Awaitable[str]]]] = [
            ("json", 0.3, self._json),
            ("binary", 0.2, self._binary),
            ("grpc", 0.2, self._unary),
            ("stream", 0.08, self._stream),
            ("images", 0.1, self._ask_picture),
            ("bad", 0.06, self._bad),
            ("left", 0.03, self._leave),
            ("reset", 0.03, self._reset),
        ]
        weights = [weight for _, weight, _ in kinds]
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            await asyncio.sleep(float(self._rng.exponential(1 / rate)))
            name, _, kind = kinds[int(self._rng.choice(len(kinds), p=weights))]
            task = loop.create_task(self._one(name, kind))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)

    async def _one(self, name: str, kind: Callable[[], Awaitable[str]]) -> None:
        self.sent += 1
        try:
            async with asyncio.timeout(PATIENCE):
                self.answered[f"{name}: {await kind()}"] += 1
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            self.lost.append(f"{name}: {error!r}")

    async def control(self, path: str) -> int:
        async with asyncio.timeout(PATIENCE):
            return (await self._ask(path, b"{}"))[0]

    # HTTP

    async def _ask(self, path: str, body: bytes, *lines: str) -> tuple[int, bytes, int]:
        """Post a body; return the status, the answer's body, and the length of its JSON part."""
        reader, writer = await self._connection()
        head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *lines, "", ""]
        try:
            writer.write("\r\n".join(head).encode() + body)
            status, headers = await self._head(reader)
            answer = await reader.readexactly(int(headers["content-length"]))
        except BaseException:
            writer.close()
            raise
        if headers.get("connection") == "close" or len(self._idle) >= 8:
            writer.close()
        else:
            self._idle.append((asyncio.get_running_loop().time(), reader, writer))
        return status, answer, int(headers.get("inference-header-content-length", len(answer)))

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        now = asyncio.get_running_loop().time()
        while self._idle:
            since, reader, writer = self._idle.pop()
            if now - since < IDLE and not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(*self._http)

    @staticmethod
    async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii").split("\r\n")
        return int(head[0].split()[1]), {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
        }

    def _outcome(self, status: int, answer: bytes, right: Callable[[], bool]) -> str:
        if status == 200:
            if right():
                return "ok"
            self.wrong.append(f"200: {answer[:200]!r}")
        elif not (reason := json.loads(answer)["error"]) or (status not in REASONS and DIED not in reason):
            self.wrong.append(f"{status}: {answer[:200]!r}")
        return str(status)

    def _values(self, width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return self._rng.integers(0, 1 << 20, width).astype(np.float32)

    async def _json(self) -> str:
        values = self._values(16).tolist()
        given = {"name": "x", "shape": [1, 16], "datatype": "FP32", "data": values}
        status, answer, _ = await self._ask("/v2/models/echo/infer", json.dumps({"inputs": [given]}).encode())
        return self._outcome(status, answer, lambda: json.loads(answer)["outputs"][0]["data"] == values)

    async def _binary(self) -> str:
        data = self._values(WIDTH).tobytes()
        given = {"name": "x", "shape": [1, WIDTH], "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
        head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
        line = f"Inference-Header-Content-Length: {len(head)}"
        status, answer, size = await self._ask("/v2/models/wide/infer", head + data, line)
        return self._outcome(status, answer, lambda: answer[size:] == data)

    async def _ask_picture(self) -> str:
        data = self._picture.ravel().tolist()
        given = {"name": "x", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": data}
        status, answer, _ = await self._ask("/v2/models/images/infer", json.dumps({"inputs": [given]}).encode())

        def right() -> bool:
            values = json.loads(answer)["outputs"][0]["data"]
            if self._images is None:
                self._images = values
            return bool(np.allclose(values, self._images, rtol=1e-3, atol=1e-4))

        return self._outcome(status, answer, right)

    async def _bad(self) -> str:
        """Send what is no request: it must be answered by an error, or the connection closed."""
        reader, writer = await asyncio.open_connection(*self._http)
        try:
            writer.write(BAD[int(self._rng.integers(len(BAD)))])
            status, _ = await self._head(reader)
        except (OSError, asyncio.IncompleteReadError):
            return "closed"
        finally:
            writer.close()
        return str(status)

    async def _leave(self) -> str:
        """Send a request, or a part of one, and close."""
        _, writer = await asyncio.open_connection(*self._http)
        given = {"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [0.0] * 16}
        body = json.dumps({"inputs": [given]}).encode()
        whole = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        writer.write(whole[: int(self._rng.integers(1, len(whole) + 1))])
        await writer.drain()
        writer.close()
        return "left"

    # gRPC

    def _message(self, data: bytes) -> Any:
        return messages.ModelInferRequest(
            model_name="echo",
            inputs=[{"name": "x", "datatype": "FP32", "shape": [len(data) // 64, 16]}],
            raw_input_contents=[data],
        )

    def _method(self, name: str, kind: str, answer: str) -> Any:
        call = getattr(self._channel, kind)
        return call(
            SERVICE + name,
            request_serializer=messages.ModelInferRequest.SerializeToString,
            response_deserializer=getattr(messages, answer).FromString,
        )

    async def _unary(self) -> str:
        data = self._values(16).tobytes()
        try:
            answer = await self._method("ModelInfer", "unary_unary", "ModelInferResponse")(self._message(data))
        except grpc.aio.AioRpcError as error:
            return self._error(error)
        if answer.raw_output_contents[0] != data:
            self.wrong.append(f"grpc: {answer.raw_output_contents[0][:80]!r}")
        return "ok"

    def _error(self, error: Any) -> str:
        reason = error.details() or ""
        if not reason or (error.code() not in CODES and DIED not in reason):
            self.wrong.append(f"grpc: {error.code()}: {error.details()}")
        return str(error.code().name)

    async def _stream(self) -> str:
        rows = [struct.pack("<16f", *([float(number)] * 16)) for number in range(4)]

        async def requests() -> AsyncIterator[Any]:
            for row in rows:
                yield self._message(row)

        call = self._method("ModelStreamInfer", "stream_stream", "ModelStreamInferResponse")(requests())
        try:
            answers = [answer async for answer in call]
        except grpc.aio.AioRpcError as error:
            return self._error(error)
        got = [b"" if each.error_message else bytes(each.infer_response.raw_output_contents[0]) for each in answers]
        if len(got) != len(rows) or any(each and each not in rows for each in got):
            self.wrong.append(f"stream: {got}")
        return "ok" if all(got) else "some errors"

    async def _reset(self) -> str:
        """Call, and cancel the call: a reset of its stream in HTTP/2."""
        call = self._method("ModelInfer", "unary_unary", "ModelInferResponse")(self._message(bytes(64)))
        await asyncio.sleep(float(self._rng.uniform(0, 0.002)))
        call.cancel()
        return "cancelled"
