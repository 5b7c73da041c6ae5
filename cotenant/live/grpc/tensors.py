"""Translate between messages of inference and the server's requests and responses."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from cotenant.core.tensor import DTYPES, Tensor
from cotenant.errors import InvalidError, MalformedError
from cotenant.live.elements import FORMATS, check_elements, check_size, pack_strings
from cotenant.live.limits import MAX_FIELDS, MAX_LISTED, MAX_RANK
from cotenant.live.oip import Data, InferRequest, InferResponse, RequestedOutput, check_request, read_shared, scheduling
from cotenant.live.shared_memory import OutputRegion, SharedMemoryNamedError, SharedTensors
from cotenant.protocol import messages

# Datatype → field of InferTensorContents.
_CONTENTS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}

# Fields that protobuf writes as a tensor's own bytes, with their numbers.
_RAW_FIELDS = {"bool_contents": 1, "fp32_contents": 6, "fp64_contents": 7}
# What protobuf has in each field.
_NUMBERS = {
    "bool_contents": np.bool_,
    "int_contents": np.int32,
    "int64_contents": np.int64,
    "uint_contents": np.uint32,
    "uint64_contents": np.uint64,
    "fp32_contents": np.float32,
    "fp64_contents": np.float64,
}
_MANY = 1 << 7  # elements from which on that is the quicker way


def parse_message(message: Any, wire: bytes) -> Any:
    # Without this, gRPC would answer UNKNOWN.
    try:
        return message.FromString(wire)
    except DecodeError:
        raise MalformedError(f"not the message {message.DESCRIPTOR.full_name}") from None


def check_fields(wire: bytes) -> None:
    """Raise InvalidError where a message has more fields than an inference request needs: what an empty one of two
    bytes takes in memory is far more. What is no message at all is left to protobuf."""
    end = len(wire)
    if end <= 2 * MAX_FIELDS:
        return
    position = fields = 0
    while position < end:
        fields += 1
        if fields > MAX_FIELDS:
            raise InvalidError(f"an inference request of more than {MAX_FIELDS} fields")
        tag, position = _varint(wire, position)
        match tag & 7:
            case 0:
                _, position = _varint(wire, position)
            case 1:
                position += 8
            case 2:
                size, position = _varint(wire, position)
                position += size
            case 5:
                position += 4
            case _:  # a group, or no field at all
                raise MalformedError("not an inference request: it has a field of no known type")


def _varint(wire: bytes, position: int) -> tuple[int, int]:
    """Return an integer of at most ten bytes, and where it ends."""
    value = 0
    for shift, byte in zip(range(0, 70, 7), wire[position : position + 10], strict=False):
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise MalformedError("not an inference request: it ends within an integer, or holds one that is too long")


def plain_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a map of any of the protocol's oneofs as plain values."""
    return {
        name: getattr(value, kind) for name, value in given.items() if (kind := value.WhichOneof("parameter_choice"))
    }


def check_version(version: str) -> None:
    if version and not version.isdecimal():
        raise InvalidError(f"version {version!r} is not an integer; leave it empty for the newest")


def read_request(message: Any, info: Any, remaining: float | None, shared: SharedTensors | None = None) -> InferRequest:
    """Return a request, checked against its model. shared: reads what lies in callers' shared memory. Raises
    SharedMemoryNamedError for a tensor in shared memory where none is given, and RequestError's other children."""
    given = plain_parameters(message.parameters)
    timeout, priority = scheduling(given)
    raw = message.raw_input_contents
    elsewhere = [given.name for given in message.inputs if "shared_memory_region" in given.parameters]
    if elsewhere and shared is None:
        raise SharedMemoryNamedError
    sent_inline = len(message.inputs) - len(elsewhere)
    if raw and len(raw) != sent_inline:
        raise InvalidError(f"{sent_inline} inputs, but {len(raw)} raw_input_contents; give one to each or none")
    heads = [_read_head(given) for given in message.inputs]
    outputs = []
    for wanted in message.outputs:
        own = plain_parameters(wanted.parameters)
        region = None
        if "shared_memory_region" in own:
            if shared is None:
                raise SharedMemoryNamedError
            region = shared.output(*_place(own))
        count = own.get("classification", 0)
        if type(count) is not int or count < 0:
            raise InvalidError(f"output {wanted.name!r}: classification {count!r} is not a non-negative integer")
        outputs.append(RequestedOutput(wanted.name, count, region))
    # Before any data are read: what reading them may cost is bounded by what the model takes.
    check_request(info, heads, outputs)
    inputs = []
    contents = iter(raw)
    for sent, head in zip(message.inputs, heads, strict=True):
        if shared is not None and "shared_memory_region" in sent.parameters:
            inputs.append(read_shared(shared, head, *_place(plain_parameters(sent.parameters))))
            continue
        if raw and sent.HasField("contents"):
            raise InvalidError(f"input {sent.name!r} has both contents and raw_input_contents; give one of them")
        data = next(contents) if raw else _contents(sent, check_elements(head))
        tensor = Tensor(head.name, head.datatype, head.shape, data)
        check_size(tensor)
        inputs.append(tensor)
    return InferRequest(
        model=info.name,
        version=info.version,
        id=message.id,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        timeout=timeout,
        patience=None if remaining is None else max(remaining, 0.0),
        priority=priority,
        parameters=given,
        shared=shared,
    )


