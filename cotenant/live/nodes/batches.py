"""Put the tensors of a batch into frames, and take them out, checked: of either end the other may be anybody's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from cotenant.core.tensor import DTYPES, ModelInfo, Tensor, TensorSpec, nbytes
from cotenant.errors import FailedError, InvalidError, NodeError, RequestError
from cotenant.live.limits import MAX_ERROR, MAX_RANK
from cotenant.live.oip import check_elements, check_request, check_size
from cotenant.live.pool import Payload
from cotenant.worker.arena import Block
from cotenant.worker.wire import LARGE, TensorPart, WorkerModel, aligned

Body = list[bytes | bytearray | memoryview]
MAX_NAME = 1 << 10  # characters of a tensor's name


def put_tensors(payloads: Sequence[Payload], body: Body, start: int = 0) -> tuple[list[list[TensorPart]], int]:
    """Return how the tensors of requests travel, and the size of the body so far. Large ones are added to `body`, each
    at a multiple of `wire.ALIGN`. start: the size of the body before."""
    requests = []
    for payload in payloads:
        parts = []
        for tensor in payload:
            size = len(tensor.data)
            if size < LARGE:
                data = cast(memoryview, tensor.data)
                parts.append(TensorPart(tensor.name, tensor.datatype, tensor.shape, data))
                continue
            parts.append(TensorPart(tensor.name, tensor.datatype, tensor.shape, None, start, size))
            body.append(tensor.data)
            start += size
            if padding := aligned(size) - size:
                body.append(bytes(padding))
                start += padding
        requests.append(parts)
    return requests, start


def take_tensors(parts: Sequence[TensorPart], body: memoryview | None, block: Block | None) -> Payload:
    """Return the tensors of a request. Raises NodeError where one lies outside of the body, or is too odd to be looked
    at; `check_inputs` and `check_outputs` look further."""
    tensors = []
    for part in parts:
        shape = part.shape
        if len(part.name) > MAX_NAME or len(shape) > MAX_RANK or any(size < 0 for size in shape):
            raise NodeError(f"tensor {part.name[:MAX_NAME]!r} has a name, a rank or a size that no tensor has")
        if part.datatype != "BYTES" and part.datatype not in DTYPES:
            raise NodeError(f"tensor {part.name!r} is {part.datatype[:MAX_NAME]!r}, which is no datatype")
        if part.data is not None:
            tensors.append(Tensor(part.name, part.datatype, shape, part.data))
            continue
        end = part.start + part.size
        if body is None or part.start < 0 or part.size < 0 or end > len(body):
            raise NodeError(f"tensor {part.name!r} lies outside of its frame")
        data = body[part.start : end]
        tensors.append(Tensor(part.name, part.datatype, shape, data, block, 0 if block is None else part.start))
    return tuple(tensors)


def info_of(model: WorkerModel) -> ModelInfo:
    """Return a worker's model as the protocol of callers describes it, for its checks."""
    return ModelInfo(
        name=model.name,
        version="",
        platform=model.platform,
        inputs=model.inputs,
        outputs=model.outputs,
        max_batch_size=model.max_batch if model.batched else 0,
    )


def check_inputs(model: WorkerModel, payloads: Sequence[Payload]) -> None:
    """Raise NodeError unless these are the inputs of one batch of a model."""
    info, rows = info_of(model), 0
    for payload in payloads:
        try:
            check_request(info, payload, ())
            for tensor in payload:
                check_size(tensor)
        except InvalidError as error:
            raise NodeError(str(error)) from None
        rows += payload[0].shape[0] if model.batched and payload else 1
    if not 1 <= rows <= max(model.max_batch, 1):
        raise NodeError(f"a batch of {rows} rows for model {model.name!r}, which has 1 to {model.max_batch} here")


def check_outputs(model: WorkerModel, answers: Sequence[Payload | RequestError]) -> None:
    """Raise NodeError unless these may be outputs of a model: the names and datatypes that it has, and as much
    data as their shapes say."""
    specs = {spec.name: spec for spec in model.outputs}
    for answer in answers:
        if isinstance(answer, RequestError):
            continue
        if len({tensor.name for tensor in answer}) < len(answer):
            raise NodeError(f"an output of model {model.name!r} is there twice")
        for tensor in answer:
            if specs:
                _check_output(model.name, specs.get(tensor.name), tensor)
            _check_data(tensor)


def _check_output(model: str, spec: TensorSpec | None, tensor: Tensor) -> None:
    if spec is None or spec.datatype != tensor.datatype:
        raise NodeError(f"model {model!r} has no output {tensor.name!r} that is {tensor.datatype}")


def _check_data(tensor: Tensor) -> None:
    try:
        if tensor.datatype == "BYTES":
            check_size(tensor)
            return
        check_elements(tensor)
    except InvalidError as error:
        raise NodeError(str(error)) from None
    if len(tensor.data) != nbytes(tensor.datatype, tensor.shape):
        raise NodeError(
            f"output {tensor.name!r}: {len(tensor.data)} bytes for {tensor.datatype} of shape {list(tensor.shape)}"
        )


def take_answers(
    requests: Sequence[list[TensorPart] | str], body: memoryview | None, block: Block | None
) -> list[Payload | RequestError]:
    """Return the outputs of each request, or why it failed. Raises NodeError."""
    return [
        FailedError(parts[:MAX_ERROR]) if isinstance(parts, str) else take_tensors(parts, body, block)
        for parts in requests
    ]
