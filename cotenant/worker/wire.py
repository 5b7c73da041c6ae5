"""What the server and a worker say to each other, over one socket for each lane.

The server sends `Setup`, the worker answers `WorkerReady` or `WorkerBroken`. Then the server sends one `RunBatch` at a
time, and the
worker sends an `BatchResult` to each. The end of the stream is the order to stop; a worker that goes on for other
lanes says
`WorkerClosed` then. A message is its length in eight bytes and its msgpack. Small tensors travel inside it; of a large
one only the place in the arena does.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from cotenant.core.tensor import TensorSpec

# From this size on a tensor goes through the arena: below, a block costs more than the copies through the socket.
LARGE = 16384
ALIGN = 64  # of each tensor inside a block: a cache line, and the widest vector


class WorkerModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model for a worker to load.

    path: its file. platform: Triton's name of its kind, by which a runner is chosen. max_batch: the largest number of
    rows that it will be asked for, warmed up before it is ready.
    inputs, outputs: as the model describes them. Warm-up needs sizes for all dimensions but the first: -1 becomes 1.
    batched: the first dimension of every input and output counts rows; otherwise each request runs by itself.
    gradients: it needs them, as a training step does. graphs: batch sizes to record as CUDA graphs.
    latencies: what a worker that runs nothing (`Setup.fake`) takes for 1, 2, … rows, in seconds.
    """

    name: str
    path: str = ""
    platform: str = "onnxruntime_onnx"
    max_batch: int = 1
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...] = ()
    batched: bool = True
    gradients: bool = False
    graphs: tuple[int, ...] = ()
    latencies: tuple[float, ...] = ()


class TensorPart(msgspec.Struct, array_like=True, gc=False):
    """A tensor: its bytes, or where they lie in the arena."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview | None
    start: int = 0
    size: int = 0


class Timing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One batch, in seconds.

    started: when the worker took it up, by `time.monotonic`, which all processes of a machine share. gather, infer,
    scatter: how long it then took to put the inputs together, to run, to take the outputs apart. pause: how long the
    answer was then held back, to stay within the share. cpu: processor time, with what was used since the batch before.
    device: what its own clock counted, by CUDA events around copies and kernels. memory: bytes of the device that
    the model's weights and its batches took at most. Both 0 where the device is the processor.
    """

    started: float
    gather: float
    infer: float
    scatter: float
    pause: float
    cpu: float
    device: float = 0.0
    memory: int = 0

    @property
    def latency(self) -> float:
        return self.gather + self.infer + self.scatter + self.pause


class Setup(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """arena: its size in bytes. The rest is as in `backends.Launch`."""

    arena: int
    models: tuple[WorkerModel, ...]
    cores: tuple[int, ...] = ()
    threads: int = 1
    cpu_limit: float | None = None
    fake: bool = False
    cuda: bool = False
    groups: tuple[int, ...] = ()
    env: dict[str, str] = {}


class WorkerReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All models are loaded and warm. footprints: bytes that the outputs of one row take, each aligned."""

    footprints: dict[str, int]


class WorkerBroken(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A model could not be loaded, or a partition not made; the lane ends."""

    reason: str


class WorkerClosed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The lane has ended, and its process goes on. It is the last that is said of it."""


class RunBatch(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Run these requests as one batch. room: start and size of the place in the arena for large outputs."""

    batch: int
    model: str
    requests: list[list[TensorPart]]
    room: tuple[int, int] = (0, 0)


class BatchResult(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The outputs of each request, in their order, or why the model failed on it."""

    batch: int
    requests: list[list[TensorPart] | str]
    timing: Timing


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


ToWorker = Setup | RunBatch
FromWorker = WorkerReady | WorkerBroken | BatchResult | WorkerClosed

_LENGTH = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()


def encode_message(message: ToWorker | FromWorker) -> bytearray:
    """A message with its length in front."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return buffer


class Inbox:
    """Cuts what arrives on a socket into messages."""

    _ROOM = 1 << 16

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray(self._ROOM)
        self._start = 0
        self._end = 0

    def fill(self) -> bool:
        """Receive once; False at the end of the stream. Raises what `recv_into` does."""
        count = self._connection.recv_into(memoryview(self._buffer)[self._end :])
        self._end += count
        return count > 0

    def take(self) -> bytes | None:
        """The next message, or None where `fill` has to come first."""
        held = self._end - self._start
        if not held and len(self._buffer) == self._ROOM:
            self._start = self._end = 0
            return None
        if held >= _LENGTH.size:
            size = _LENGTH.size + _LENGTH.unpack_from(self._buffer, self._start)[0]
            if held >= size:
                message = bytes(memoryview(self._buffer)[self._start + _LENGTH.size : self._start + size])
                self._start += size
                return message
        else:
            size = _LENGTH.size
        # Whatever is left of a message moves to the front of a buffer with room for all of it.
        room = max(size, self._ROOM)
        if self._start or len(self._buffer) != room:
            rest = self._buffer[self._start : self._end]
            if len(self._buffer) != room:
                self._buffer = bytearray(room)
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, held
        return None
