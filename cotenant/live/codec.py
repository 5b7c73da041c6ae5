"""Encode and decode inference requests and responses of HTTP: JSON, followed by binary tensors.

The binary tensor extension: a body is JSON, then the raw tensors of those inputs that state a `binary_data_size`, in
their order. A header says how long the JSON is; where it says 0, the whole body is the one input of the model.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Annotated, Any

import msgspec

from cotenant.core.tensor import DTYPES, ModelInfo, Tensor, total_bytes
from cotenant.errors import InvalidError, MalformedError
from cotenant.live.elements import (
    FORMATS,
    check_elements,
    check_size,
    each_string,
    pack_strings,
    to_values,
    value_pieces,
)
from cotenant.live.json_numbers import VALUES, json_list, packed_numbers
from cotenant.live.limits import MAX_AT_ONCE, MAX_ELEMENTS, MAX_JSON_ANSWER, MAX_RANK
from cotenant.live.oip import (
    Data,
    InferRequest,
    InferResponse,
    RequestedOutput,
    check_request,
    read_shared,
    requested_outputs,
    scheduling,
)
from cotenant.live.shared_memory import OutputRegion, SharedMemoryNamedError, SharedTensors

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]


class _TensorParameters(msgspec.Struct):
    binary_data_size: Size | None = None
    binary_data: bool | None = None
    classification: Size = 0
    shared_memory_region: str | None = None
    shared_memory_offset: Size = 0
    shared_memory_byte_size: Size = 0


class InputTensor(msgspec.Struct):
    """Hold an input as JSON has it. data: flat or nested."""

    name: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_RANK)]
    datatype: str
    data: msgspec.Raw = msgspec.Raw(b"")
    parameters: _TensorParameters | None = None


class _Output(msgspec.Struct):
    name: str
    parameters: _TensorParameters | None = None


class _Request(msgspec.Struct):
    inputs: list[InputTensor]
    outputs: list[_Output] = []
    id: str = ""
    parameters: dict[str, bool | int | float | str] = {}


class _ResponseTensor(msgspec.Struct, omit_defaults=True):
    name: str
    datatype: str
    shape: Sequence[int]
    parameters: dict[str, int | str] | None = None
    data: Sequence[Any] | msgspec.Raw | None = None


class _Response(msgspec.Struct, omit_defaults=True, kw_only=True):
    id: str = ""
    model_name: str
    model_version: str
    outputs: list[_ResponseTensor]


class ResponseFormat(msgspec.Struct, frozen=True):
    """Which outputs a caller wants in binary: those of `by_name`, and `binary` for all others; and which in shared
    memory: those of `regions`."""

    binary: bool = False
    by_name: dict[str, bool] = {}
    regions: dict[str, OutputRegion] = {}

    def is_binary(self, name: str) -> bool:
        return self.by_name.get(name, self.binary)


_JSON = ResponseFormat()
_BINARY = ResponseFormat(binary=True)
_TOO_DEEP = "the JSON is nested too deeply"

_request = msgspec.json.Decoder(_Request)
_encoder = msgspec.json.Encoder()
_any_decoder = msgspec.json.Decoder()
_lists: dict[str, Any] = {
    "BOOL": list[bool],
    "FP32": list[float],
    "FP64": list[float],
    "BYTES": list[str],
} | {name: list[int] for name in FORMATS if "INT" in name}
_flat = {name: msgspec.json.Decoder(kind) for name, kind in _lists.items()}


def decode(
    body: Data,
    info: ModelInfo,
    *,
    header: int | None = None,
    block: object | None = None,
    start: int = 0,
    shared: SharedTensors | None = None,
) -> tuple[InferRequest, ResponseFormat]:
    """Return a request for a model, checked against it, and the format of its response.

    header: bytes of JSON at the beginning of the body; None where it is all JSON. block, start: the memory that
    workers share, if the body lies there, and at which byte. shared: reads what lies in callers' shared memory. Raises
    MalformedError, InvalidError, UnavailableError, and SharedMemoryNamedError for a tensor in shared memory where none
    is given.
    """
    if header is None:
        wire, tail = _parse(body), None
    elif header == 0:
        return _decode_raw(body, info, block, start), _BINARY
    elif header > len(body):
        raise InvalidError(f"Inference-Header-Content-Length is {header}, but the body has {len(body)} bytes")
    else:
        view = memoryview(body)
        wire, tail = _parse(view[:header]), view[header:]
    # Before any data are read: what reading them may cost is bounded by what the model takes.
    outputs, format_ = _requested(wire, shared) if wire.outputs or wire.parameters else ((), _JSON)
    check_request(info, wire.inputs, outputs)
    position = 0
    inputs = []
    for given in wire.inputs:
        size = None
        if given.parameters is not None:
            if given.parameters.shared_memory_region is not None:
                inputs.append(_shared_input(given, given.parameters, shared))
                continue
            size = given.parameters.binary_data_size
        if size is None:
            inputs.append(read_tensor(given))
            continue
        if tail is None or position + size > len(tail):
            raise InvalidError(
                f"input {given.name!r}: binary_data_size is {size}, but {len(tail or b'') - position} bytes are left "
                "behind the JSON; is Inference-Header-Content-Length right?"
            )
        data = tail[position : position + size]
        assert header is not None
        tensor = Tensor(given.name, given.datatype, given.shape, data, block, start + header + position)
        check_size(tensor)
        inputs.append(tensor)
        position += size
    if tail is not None and position < len(tail):
        raise InvalidError(f"{len(tail) - position} bytes are left behind the last input")
    timeout, priority = scheduling(wire.parameters)
    request = InferRequest(
        model=info.name,
        version=info.version,
        id=wire.id,
        inputs=tuple(inputs),
        outputs=outputs,
        timeout=timeout,
        priority=priority,
        parameters=wire.parameters,
        shared=shared,
    )
    _check_format(request, format_, info)
    return request, format_


def _parse(text: Data) -> _Request:
    try:
        return _request.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"not an inference request: {error}") from None
    except RecursionError:
        raise MalformedError(_TOO_DEEP) from None


def _shared_input(given: InputTensor, parameters: _TensorParameters, shared: SharedTensors | None) -> Tensor:
    """Return an input that lies in shared memory."""
    region, offset = parameters.shared_memory_region, parameters.shared_memory_offset
    if shared is None or region is None:
        raise SharedMemoryNamedError
    return read_shared(shared, given, region, offset, parameters.shared_memory_byte_size)


def _requested(wire: _Request, shared: SharedTensors | None) -> tuple[tuple[RequestedOutput, ...], ResponseFormat]:
    """Return the outputs that a caller asks for, and their format."""
    format_ = _JSON
    parameters = wire.parameters
    if parameters and parameters.pop("binary_data_output", False) is True:
        format_ = _BINARY
    outputs: tuple[RequestedOutput, ...] = ()
    if wire.outputs:
        outputs = tuple(
            [
                RequestedOutput(output.name, output.parameters.classification if output.parameters else 0)
                for output in wire.outputs
            ]
        )
        own = {
            output.name: output.parameters.binary_data
            for output in wire.outputs
            if output.parameters and output.parameters.binary_data is not None
        }
        if own:
            format_ = ResponseFormat(format_.binary, own)
        if any(output.parameters and output.parameters.shared_memory_region is not None for output in wire.outputs):
            format_ = msgspec.structs.replace(format_, regions=_output_regions(wire.outputs, shared))
    return outputs, format_


def _output_regions(outputs: Sequence[_Output], shared: SharedTensors | None) -> dict[str, OutputRegion]:
    if shared is None:
        raise SharedMemoryNamedError
    regions: dict[str, OutputRegion] = {}
    for output in outputs:
        own = output.parameters
        if own is not None and own.shared_memory_region is not None:
            regions[output.name] = shared.output(
                own.shared_memory_region, own.shared_memory_offset, own.shared_memory_byte_size
            )
    return regions


def _check_format(request: InferRequest, format_: ResponseFormat, info: ModelInfo) -> None:
    """Raise InvalidError for an output in half precision, which JSON does not have, before the model runs."""
    for spec in info.outputs:
        if spec.datatype not in ("FP16", "BF16") or format_.is_binary(spec.name) or spec.name in format_.regions:
            continue
        if not request.outputs or any(output.name == spec.name for output in request.outputs):
            raise InvalidError(
                f"output {spec.name!r} is {spec.datatype}, which JSON cannot carry; ask for it with binary_data"
            )


def check_json_outputs(info: ModelInfo) -> None:
    """Raise InvalidError for a model with an output that JSON cannot carry."""
    for spec in info.outputs:
        if spec.datatype in ("FP16", "BF16"):
            raise InvalidError(f"output {spec.name!r} is {spec.datatype}, which JSON cannot carry; use infer")


def read_tensor(given: InputTensor) -> Tensor:
    """Return an input whose data are JSON. Raises MalformedError, InvalidError."""
    return Tensor(given.name, given.datatype, given.shape, _numbers(given))


def _numbers(given: InputTensor) -> bytes | bytearray:
    """Return the `data` of an input, flat or nested, as raw bytes."""
    datatype, raw = given.datatype, given.data
    decoder = _flat.get(datatype)
    if decoder is None:
        raise InvalidError(
            f"input {given.name!r} is {datatype}, which JSON cannot carry; send it in binary, with binary_data_size"
        )
    if not raw:
        raise MalformedError(f"input {given.name!r} has neither 'data' nor a binary_data_size")
    expected = math.prod(given.shape)
    if not expected or datatype == "BYTES":
        check_elements(given)
    data: bytes | bytearray
    try:
        if len(raw) > MAX_AT_ONCE and expected and datatype != "BYTES":
            count, data = packed_numbers(raw, decoder, FORMATS[datatype], expected)
        else:
            items = _items(raw, datatype, decoder)
            count = len(items)
            if datatype == "BYTES":
                data = pack_strings([item.encode() for item in items])
            else:
                data = struct.pack(f"<{count}{FORMATS[datatype]}", *items)
    except (msgspec.DecodeError, UnicodeError, OverflowError, TypeError, ValueError, struct.error) as error:
        raise MalformedError(f"input {given.name!r}: 'data' is not a list of {datatype}: {error}") from None
    except RecursionError:
        raise MalformedError(_TOO_DEEP) from None
    if count != expected:
        raise MalformedError(
            f"input {given.name!r}: 'data' has {count} elements, but shape {list(given.shape)} has {expected}"
        )
    return data


def _items(raw: msgspec.Raw, datatype: str, decoder: msgspec.json.Decoder[list[Any]]) -> list[Any]:
    """Return the elements of a list, flat or nested."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError:
        flat: list[Any] = msgspec.convert(_flatten(_any_decoder.decode(raw)), _lists[datatype])
        return flat


