"""Define the Open Inference Protocol v2 as values, shared by the HTTP and gRPC front ends."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from prometheus_client.registry import Collector

from cotenant import __version__
from cotenant.core.tensor import DTYPES, ModelInfo, Tensor, TensorSpec
from cotenant.errors import CotenantError, FailedError, InvalidError, RequestError
from cotenant.live.limits import MAX_CLASSES, MAX_ELEMENTS, MAX_ERROR, MAX_STRINGS
from cotenant.live.shared_memory import OutputRegion, SharedMemory, SharedTensors

NAME = "cotenant"
EXTENSIONS = (
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)

# How `struct` names the datatypes that JSON and typed contents can carry.
FORMATS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}

SORTED_COLUMNS = 256  # of scores; of a longer row only the highest are sorted
_LENGTH = struct.Struct("<I")  # before each element of BYTES

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1  # of parameters: an `int64_param` of gRPC

Parameters = Mapping[str, bool | int | float | str]
Data = bytes | bytearray | memoryview


class RequestedOutput(msgspec.Struct, frozen=True):
    """An output that a caller asks for. classification: how many of the highest values to return as labels; 0 for the
    tensor itself. region: shared memory that it goes to; None: it is in the response."""

    name: str
    classification: int = 0
    region: OutputRegion | None = None


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for inference, checked against its model.

    outputs: those asked for; empty: all. timeout: seconds from now, None for the model's default. patience: seconds
    after which the caller will have left, if known. priority: 0 is the most urgent, -1 stands for the model's default.
    traceparent: the caller's place in a trace, as W3C has it; "" where it told none. shared: what has still to be
    copied of its inputs, if they lie in shared memory.
    """

    model: str
    version: str = ""
    id: str = ""
    inputs: tuple[Tensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    timeout: float | None = None
    patience: float | None = None
    priority: int = -1
    parameters: Parameters = {}
    traceparent: str = ""
    shared: SharedTensors | None = None

    @property
    def classifies(self) -> bool:
        """Tell whether any output is asked for as its highest values."""
        return any(output.classification for output in self.outputs)


class InferResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs of a request that was served."""

    model: str
    version: str
    id: str = ""
    outputs: tuple[Tensor, ...]


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the repository index. state: READY, UNAVAILABLE (with a reason), LOADING or UNLOADING."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


Done = Callable[[InferResponse | RequestError], None]


class LookingUpError(RequestError):
    """Raised by `Core.model` where another process has to be asked. ask: calls back with None once the model is known,
    or with the reason why it is not."""

    def __init__(self, ask: Callable[[Callable[[RequestError | None], None]], None]) -> None:
        super().__init__("the model is looked up")
        self.ask = ask


class Core(Protocol):
    """What the front ends see of the server. Every method raises RequestError's children for what it cannot do.

    shared_memory: regions that callers have registered.
    """

    @property
    def shared_memory(self) -> SharedMemory: ...

    def live(self) -> bool: ...

    def ready(self) -> bool: ...

    def model(self, name: str, version: str = "") -> ModelInfo: ...

    def model_ready(self, name: str, version: str = "") -> bool: ...

    def config(self, name: str, version: str = "") -> dict[str, Any]:
        """Return Triton's ModelConfig in its JSON shape."""
        ...

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return Triton's `model_stats`, one entry a model; all models where no name is given."""
        ...

    def index(self, *, ready: bool = False) -> list[IndexEntry]: ...

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None: ...

    async def unload(self, name: str, parameters: Mapping[str, Any]) -> None: ...

    def trace_setting(self, model: str = "", update: Mapping[str, Any] | None = None) -> dict[str, Any]: ...

    def log_settings(self, update: Mapping[str, Any] | None = None) -> dict[str, Any]: ...

    def metrics(self) -> Collector:
        """Return the metrics as they are now. They may be rendered in a thread."""
        ...

    def allocate(self, size: int) -> Any | None:
        """Return a block of memory shared with workers (`worker.arena.Block`), or None where there is no room."""
        ...

    def infer(self, request: InferRequest, done: Done, *, lost: float = 0.0) -> int:
        """Submit a request and return its handle; `done` is called exactly once, perhaps before this returns.

        lost: seconds of its target that the front end takes, before this call and after `done`.
        """
        ...

    @property
    def shortest_target(self) -> float:
        """The shortest target of a model in seconds; 0 where there is none."""
        ...

    def would_reject(self, model: str, version: str, lost: float) -> bool:
        """Return whether a request of one row, without a timeout of its own, would be rejected now, as it could not be
        answered in what `lost` seconds leave of the model's target. False where that is not known."""
        ...

    def poll(self) -> None:
        """Take what workers have answered, in the middle of work that keeps the event loop from it."""
        ...

    def reject_unread(self, model: str, waited: float) -> None:
        """Count a request that the front end has rejected without reading it, `waited` seconds after it came."""
        ...

    def cancel(self, handle: int) -> None:
        """Cancel a request whose caller left: `done` is called with CancelledError unless it was called already."""
        ...


# What both front ends say of errors.

UNEXPECTED = "an error in the server; its log says more"
OVERLOADED = "the server is overloaded"

_FOLDERS = re.compile(r"(?<![\w.:/%~-])/(?:[^\s/'\":,;]+/)+(?=[^\s/'\":,;])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def public_message(error: CotenantError) -> str:
    """Return what a caller reads of an error: on one line, of bounded length, and without the folders of this machine,
    which are none of its business."""
    text = str(error)
    if len(text) > MAX_ERROR:
        text = text[: MAX_ERROR - 1] + "…"
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), _FOLDERS.sub("", text))


