"""Define the protocol between the server and a worker, over one socket per lane.

The server sends `Setup`; the worker answers `WorkerReady` or `WorkerBroken`. Then the server sends one `RunBatch` at a
time, and the worker answers each with a `BatchResult`; between two of them `Resize` may come, which has no answer. End
of stream means stop; a worker process that goes on serving other lanes confirms with `WorkerClosed`. A message is its
length in eight bytes, little-endian, and its msgpack. Small tensors travel inline; for a large one the message carries
its offset in the arena.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from cotenant.core.tensor import TensorSpec
from cotenant.errors import WorkerError

# Bytes from which a tensor goes through the arena; below, a block costs more than copying through the socket.
LARGE = 16384
MAX_MESSAGE = 1 << 29  # bytes; what is larger goes through the arena
ALIGN = 64  # bytes, of each tensor inside a block: a cache line and the widest vector register


class WorkerModel(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a model for a worker to load.

    path: its file. platform: Triton's platform name, which selects the runner. max_batch: the largest batch in rows; it
    is run during warm-up. inputs, outputs: as the model describes them; warm-up replaces an open dimension by 1.
    batched: the first dimension of every input and output is the batch; otherwise each request runs by itself.
    gradients: the model computes gradients, as a training step does. graphs: batch sizes to capture as CUDA graphs,
    each with the fewest rows that are padded to it. must_capture: a model that cannot be captured is an error.
    latencies: seconds that a fake worker (`Setup.fake`) takes for 1, 2, … rows. parameters: as the model's
    configuration has them, for runners that read them.
    """

    name: str
    path: str = ""
    platform: str = "onnxruntime_onnx"
    max_batch: int = 1
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...] = ()
    batched: bool = True
    gradients: bool = False
    graphs: tuple[tuple[int, int], ...] = ()
    must_capture: bool = False
    latencies: tuple[float, ...] = ()
    parameters: dict[str, str] = {}

    def captured_sizes(self) -> tuple[tuple[int, int], ...]:
        """Return the batch sizes that a GPU captures, ascending, each with the fewest rows that are padded to it; none
        if an input size is not fixed."""
        if any(-1 in spec.shape[self.batched :] for spec in self.inputs):
            return ()
        sizes = {min(size, self.max_batch): lowest for size, lowest in sorted(self.graphs, reverse=True)}
        return tuple(sorted((rows, lowest) for rows, lowest in sizes.items() if lowest <= rows))


class TensorPart(msgspec.Struct, array_like=True, gc=False):
    """Send a tensor: its bytes, or their offset and size in the arena."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview | None
    start: int = 0
    size: int = 0


class Timing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Report the timing of one batch; durations in seconds.

    started: when the worker began, by `time.monotonic`, which all processes of a machine share. gather, infer, scatter:
    joining the inputs, running the model, splitting the outputs. pause: how long the result was then held back by the
    CPU throttle. cpu: CPU time since the end of the batch before. device: time by CUDA events around copies and
    kernels. memory: peak device memory of the weights and batches, in bytes. device and memory are 0 on the CPU. lent:
    how much earlier the batch ended than its share alone would have let it, because others left the processor idle.
    warming_up: whether the worker serves before all is done that makes its batches fast.
    """

    started: float
    gather: float
    infer: float
    scatter: float
    pause: float
    cpu: float
    device: float = 0.0
    memory: int = 0
    lent: float = 0.0
    warming_up: bool = False

    @property
    def latency(self) -> float:
        return self.gather + self.infer + self.scatter + self.pause


class Setup(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Set a worker up: the first message.

    arena: size in bytes. board: offset of the lending board in the arena, and the lane's slot on it; (0, 0) for none.
    background: load the models with the processor time that nobody else wants. serve_first: be ready before all is
    done that makes batches faster, since nobody serves meanwhile. The other fields are those of `backends.Launch`.
    """

    arena: int
    models: tuple[WorkerModel, ...]
    cores: tuple[int, ...] = ()
    threads: int = 1
    cpu_limit: float | None = None
    lent_by_kernel: bool = False
    board: tuple[int, int] = (0, 0)
    fake: bool = False
    cuda: bool = False
    groups: tuple[int, ...] = ()
    env: dict[str, str] = {}
    background: bool = False
    serve_first: bool = False


class Resize(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What the worker of a lane has from the next batch on: other cores, another limit, and its models with other
    largest batches. It keeps its threads."""

    models: tuple[WorkerModel, ...]
    cores: tuple[int, ...] = ()
    cpu_limit: float | None = None


class WorkerReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that all models are loaded and warm.

    footprints: bytes of the outputs of one row, each output aligned, by model.
    """

    footprints: dict[str, int]


class WorkerBroken(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that a model could not be loaded or the partition not be created; the lane ends."""

    reason: str


class WorkerClosed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that the lane has ended while its process continues; the last message of a lane."""


class RunBatch(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Run these requests as one batch. room: start and size of the arena block for large outputs, in bytes."""

    batch: int
    model: str
    requests: list[list[TensorPart]]
    room: tuple[int, int] = (0, 0)


class BatchResult(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Return the outputs of each request in order, or the reason why the model failed on it."""

    batch: int
    requests: list[list[TensorPart] | str]
    timing: Timing


def aligned(size: int) -> int:
    """Round a size in bytes up to a multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


ToWorker = Setup | Resize | RunBatch
FromWorker = WorkerReady | WorkerBroken | BatchResult | WorkerClosed

_LENGTH = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()


def encode_message(message: ToWorker | FromWorker) -> bytearray:
    """Encode a message with its length prefix. Raises WorkerError for one that is too long."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    if len(buffer) > MAX_MESSAGE:
        raise WorkerError(f"a message of {len(buffer)} bytes; at most {MAX_MESSAGE} are sent")
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return buffer


class Inbox:
    """Split the byte stream of a socket into messages."""

    _INITIAL_SIZE = 1 << 16  # bytes

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray(self._INITIAL_SIZE)
        self._start = 0
        self._end = 0

    def fill(self) -> bool:
        """Receive once; return False at end of stream. Raises what `recv_into` raises."""
        count = self._connection.recv_into(memoryview(self._buffer)[self._end :])
        self._end += count
        return count > 0

    def take(self) -> bytes | None:
        """Return the next message, or None if `fill` has to be called first. Raises WorkerError for a message that is
        too long to be one."""
        pending = self._end - self._start
        if not pending and len(self._buffer) == self._INITIAL_SIZE:
            self._start = self._end = 0
            return None
        if pending >= _LENGTH.size:
            size = _LENGTH.size + _LENGTH.unpack_from(self._buffer, self._start)[0]
            if size > MAX_MESSAGE:
                raise WorkerError(f"a message of {size} bytes; at most {MAX_MESSAGE} are read")
            if pending >= size:
                message = bytes(memoryview(self._buffer)[self._start + _LENGTH.size : self._start + size])
                self._start += size
                return message
        else:
            size = _LENGTH.size
        # Move the partial message to the front of a buffer that holds all of it.
        capacity = max(size, self._INITIAL_SIZE)
        if self._start or len(self._buffer) != capacity:
            rest = self._buffer[self._start : self._end]
            if len(self._buffer) != capacity:
                self._buffer = bytearray(capacity)
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, pending
        return None
