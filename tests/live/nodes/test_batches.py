"""What tensors a batch and its answers may have: the fast path takes what the full check does."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.tensor import TensorSpec
from cotenant.errors import NodeError
from cotenant.live.batch_listener import Payload
from cotenant.live.nodes.batches import ModelTensors
from cotenant.worker.wire import TensorPart, WorkerModel

SPECS = (TensorSpec("x", "FP32", (-1, 2)), TensorSpec("y", "INT64", (-1,)))
MODEL = WorkerModel(name="m", max_batch=4, inputs=SPECS, outputs=SPECS)


def right(rows: int) -> list[TensorPart]:
    return [
        TensorPart("x", "FP32", (rows, 2), memoryview(bytes(8 * rows))),
        TensorPart("y", "INT64", (rows,), memoryview(bytes(8 * rows))),
    ]


SIZES = [0, 7, 8, 16, 24, 32, 40]
change = st.one_of(
    st.sampled_from(["x", "y", "z"]).map(lambda name: {"name": name}),
    st.sampled_from(["FP32", "INT64", "UINT64", "BYTES", "FP8"]).map(lambda datatype: {"datatype": datatype}),
    st.lists(st.integers(-1, 5), max_size=3).map(lambda shape: {"shape": tuple(shape)}),
    st.sampled_from([None, *SIZES]).map(lambda size: {"data": None if size is None else memoryview(bytes(size))}),
)


def changed(rows: int, order: Sequence[int], changes: Sequence[tuple[int, dict[str, object]]]) -> list[TensorPart]:
    parts = right(rows)
    for index, fields in changes:
        parts[index] = msgspec.structs.replace(parts[index], **fields)
    return [parts[index] for index in order]


orders = st.sampled_from([(0, 1)] * 8 + [(1, 0), (0,), (), (0, 0)])
changes = st.lists(st.tuples(st.integers(0, 1), change), max_size=2)
requests = st.lists(st.builds(changed, st.integers(0, 5), orders, changes), min_size=1, max_size=2)


def as_sent(payload: Payload) -> list[TensorPart]:
    return [TensorPart(each.name, each.datatype, each.shape, memoryview(each.data)) for each in payload]


def answers(tensors: ModelTensors, asked: list[list[TensorPart]]) -> object:
    try:
        return tensors.outputs(asked, None, None)
    except NodeError as error:
        return str(error)


@settings(max_examples=200)
@given(requests, st.sampled_from([-1, -1, -1, 2]))
def test_fast_path_takes_what_the_full_check_does(asked: list[list[TensorPart]], rows: int) -> None:
    specs = (TensorSpec("x", "FP32", (rows, 2)), SPECS[1])
    tensors = ModelTensors(msgspec.structs.replace(MODEL, inputs=specs, outputs=specs))
    if tensors.are_plain_inputs(asked):
        assert [as_sent(payload) for payload in tensors.inputs(asked, None, None)] == asked
    fast = answers(tensors, asked)
    tensors._outputs = ()
    assert fast == answers(tensors, asked)


def test_fast_path_takes_tensors_of_fixed_shape() -> None:
    def look(payload: Payload) -> None:
        raise AssertionError(payload)

    tensors = ModelTensors(MODEL)
    tensors._check_outputs = look  # type: ignore[method-assign]
    asked = [right(1), right(3)]
    assert tensors.are_plain_inputs(asked)
    assert not tensors.are_plain_inputs([*asked, right(1)])  # more rows than it takes
    assert [as_sent(payload) for payload in tensors.outputs(asked, None, None) if isinstance(payload, tuple)] == asked