def rejection(model: str, reason: str = OVERLOADED) -> str:
    """Return what the caller of a rejected request reads."""
    return f"request for model '{model}' rejected: {reason}"


# What both front ends answer without a model.


def server_metadata(core: Core) -> dict[str, Any]:
    shared = ("system_shared_memory",) if core.shared_memory.enabled else ()
    return {"name": NAME, "version": __version__, "extensions": EXTENSIONS + shared}


def model_metadata(info: ModelInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "versions": [info.version],
        "platform": info.platform,
        "inputs": [msgspec.structs.asdict(spec) for spec in info.inputs],
        "outputs": [msgspec.structs.asdict(spec) for spec in info.outputs],
    }


# What both front ends do with a request before the server sees it, and with its response afterwards.


def scheduling(parameters: Parameters) -> tuple[float | None, int]:
    """Return `timeout` in seconds (the parameter is in µs; 0: None), and `priority`, from a request's parameters.

    The protocol counts priorities from 1, with 0 for the model's default; the dispatcher counts from 0, with -1 for
    that. Raises InvalidError.
    """
    if not parameters:
        return None, -1
    for name, value in parameters.items():
        if isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER:
            raise InvalidError(
                f"parameter {name!r}: an integer beyond 64 bits; it may be from {MIN_INTEGER} to {MAX_INTEGER}"
            )
        if name.startswith("triton_") and name != "triton_enable_empty_final_response":
            raise InvalidError(f"parameter {name!r}: names that begin with 'triton_' are reserved; choose another")
    timeout = _natural(parameters, "timeout")
    return timeout / 1e6 if timeout else None, _natural(parameters, "priority") - 1


