"""One request, however it is made, is answered at once and costs no other: shapes, integers, nesting, amplification."""

from __future__ import annotations

import gzip
import json
import re
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import grpc
import numpy as np
import pytest

from cotenant.core.tensor import ModelInfo, Tensor, TensorSpec
from cotenant.errors import CotenantError, FailedError, InvalidError
from cotenant.live import codec
from cotenant.live.elements import check_size, classify, unpack_strings
from cotenant.live.grpc import tensors
from cotenant.live.http.routes import find_route
from cotenant.live.limits import MAX_CLASSES, MAX_ERROR, MAX_FIELDS, MAX_RANK, MAX_STRINGS
from cotenant.live.oip import UNEXPECTED, public_message
from cotenant.protocol import messages
from tests.security.server import ORDINARY, PATIENCE, Served, post

ONE = ORDINARY["identity"]
PATH = "/v2/models/identity/infer"
ROW = {"x": [[0.5] * 16]}  # the same for `generate`
LONG = 1.0  # seconds of processor time that no refusal comes near; each of these took 4 to 8

HOSTILE: dict[str, bytes] = {
    "30,000 dimensions": json.dumps({"inputs": [ONE | {"shape": [2**63 - 1] * 30_000}]}).encode(),
    "400 dimensions": json.dumps({"inputs": [ONE | {"shape": [2**63 - 1] * 400}]}).encode(),
    "a dimension of 5,000 digits": b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%s]}]}' % (b"9" * 5000),
    "a timeout of 401 digits": json.dumps({"inputs": [ONE], "parameters": {"timeout": 10**400}}).encode(),
    "an element of 5,000 digits": b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[%s]}]}'
    % (b"9" * 5000),
    "lists in lists": b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,16],"data":'
    + b"[" * 900
    + b"]" * 900
    + b"}]}",
    "objects in objects": b'{"x":' * 100_000,
    "an output 100 times": json.dumps({"inputs": [ONE], "outputs": [{"name": "y"}] * 100}).encode(),
    "a name of 8 MiB": json.dumps({"inputs": [ONE | {"name": "x" * (8 << 20)}]}).encode(),
    "rows that are text": json.dumps({"inputs": [ONE | {"shape": [1, 16], "data": [["a"] * 8, "bcdefghi"]}]}).encode(),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_json_is_refused_at_once_in_few_words(server: Served, body: bytes) -> None:
    before = server.cpu()
    status, answer = server.ask(post(PATH, body))
    error = json.loads(answer)["error"]
    assert status in (400, 500) and len(error) <= MAX_ERROR and error != UNEXPECTED
    assert server.cpu() - before < LONG
    assert server.serves()


@pytest.mark.parametrize("name", ["timeout", "priority", "other"])
def test_integer_beyond_64_bits_as_a_parameter_is_the_callers_mistake(server: Served, name: str) -> None:
    generate = "/v2/models/identity/generate"
    for number in (2**63, 2**64, 10**400, -(2**63) - 1):
        own = {name: number}
        asked = {PATH: {"inputs": [ONE], "parameters": own}} | dict.fromkeys(
            (generate, f"{generate}_stream"), ROW | own
        )
        for path, body in asked.items():
            status, answer = server.ask(post(path, json.dumps(body).encode()))
            assert status == 400 and f"parameter '{name}': an integer beyond 64 bits" in json.loads(answer)["error"]
    assert server.serves()


@pytest.mark.parametrize("text", ["9" * 20, "9" * 5000, "-1", "+1", "1_0", "٣", "0x10", ""])
def test_header_that_is_no_length_is_refused(server: Served, text: str) -> None:
    line = b"Inference-Header-Content-Length: " + text.encode()
    data = post(PATH, b"{}").replace(b"Host: localhost", b"Host: localhost\r\n" + line)
    status, answer = server.ask(data)
    assert status == 400 and json.loads(answer)["error"].startswith("Inference-Header-Content-Length is ")
    assert server.serves()


def test_strings_that_nobody_asked_for_are_not_counted(server: Served) -> None:
    size = 8 << 20
    for model, shape in (("identity", [1, 2]), ("strings", [1, 2]), ("strings", [4, 2])):
        given = {"name": "x", "shape": shape, "datatype": "BYTES", "parameters": {"binary_data_size": size}}
        head = json.dumps({"inputs": [given]}).encode()
        before = server.cpu()
        path = f"/v2/models/{model}/infer"
        status, _ = server.ask(post(path, head + bytes(size), f"Inference-Header-Content-Length: {len(head)}"))
        assert status == 400 and server.cpu() - before < LONG
        packed = gzip.compress(head + bytes(size))
        lines = f"Inference-Header-Content-Length: {len(head)}", "Content-Encoding: gzip"
        assert server.ask(post(path, packed, *lines))[0] in (400, 413)
        assert server.cpu() - before < LONG
    assert server.serves()


