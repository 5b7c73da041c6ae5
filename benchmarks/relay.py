"""The least that a server with a worker process can take: forward requests to a process that runs the model, and back.

`python -m benchmarks.relay MODEL FILE.onnx THREADS` prints its address, and answers whatever is sent there until it is
ended. The worker runs the model on its example's inputs; nothing is parsed, scheduled, checked or counted.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import socket
import sys
from contextlib import suppress
from typing import cast

import numpy as np
import onnxruntime
import uvloop

from cotenant.zoo.answers import example_request

LENGTH = re.compile(rb"(?im)^content-length: *(\d+)")
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def work(connection: socket.socket, model: str, path: str, threads: int) -> None:
    """Run the model whenever a byte arrives."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as our workers
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    arrays = {tensor.name: tensor.array() for tensor in example_request(model, np.random.default_rng(0)).requests[0]}
    gc.freeze()
    while connection.recv(1):
        session.run(None, arrays)
        connection.sendall(b"!")


class Caller(asyncio.Protocol):
    """Forward each request of the one caller, once it is whole."""

    def __init__(self, worker: socket.socket) -> None:
        self._worker = worker
        self._left = 0  # bytes of the request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        asyncio.get_running_loop().add_reader(self._worker.fileno(), self._answer)

    def data_received(self, data: bytes) -> None:
        if not self._left:
            head = data.index(b"\r\n\r\n") + 4
            length = LENGTH.search(data, 0, head)
            self._left = head + (int(length[1]) if length else 0)
        self._left -= len(data)
        if not self._left:
            self._worker.send(b"!")

    def _answer(self) -> None:
        self._worker.recv(1)
        self._transport.write(ANSWER)


async def relay(worker: socket.socket) -> None:
    worker.setblocking(False)
    server = await asyncio.get_running_loop().create_server(lambda: Caller(worker), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    print(f"{host}:{port}", flush=True)
    gc.freeze()
    await server.serve_forever()


def main() -> None:
    model, path, threads = sys.argv[1:]
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        work(theirs, model, path, int(threads))
        os._exit(0)
    theirs.close()
    with suppress(KeyboardInterrupt):
        uvloop.run(relay(ours))


if __name__ == "__main__":
    main()