def _natural(parameters: Parameters, name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or value < 0:  # True is an int, too
        raise InvalidError(f"parameter {name!r}: {value!r} is not a non-negative integer")
    return value


def check_size(tensor: Tensor) -> None:
    """Raise InvalidError where a tensor's data is not as long as its datatype and shape require.

    Call it after `check_request`: what is counted here is bounded by the datatype and shape that the model takes.
    """
    expected = check_elements(tensor)
    if tensor.datatype == "BYTES":
        actual, unit = count_strings(tensor, expected), "elements"
    else:
        expected *= DTYPES[tensor.datatype].itemsize
        actual, unit = len(tensor.data), "bytes"
    if actual != expected:
        more = "more than " if actual > expected and unit == "elements" else ""
        raise InvalidError(
            f"tensor {tensor.name!r}: {more}{min(actual, expected) if more else actual} {unit}, but {tensor.datatype} "
            f"of shape {list(tensor.shape)} has {expected}"
        )


def read_shared(shared: SharedTensors, head: TensorHead, region: str, offset: int, size: int) -> Tensor:
    """Return an input that lies in shared memory; its bytes may have still to be copied. Call it after `check_request`.
    Raises InvalidError."""
    elements = check_elements(head)
    expected = size if head.datatype == "BYTES" else elements * DTYPES[head.datatype].itemsize
    if size != expected:
        raise InvalidError(
            f"tensor {head.name!r}: {size} bytes of shared memory, but {head.datatype} of shape {list(head.shape)} has "
            f"{expected}"
        )
    data, block = shared.read(region, offset, size)
    tensor = Tensor(head.name, head.datatype, head.shape, data, block)
    shared.then(partial(check_size, tensor))
    return tensor


def check_elements(tensor: TensorHead) -> int:
    """Return how many elements a tensor's shape has. Raises InvalidError where they are more than a tensor may have."""
    elements = math.prod(tensor.shape)
    most = MAX_STRINGS if tensor.datatype == "BYTES" else MAX_ELEMENTS
    # An empty tensor has a size in memory, too, as libraries compute it: without the dimensions that are 0.
    if elements > most or (not elements and math.prod(filter(None, tensor.shape)) > MAX_ELEMENTS):
        raise InvalidError(f"tensor {tensor.name!r} of shape {list(tensor.shape)} has more than {most} elements")
    return elements


class TensorHead(Protocol):
    """What is known of a tensor before its data are read."""

    @property
    def name(self) -> str: ...

    @property
    def datatype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def check_request(info: ModelInfo, inputs: Iterable[TensorHead], outputs: Iterable[RequestedOutput]) -> None:
    """Raise InvalidError unless these are inputs and outputs of the model. Data are not looked at."""
    missing = {spec.name: spec for spec in info.inputs}
    rows = -1
    for tensor in inputs:
        spec = missing.pop(tensor.name, None)
        if spec is None:
            raise InvalidError(
                f"unexpected input {tensor.name!r} for model {info.name!r}, which takes each of "
                f"{_names(info.inputs)} once"
            )
        if tensor.datatype != spec.datatype:
            raise InvalidError(
                f"input {tensor.name!r} is {tensor.datatype}, but model {info.name!r} takes {spec.datatype}"
            )
        shape = tensor.shape
        if shape != spec.shape and not _fits(shape, spec.shape):
            raise InvalidError(
                f"input {tensor.name!r} has shape {list(shape)}, but model {info.name!r} takes "
                f"{list(spec.shape)}, where -1 is any size"
            )
        if info.max_batch_size:
            if not 1 <= shape[0] <= info.max_batch_size:
                raise InvalidError(
                    f"input {tensor.name!r} has {shape[0]} rows, but model {info.name!r} takes 1 to "
                    f"{info.max_batch_size} in one request; send several"
                )
            if rows not in (-1, shape[0]):
                raise InvalidError(f"input {tensor.name!r} has {shape[0]} rows, but an input before it has {rows}")
            rows = shape[0]
    if missing:
        raise InvalidError(
            f"model {info.name!r} takes {len(info.inputs)} inputs, but {_names(missing.values())} is missing"
        )
    wanted: list[str] = []  # no longer than the model's outputs
    for output in outputs:
        if output.name in wanted:
            raise InvalidError(f"output {output.name!r} is asked for twice")
        wanted.append(output.name)
        datatype = next((spec.datatype for spec in info.outputs if spec.name == output.name), None)
        if datatype is None:
            raise InvalidError(
                f"unexpected output {output.name!r} for model {info.name!r}, which has {_names(info.outputs)}"
            )
        if output.classification and datatype not in FORMATS:
            raise InvalidError(f"output {output.name!r} is {datatype}, which cannot be classified; ask for it as it is")


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    if len(shape) != len(wanted):
        return False
    for have, want in zip(shape, wanted, strict=True):  # noqa: SIM110  # a third of the time that all() takes
        if want not in (-1, have):
            return False
    return True


def _names(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(repr(spec.name) for spec in specs)


def requested_outputs(request: InferRequest, response: InferResponse, info: ModelInfo) -> Sequence[Tensor]:
    """Return the outputs that the caller asked for, in that order, as labels where it asked for those.

    Raises FailedError where the model did not return one.
    """
    if not request.outputs:
        return response.outputs
    given = {tensor.name: tensor for tensor in response.outputs}
    try:
        return [
            classify(
                given[wanted.name],
                wanted.classification,
                batched=info.max_batch_size > 0,
                labels=info.labels.get(wanted.name, ()),
            )
            if wanted.classification
            else given[wanted.name]
            for wanted in request.outputs
        ]
    except KeyError as error:
        raise FailedError(f"model {info.name!r} gave no output {error}") from None


def classify(tensor: Tensor, count: int, *, batched: bool, labels: Sequence[str] = ()) -> Tensor:
    """Return the `count` highest values as Triton's classification extension writes them: BYTES ``score:index``, and
    ``:label`` where the class has one.

    They are those of each row where the tensor is batched, else of the whole tensor; NaN is below all numbers. Only for
    the datatypes of FORMATS. Raises InvalidError for more labels than one output may have.
    """
    rows = tensor.shape[0] if batched else 1
    scores = _scores(tensor).reshape(rows, -1) if rows else _scores(tensor).reshape(0, 0)
    count = min(count, scores.shape[1])
    if rows * count > MAX_CLASSES:
        raise InvalidError(f"output {tensor.name!r}: {rows * count} labels; ask for {MAX_CLASSES} at most")
    form = "{:f}:{}" if tensor.datatype in ("FP32", "FP64") else "{:d}:{}"
    best = [
        (form.format(score, index) + (f":{labels[index]}" if index < len(labels) else "")).encode()
        for row, highest in zip(scores, _highest(scores, count), strict=True)
        for index, score in zip(highest.tolist(), row[highest].tolist(), strict=True)
    ]
    return Tensor(tensor.name, "BYTES", (rows, count) if batched else (count,), pack_strings(best))


def _highest(scores: NDArray[Any], count: int) -> Iterable[NDArray[np.intp]]:
    """Return where the `count` highest values of each row are: the highest first, of equal ones the first, and NaN as
    -inf."""
    if scores.dtype.kind == "f":
        scores = np.where(np.isnan(scores), -np.inf, scores)
    columns = scores.shape[1]
    if columns > SORTED_COLUMNS:
        return (_highest_of_row(row, count) for row in scores)
    # A stable sort, from the last: what is equal stays in order once it is turned round.
    ranked: NDArray[np.intp] = columns - 1 - np.argsort(scores[:, ::-1], axis=1, kind="stable")[:, ::-1]
    return ranked[:, :count]


def _highest_of_row(row: NDArray[Any], count: int) -> NDArray[np.intp]:
    if 0 < count < len(row):
        least = np.partition(row, len(row) - count)[len(row) - count]
        above, equal = np.flatnonzero(row > least), np.flatnonzero(row == least)
        found = np.sort(np.concatenate([above, equal[: count - len(above)]]))
    else:
        found = np.arange(count)
    return found[::-1][np.argsort(row[found[::-1]], kind="stable")][::-1]


def _scores(tensor: Tensor) -> NDArray[Any]:
    """Return the elements as an array of one dimension. Raises FailedError where the data does not fit the shape."""
    if len(tensor.data) != math.prod(tensor.shape) * DTYPES[tensor.datatype].itemsize:
        raise _misfit(tensor)
    return np.frombuffer(tensor.data, DTYPES[tensor.datatype])


def to_values(tensor: Tensor) -> tuple[Any, ...]:
    """Return the elements as Python numbers, row-major. Only for the datatypes of FORMATS. Raises FailedError where the
    data does not fit the shape."""
    try:
        return struct.unpack(f"<{math.prod(tensor.shape)}{FORMATS[tensor.datatype]}", tensor.data)
    except struct.error:
        raise _misfit(tensor) from None


def value_pieces(tensor: Tensor, count: int) -> Iterator[tuple[Any, ...]]:
    """Yield the elements, so many at a time, as `to_values` returns them."""
    code, size = FORMATS[tensor.datatype], DTYPES[tensor.datatype].itemsize
    elements = math.prod(tensor.shape)
    if len(tensor.data) != elements * size:
        raise _misfit(tensor)
    for start in range(0, elements, count):
        yield struct.unpack_from(f"<{min(count, elements - start)}{code}", tensor.data, start * size)


def _misfit(tensor: Tensor) -> FailedError:
    return FailedError(f"output {tensor.name!r} is not what its shape says: {len(tensor.data)} bytes")


def pack_strings(items: Iterable[bytes]) -> bytes:
    """Return the wire form of BYTES elements."""
    return b"".join([struct.pack("<I", len(item)) + item for item in items])


def count_strings(tensor: Tensor, most: int) -> int:
    """Return how many elements a BYTES tensor has, `most` + 1 where it has more. Raises InvalidError where a length
    points past the end."""
    data, position, count = tensor.data, 0, 0
    end = len(data)
    while position < end and count <= most:
        if position + 4 > end or (position := position + 4 + _LENGTH.unpack_from(data, position)[0]) > end:
            raise InvalidError(f"tensor {tensor.name!r}: its element {count} ends after its data do")
        count += 1
    return count


def unpack_strings(tensor: Tensor) -> list[memoryview]:
    """Return the elements of a BYTES tensor. Raises InvalidError where a length points past the end."""
    return list(each_string(tensor))


def each_string(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the elements of a BYTES tensor. Raises InvalidError where a length points past the end."""
    data = memoryview(tensor.data)
    position, end, count = 0, len(data), 0
    while position < end:
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        if start > end or position > end:
            raise InvalidError(f"tensor {tensor.name!r}: its element {count} ends after its data do")
        yield data[start:position]
        count += 1
