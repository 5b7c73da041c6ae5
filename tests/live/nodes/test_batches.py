"""What tensors a batch and its answers may have: the same at a glance as looked at in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.tensor import TensorSpec
from cotenant.errors import NodeError
from cotenant.live.nodes.batches import ModelTensors
from cotenant.live.pool import Payload
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


def result(take: Callable[..., Sequence[object]], asked: list[list[TensorPart]]) -> object:
    try:
        return take(asked, None, None)
    except NodeError as error:
        return str(error)


def in_full(model: WorkerModel) -> ModelTensors:
    tensors = ModelTensors(model)
    tensors._inputs = tensors._outputs = ()
    return tensors


@settings(max_examples=200)
@given(requests, st.sampled_from([-1, -1, -1, 2]))
def test_tensors_at_a_glance_are_those_looked_at_in_full(asked: list[list[TensorPart]], rows: int) -> None:
    specs = (TensorSpec("x", "FP32", (rows, 2)), SPECS[1])
    model = msgspec.structs.replace(MODEL, inputs=specs, outputs=specs)
    for side in ("inputs", "outputs"):
        assert result(getattr(ModelTensors(model), side), asked) == result(getattr(in_full(model), side), asked)


def test_tensors_of_fixed_shape_are_taken_without_a_full_look() -> None:
    def no_look(payload: Payload) -> None:
        raise AssertionError(payload)

    tensors = ModelTensors(MODEL)
    tensors._check_inputs = tensors._check_outputs = no_look  # type: ignore[method-assign]
    taken = tensors.inputs([right(2)] * 2, None, None)
    assert taken == tensors.outputs([right(2)] * 2, None, None)
    assert [[(each.name, each.shape, each.data) for each in payload] for payload in taken] == [
        [(part.name, part.shape, part.data) for part in right(2)]
    ] * 2