INFO = ModelInfo(
    name="m",
    version="1",
    platform="",
    inputs=(TensorSpec("x", "BYTES", (-1, -1)),),
    outputs=(TensorSpec("y", "FP32", (-1, -1)),),
    max_batch_size=8,
)


def lines_run(body: bytes, header: int) -> int:
    """Count the lines of Python that refusing a body takes: work, where a time would depend on the machine."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        with pytest.raises(CotenantError):
            codec.decode(body, INFO, header=header)
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("shape", [[1, 1], [8, 2], [1, 2**40], [9, 1], [1]])
def test_refusing_strings_takes_no_more_work_where_more_are_sent(shape: list[int]) -> None:
    work = []
    for size in (1 << 10, 1 << 20):
        given = {"name": "x", "shape": shape, "datatype": "BYTES", "parameters": {"binary_data_size": size}}
        head = json.dumps({"inputs": [given]}).encode()
        work.append(lines_run(head + bytes(size), len(head)))
    assert work[1] <= work[0] + 5 and work[0] < 1000


@pytest.mark.parametrize("levels", [10, 31, 32, 33, 100, 500])
def test_nested_data_cost_work_in_proportion_to_their_bytes(levels: int) -> None:
    rows = [b"[" * levels + b'"a"' + b"]" * levels] * 10
    body = b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1,9],"data":[%s]}]}' % b",".join(rows)
    assert lines_run(body, len(body)) < len(body) + 500


def test_tensor_of_more_dimensions_than_any_is_refused_for_their_number() -> None:
    shape = [1] * (MAX_RANK + 1)
    with pytest.raises(CotenantError, match=f"length <= {MAX_RANK}"):
        codec.decode(json.dumps({"inputs": [ONE | {"shape": shape}]}).encode(), INFO)
    with pytest.raises(CotenantError, match=f"has {MAX_RANK + 1} dimensions; at most {MAX_RANK} are read"):
        tensors.read_request(input_of(shape, "BYTES", bytes_contents=[b"a"]), INFO, None)


def test_long_url_is_matched_without_going_back_over_it() -> None:
    part = "a" * 60_000
    url = b"/v2/models/" + part.encode()
    read = re.compile("[^/]+")

    def fastest(work: Callable[[], object]) -> float:
        times = []
        for _ in range(20):
            begun = time.process_time()
            work()
            times.append(time.process_time() - begun)
        return min(times)

    # Eight routes begin like this: each may read it once. Going back, each read it eight times.
    assert fastest(lambda: find_route(url)) < 16 * fastest(lambda: read.fullmatch(part))


def test_more_strings_than_a_tensor_may_have_are_refused() -> None:
    tensor = Tensor("x", "BYTES", (1, MAX_STRINGS + 1), bytes(4 * MAX_STRINGS + 4))
    with pytest.raises(InvalidError, match=f"has more than {MAX_STRINGS} elements"):
        check_size(tensor)
    check_size(Tensor("x", "BYTES", (1, 3), bytes(12)))
    with pytest.raises(InvalidError, match="more than 2 elements"):
        check_size(Tensor("x", "BYTES", (1, 2), bytes(12)))
    for data in (b"\1\0\0\0", b"\0\0\0", b"\xff\xff\xff\xffabc"):
        with pytest.raises(InvalidError, match="its element 0 ends after its data do"):
            check_size(Tensor("x", "BYTES", (1,), data))


@pytest.mark.parametrize("shape", [(0, 2**40, 2**40), (2**20, 0, 2**21), (0, 2**63 - 1)])
def test_empty_tensor_of_giant_dimensions_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidError, match="elements"):
        check_size(Tensor("x", "FP32", shape, b""))


# Over gRPC


def input_of(shape: list[int], datatype: str = "FP32", **contents: Any) -> Any:
    tensor = messages.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=shape, contents=contents)
    return messages.ModelInferRequest(model_name="identity", inputs=[tensor])


GRPC: dict[str, bytes] = {
    "30,000 dimensions": input_of([2**63 - 1] * 30_000, fp32_contents=[1]).SerializeToString(),
    "giant dimensions": input_of([1, 3, 0, 2**63 - 1], fp32_contents=[]).SerializeToString(),
    "more contents than the shape has": input_of([1, 16], fp32_contents=[0] * 1_000_000).SerializeToString(),
    "a million empty inputs": b"\x0a\x08identity" + b"\x2a\x00" * 1_000_000,
    "unknown fields before them": b"\x78\x01" + b"\x2a\x00" * 1_000_000,
    "a field that never ends": b"\xff" * (2 * MAX_FIELDS + 1),
    "no message": b"\x2a\xff\xff\xff\xff\x0f",
    "a name of 1 MiB": messages.ModelInferRequest(model_name="é" * (1 << 20)).SerializeToString(),
    "an output 100 times": messages.ModelInferRequest(
        model_name="identity",
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 16]}],
        outputs=[{"name": "y"}] * 100,
        raw_input_contents=[bytes(64)],
    ).SerializeToString(),
    "strings of zeros": messages.ModelInferRequest(
        model_name="strings",
        inputs=[{"name": "x", "datatype": "BYTES", "shape": [1, 2]}],
        raw_input_contents=[bytes(8 << 20)],
    ).SerializeToString(),
}


@pytest.mark.parametrize("message", GRPC.values(), ids=GRPC)
def test_hostile_message_is_refused_at_once_in_few_words(server: Served, message: bytes) -> None:
    before = server.cpu()
    with grpc.insecure_channel(server.grpc) as channel:
        infer: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            infer(message, timeout=PATIENCE)
    code, details = caught.value.code(), caught.value.details()
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    assert details is not None and 0 < len(details) <= MAX_ERROR
    assert server.cpu() - before < LONG
    assert server.serves()


def test_hostile_messages_in_a_stream_leave_its_other_requests(server: Served) -> None:
    good = messages.ModelInferRequest(
        model_name="identity",
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 16]}],
        raw_input_contents=[bytes(64)],
    ).SerializeToString()
    sent = [part for message in GRPC.values() for part in (message, good)]
    with grpc.insecure_channel(server.grpc) as channel:
        stream: Any = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=messages.ModelStreamInferResponse.FromString,
        )
        answers = [bool(answer.error_message) for answer in stream(iter(sent), timeout=PATIENCE)]
    assert answers == [True, False] * len(GRPC)


# What callers read


def test_error_has_one_line_a_bounded_length_and_no_folders() -> None:
    error = FailedError(
        "cannot load '/srv/a b/models/m/1/model.onnx': /opt/lib/x.so: no\r\nsuch \x1b[31m 5 requests/s at /"
    )
    shown = public_message(error)
    assert "/srv" not in shown and "/opt" not in shown and "model.onnx" in shown and "x.so" in shown
    assert "\\r\\nsuch \\x1b[31m 5 requests/s at /" in shown
    assert len(public_message(FailedError("x" * 10_000))) == MAX_ERROR
    assert len(public_message(FailedError("\0" * 10_000))) <= 4 * MAX_ERROR


def test_classification_of_nan_ranks_it_last() -> None:
    row = np.array([[np.nan, 1, np.inf, np.nan, -np.inf, 3]], np.float32)
    labels = classify(Tensor("y", "FP32", row.shape, row.tobytes()), 6, batched=True)
    indexes = [bytes(item).split(b":")[1] for item in unpack_strings(labels)]
    assert indexes[:3] == [b"2", b"5", b"1"] and set(indexes[3:]) == {b"0", b"3", b"4"}
    many = np.zeros((2, MAX_CLASSES), np.uint8)
    with pytest.raises(InvalidError, match=f"ask for {MAX_CLASSES} at most"):
        classify(Tensor("y", "UINT8", many.shape, many.tobytes()), MAX_CLASSES, batched=True)


@pytest.mark.parametrize("name", ["..", "%2E%2E%2Fetc", "..%2fmodels%2fidentity", "identity%2f..", "%2Fetc", "a%00b"])
def test_model_name_that_leads_out_of_the_repository_is_no_model(server: Served, name: str) -> None:
    for path in (f"/v2/repository/models/{name}/load", f"/v2/models/{name}/infer"):
        status, body = server.ask(post(path, json.dumps({"inputs": [ONE]} if "infer" in path else {}).encode()))
        assert status in (400, 404, 500) and b"/tmp" not in body and b"site-packages" not in body
    assert server.serves()


def test_files_and_hostile_configurations_in_a_request_to_load_are_refused(server: Served) -> None:
    deep = '{"parameters": ' * 5000
    for parameters, expected in (
        ({"config": "{}", "file:1/model.onnx": "AAAA"}, 501),
        ({"file:../../x": "AAAA"}, 501),
        ({"config": '{"default_model_filename": "../../x"}'}, 500),
        ({"config": '{"output": [{"name": "y", "label_filename": "/etc/passwd"}]}'}, 500),
        ({"config": '{"name": ".."}'}, 500),
        ({"config": deep}, 500),
        ({"config": 7}, 400),
        ({"configuration": "{}"}, 400),
    ):
        path = "/v2/repository/models/identity/load"
        status, body = server.ask(post(path, json.dumps({"parameters": parameters}).encode()))
        assert (status, b"/etc" in body and b"passwd" not in body) == (expected, False), (parameters, body)
    assert server.serves()
