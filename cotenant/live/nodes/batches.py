"""Put the tensors of a batch into frames, and take them out, checked: of either end the other may be anybody's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from cotenant.core.tensor import DTYPES, ModelInfo, Tensor, TensorSpec, nbytes
from cotenant.errors import FailedError, InvalidError, NodeError, RequestError
from cotenant.live.batch_listener import Payload
from cotenant.live.elements import check_elements, check_size
from cotenant.live.limits import MAX_ERROR, MAX_RANK
from cotenant.live.oip import check_request
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


class ModelTensors:
    """Take the tensors of one model's batches out of frames, checked.

    Most are inline, in the order and the shapes that the model has, but for their rows. A fast path recognises
    those; all others are checked in full, which also says what is wrong.
    """

    def __init__(self, model: WorkerModel) -> None:
        self.model = model
        self._info = info_of(model)
        self._inputs = _fixed_rows(model, model.inputs)
        self._outputs = _fixed_rows(model, model.outputs)
        self._specs = {spec.name: spec for spec in model.outputs}

    def are_plain_inputs(self, requests: Sequence[list[TensorPart]]) -> bool:
        """Return whether the fast path recognises these as the inputs of one batch."""
        rows = 0
        for parts in requests:
            more = _fast_rows(parts, self._inputs)
            if not more:
                return False
            rows += more
        return 1 <= rows <= self.model.max_batch

    def inputs(
        self, requests: Sequence[list[TensorPart]], body: memoryview | None, block: Block | None
    ) -> list[Payload]:
        """Return the inputs of each request. Raises NodeError unless they are those of one batch of the model."""
        model, rows = self.model, 0
        payloads = [take_tensors(parts, body, block) for parts in requests]
        for payload in payloads:
            self._check_inputs(payload)
            rows += payload[0].shape[0] if model.batched and payload else 1
        if not 1 <= rows <= max(model.max_batch, 1):
            raise NodeError(f"a batch of {rows} rows for model {model.name!r}, which has 1 to {model.max_batch} here")
        return payloads

    def outputs(
        self, requests: Sequence[list[TensorPart] | str], body: memoryview | None, block: Block | None
    ) -> list[Payload | RequestError]:
        """Return the outputs of each request, or why it failed. Raises NodeError unless they may be those of the model:
        the names and datatypes that it has, and as much data as their shapes say."""
        answers: list[Payload | RequestError] = []
        for parts in requests:
            if isinstance(parts, str):
                answers.append(FailedError(parts[:MAX_ERROR]))
                continue
            if _fast_rows(parts, self._outputs):
                payload = tuple(
                    [Tensor(part.name, part.datatype, part.shape, cast(memoryview, part.data)) for part in parts]
                )
            else:
                payload = take_tensors(parts, body, block)
                self._check_outputs(payload)
            answers.append(payload)
        return answers

    def _check_inputs(self, payload: Payload) -> None:
        try:
            check_request(self._info, payload, ())
            for tensor in payload:
                check_size(tensor)
        except InvalidError as error:
            raise NodeError(str(error)) from None

    def _check_outputs(self, payload: Payload) -> None:
        name = self.model.name
        if len({tensor.name for tensor in payload}) < len(payload):
            raise NodeError(f"an output of model {name!r} is there twice")
        for tensor in payload:
            spec = self._specs.get(tensor.name)
            if self._specs and (spec is None or spec.datatype != tensor.datatype):
                raise NodeError(f"model {name!r} has no output {tensor.name!r} that is {tensor.datatype}")
            _check_data(tensor)


def tensors_by_model(models: Iterable[WorkerModel]) -> dict[str, ModelTensors]:
    """Return what takes the tensors of each model of a lane, by name."""
    return {model.name: ModelTensors(model) for model in models}


class _Rows(msgspec.Struct, frozen=True):
    """A tensor of fixed shape but for its rows. shape, size: of a row; size is in bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int


def _fixed_rows(model: WorkerModel, specs: Sequence[TensorSpec]) -> tuple[_Rows, ...]:
    """Return what rows the tensors of a model have; () where they are not all of fixed shape and size."""
    fixed = (
        spec.datatype in DTYPES and spec.shape[:1] == (-1,) and min(spec.shape[1:], default=1) > 0 for spec in specs
    )
    if not model.batched or not all(fixed):
        return ()
    return tuple(
        _Rows(spec.name, spec.datatype, spec.shape[1:], nbytes(spec.datatype, spec.shape[1:])) for spec in specs
    )


def _fast_rows(parts: Sequence[TensorPart], expected: Sequence[_Rows]) -> int:
    """Return how many rows these inline tensors all have; 0 where they are not as expected."""
    if not parts or len(parts) != len(expected):
        return 0
    rows = parts[0].shape[:1]
    if not rows:
        return 0
    for part, own in zip(parts, expected, strict=True):
        data = part.data
        if (
            data is None
            or part.name != own.name
            or part.datatype != own.datatype
            or part.shape != rows + own.shape
            or len(data) != rows[0] * own.size
        ):
            return 0
    return rows[0]


def take_tensors(parts: Sequence[TensorPart], body: memoryview | None, block: Block | None) -> Payload:
    """Return the tensors of a request. Raises NodeError where one lies outside of the body, or is too odd to be looked
    at."""
    tensors = []
    for part in parts:
        shape = part.shape
        if len(part.name) > MAX_NAME or len(shape) > MAX_RANK or any(size < 0 for size in shape):
            raise NodeError(f"tensor {part.name[:MAX_NAME]!r} has a name, a rank or a size that no tensor has")
        if part.datatype != "BYTES" and part.datatype not in DTYPES:
            raise NodeError(f"tensor {part.name!r} is {part.datatype[:MAX_NAME]!r}, which is not a datatype")
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