def _flatten(items: Any) -> list[Any]:
    """Return nested lists, of one length at each level, as one list. Raises TypeError, ValueError."""
    depth = 0
    while isinstance(items, list) and items and isinstance(items[0], list):
        width, depth = len(items[0]), depth + 1
        if depth >= MAX_RANK:
            raise ValueError(f"it is nested in more than {MAX_RANK} levels")
        if any(type(item) is not list or len(item) != width for item in items):
            raise ValueError("its rows differ in length")
        items = list(chain.from_iterable(items))
    if not isinstance(items, list):
        raise TypeError("it is not a list")
    return items


def _decode_raw(body: Data, info: ModelInfo, block: object | None, start: int) -> InferRequest:
    """Decode a raw binary request, whose body is the one input of the model, as one row."""
    if len(info.inputs) != 1:
        raise InvalidError(f"a raw binary request has one input, but model {info.name!r} takes {len(info.inputs)}")
    spec = info.inputs[0]
    shape = [1, *spec.shape[1:]] if info.max_batch_size else list(spec.shape)
    open_dimensions = [index for index, size in enumerate(shape) if size < 0]
    if spec.datatype == "BYTES":
        # The one element, without its length.
        shape = [1 if size < 0 else size for size in shape]
        body, block = pack_strings([bytes(body)]), None
    elif len(open_dimensions) > 1:
        raise InvalidError(
            f"a raw binary request says no shape, but input {spec.name!r} of model {info.name!r} leaves "
            f"{len(open_dimensions)} dimensions open; send JSON before it"
        )
    elif open_dimensions:
        known = math.prod(size for size in shape if size >= 0) * DTYPES[spec.datatype].itemsize
        shape[open_dimensions[0]] = len(body) // known if known else 0
    tensor = Tensor(spec.name, spec.datatype, tuple(shape), memoryview(body), block, start)
    check_request(info, (tensor,), ())
    check_size(tensor)
    return InferRequest(model=info.name, version=info.version, inputs=(tensor,))