def _place(parameters: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return the region, offset and size in shared memory that a tensor's parameters name."""
    region = parameters["shared_memory_region"]
    numbers = [parameters.get(f"shared_memory_{name}", 0) for name in ("offset", "byte_size")]
    if not isinstance(region, str) or any(type(number) is not int or number < 0 for number in numbers):
        raise InvalidError("a region of shared memory is a name, an offset and a byte_size")
    return region, numbers[0], numbers[1]


def _read_head(given: Any) -> Tensor:
    """Return an input without its data."""
    shape = tuple(given.shape)
    if len(shape) > MAX_RANK:
        raise InvalidError(f"input {given.name!r} has {len(shape)} dimensions; at most {MAX_RANK} are read")
    if any(size < 0 for size in shape):
        raise InvalidError(f"input {given.name!r}: shape {list(shape)} has a negative size")
    return Tensor(given.name, given.datatype, shape, b"")


def _contents(given: Any, expected: int) -> bytes:
    """Return the typed contents of an input as raw bytes. expected: elements that it has by its shape."""
    field = _CONTENTS.get(given.datatype)
    if field is None:
        raise InvalidError(f"input {given.name!r}: {given.datatype} has no typed contents; send raw_input_contents")
    items = getattr(given.contents, field)
    if len(items) > min(expected, MAX_LISTED):
        raise InvalidError(
            f"input {given.name!r} has {len(items)} {field}, but its shape {expected} elements; more than {MAX_LISTED} "
            "have to be sent as raw_input_contents"
        )
    if given.datatype == "BYTES":
        return pack_strings(items)
    if len(items) >= _MANY and (data := _many(given, field, items)) is not None:
        return data
    try:
        return struct.pack(f"<{len(items)}{FORMATS[given.datatype]}", *items)
    except struct.error as error:
        raise InvalidError(f"input {given.name!r}: {field} does not fit {given.datatype}: {error}") from None


def _many(given: Any, field: str, items: Any) -> bytes | None:
    """Return typed contents as raw bytes, with little work for each of the elements, or none; None where they do not
    fit the datatype."""
    dtype, number = DTYPES[given.datatype], _RAW_FIELDS.get(field)
    if number is not None:
        size = len(items) * dtype.itemsize
        wire = given.contents.SerializeToString()
        data: bytes = wire[len(wire) - size :]
        if wire[: len(wire) - size] == _parts(number, data)[0]:  # no other contents
            return data
    numbers: NDArray[Any] = np.fromiter(items, _NUMBERS[field], count=len(items))
    if dtype.itemsize < numbers.dtype.itemsize:
        bounds = np.iinfo(dtype)
        if numbers.min() < bounds.min or numbers.max() > bounds.max:
            return None
    return numbers.astype(dtype, copy=False).tobytes()


def write_response(request: InferRequest, response: InferResponse, outputs: Sequence[Tensor]) -> bytes:
    """Return the wire form of a ModelInferResponse. Tensors are appended to protobuf's output; protobuf would write the
    same, but copy them twice."""
    regions = {wanted.name: wanted.region for wanted in request.outputs if wanted.region is not None}
    head = messages.ModelInferResponse(
        model_name=response.model,
        model_version=response.version,
        id=request.id,
        outputs=[
            {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
            | (_written(tensor, regions[tensor.name]) if tensor.name in regions else {})
            for tensor in outputs
        ],
    )
    inline = [tensor for tensor in outputs if tensor.name not in regions] if regions else outputs
    return b"".join([head.SerializeToString(), *[part for tensor in inline for part in _parts(6, tensor.data)]])


def _written(tensor: Tensor, region: OutputRegion) -> dict[str, Any]:
    """Put an output into shared memory; return the field that says so."""
    region.write(tensor.data)
    return {
        "parameters": {
            "shared_memory_region": {"string_param": region.name},
            "shared_memory_offset": {"int64_param": region.offset},
            "shared_memory_byte_size": {"int64_param": len(tensor.data)},
        }
    }


def field(number: int, data: Data) -> bytes:
    return b"".join(_parts(number, data))


def _parts(number: int, data: Data) -> tuple[bytes, Data]:
    """Return a protobuf field that holds bytes: its tag and length, and the bytes."""
    head, size = bytearray([number << 3 | 2]), len(data)
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head), data


# Appended to the wire form of a response, this adds the only parameter that a response has.
FINAL = messages.ModelInferResponse(parameters={"triton_final_response": {"bool_param": True}}).SerializeToString()
