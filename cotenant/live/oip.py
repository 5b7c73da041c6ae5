"""Define the Open Inference Protocol v2 as values, shared by the HTTP and gRPC front ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from prometheus_client.registry import Collector

from cotenant import __version__
from cotenant.core.tensor import DTYPES, ModelInfo, Tensor, TensorSpec
from cotenant.errors import CotenantError, FailedError, InvalidError, RequestError
from cotenant.live.elements import FORMATS, TensorHead, check_elements, check_size, classify
from cotenant.live.limits import MAX_ERROR
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
    """A model in the repository index. state: READY (with a reason where it could not be loaded again), UNAVAILABLE
    (with a reason), LOADING or UNLOADING."""

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