def takes_long(request: InferRequest, response: InferResponse, format_: ResponseFormat) -> bool:
    """Return whether `encode` belongs in a thread: large outputs are classified, written as JSON or copied to shared
    memory."""
    return total_bytes(response.outputs) > MAX_AT_ONCE and (
        bool(format_.regions)
        or request.classifies
        or not all(format_.is_binary(tensor.name) for tensor in response.outputs)
    )


def encode(
    request: InferRequest, response: InferResponse, info: ModelInfo, format_: ResponseFormat
) -> tuple[bytes, list[Data]]:
    """Return the JSON of a response, and the tensors that follow it in binary.

    A number that JSON does not have (NaN, infinity) becomes null. Raises RequestError's children where the outputs are
    not what was asked for.
    """
    outputs, tail = [], []
    room = MAX_JSON_ANSWER
    for tensor in requested_outputs(request, response, info):
        if format_.regions and tensor.name in format_.regions:
            region = format_.regions[tensor.name]
            region.write(tensor.data)
            where: dict[str, int | str] = {
                "shared_memory_region": region.name,
                "shared_memory_offset": region.offset,
                "shared_memory_byte_size": len(tensor.data),
            }
            outputs.append(_ResponseTensor(tensor.name, tensor.datatype, tensor.shape, where))
        elif format_.is_binary(tensor.name):
            tail.append(tensor.data)
            outputs.append(
                _ResponseTensor(tensor.name, tensor.datatype, tensor.shape, {"binary_data_size": len(tensor.data)})
            )
        else:
            values = listed(tensor, room)
            if isinstance(values, msgspec.Raw):
                room -= len(memoryview(values))
            outputs.append(_ResponseTensor(tensor.name, tensor.datatype, tensor.shape, None, values))
    response_json = _Response(id=request.id, model_name=response.model, model_version=response.version, outputs=outputs)
    return _encoder.encode(response_json), tail


def listed(tensor: Tensor, room: int = MAX_JSON_ANSWER) -> Sequence[Any] | msgspec.Raw:
    """Return the elements of an output as JSON carries them, of a large one as JSON. room: bytes that it may take.
    Raises InvalidError for more, and for bytes that are no text."""
    if len(tensor.data) <= MAX_AT_ONCE:
        return list(chain.from_iterable(_text_pieces(tensor))) if tensor.datatype == "BYTES" else to_values(tensor)
    written = json_list(_text_pieces(tensor) if tensor.datatype == "BYTES" else value_pieces(tensor, VALUES), room)
    if written is None:
        raise InvalidError(
            f"output {tensor.name!r} takes more than the {MAX_JSON_ANSWER} bytes of JSON that a response may have; ask "
            "for binary_data"
        )
    return written


def _text_pieces(tensor: Tensor) -> Iterator[list[str]]:
    elements = each_string(tensor)
    try:
        while piece := [str(element, "utf-8") for element in islice(elements, VALUES)]:
            yield piece
    except UnicodeDecodeError:
        raise InvalidError(
            f"output {tensor.name!r} holds bytes that are no text, which JSON cannot carry; ask for binary_data"
        ) from None
