"""A model that keeps tensors in files names only regular files beside it; any other is refused before it is opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from onnx import GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, helper, numpy_helper

from cotenant.errors import ModelError
from cotenant.worker.external_data import check_external_data
from cotenant.worker.repository import describe, find_model
from cotenant.worker.runners.onnx import Onnx
from cotenant.worker.wire import WorkerModel

SECRET = b"0123456789abcdef" * 4
FLOAT = TensorProto.FLOAT


def external(location: str | bytes, name: str = "w", kind: int = FLOAT, shape: tuple[int, ...] = (4,)) -> TensorProto:
    """A tensor whose data are elsewhere."""
    tensor = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
    if isinstance(location, str):
        tensor.external_data.add(key="location", value=location)
    return tensor


def constant(tensor: TensorProto) -> NodeProto:
    return helper.make_node("Constant", [], ["w"], name="held", value=tensor)


def in_graph(tensor: TensorProto) -> ModelProto:
    return model([], [tensor])


def in_constant(tensor: TensorProto) -> ModelProto:
    return model([constant(tensor)])


def in_subgraph(tensor: TensorProto) -> ModelProto:
    """In a branch of an `If`, within a branch of another."""

    def branch(nodes: list[NodeProto], tensors: list[TensorProto]) -> GraphProto:
        return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info("r", FLOAT, [4])], tensors)

    copy = helper.make_node("Identity", ["v"], ["r"])
    inner = branch([copy], [external_as(tensor, "v")])
    yes = helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True)))
    outer = branch([helper.make_node("If", ["yes"], ["r"], name="in", then_branch=inner, else_branch=inner)], [])
    return model([yes, helper.make_node("If", ["yes"], ["w"], name="out", then_branch=outer, else_branch=outer)])


def in_function(tensor: TensorProto) -> ModelProto:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    function = helper.make_function("own", "held", [], ["w"], [constant(tensor)], opsets)
    return helper.make_model(
        graph([helper.make_node("held", [], ["w"], domain="own")], []),
        functions=[function],
        opset_imports=opsets,
        ir_version=8,
    )


def in_sparse_initializer(tensor: TensorProto) -> ModelProto:
    made = model([])
    made.graph.sparse_initializer.append(sparse(tensor))
    return made


def in_sparse_indices(tensor: TensorProto) -> ModelProto:
    values = numpy_helper.from_array(np.ones(4, np.float32), "w")
    indices = external_as(tensor, "")
    indices.data_type = TensorProto.INT64
    made = model([])
    made.graph.sparse_initializer.append(SparseTensorProto(values=values, indices=indices, dims=[4]))
    return made


def in_sparse_constant(tensor: TensorProto) -> ModelProto:
    node = helper.make_node("Constant", [], ["w"])
    node.attribute.append(helper.make_attribute("sparse_value", sparse(tensor)))
    return model([node])


def in_list(tensor: TensorProto) -> ModelProto:
    node = helper.make_node("Own", [], ["w"], domain="own", tensors=[tensor])
    return model([node])


def in_training(tensor: TensorProto) -> ModelProto:
    made = in_graph(numpy_helper.from_array(np.ones(4, np.float32), "w"))
    made.training_info.add().algorithm.CopyFrom(model([], [tensor]).graph)
    return made


PLACES: dict[str, Callable[[TensorProto], ModelProto]] = {
    "initializer": in_graph,
    "node 'held', attribute 'value', tensor": in_constant,
    "node 'out', attribute 'else_branch', graph, node 'in', attribute 'else_branch', graph, initializer": in_subgraph,
    "function 'held', node 'held', attribute 'value', tensor": in_function,
    "sparse_initializer, values": in_sparse_initializer,
    "sparse_initializer, indices": in_sparse_indices,
    "node 'w', attribute 'sparse_value', sparse_tensor, values": in_sparse_constant,
    "node 'w', attribute 'tensors', tensor": in_list,
    "training_info, algorithm, initializer": in_training,
}


def external_as(tensor: TensorProto, name: str) -> TensorProto:
    renamed = TensorProto()
    renamed.CopyFrom(tensor)
    renamed.name = name
    return renamed


def sparse(values: TensorProto) -> SparseTensorProto:
    return SparseTensorProto(values=values, indices=numpy_helper.from_array(np.arange(4)), dims=[4])


def graph(nodes: list[NodeProto], tensors: list[TensorProto]) -> GraphProto:
    add = helper.make_node("Add", ["x", "w"], ["y"])
    x, y = (helper.make_tensor_value_info(name, FLOAT, ["n", 4]) for name in "xy")
    return helper.make_graph([*nodes, add], "main", [x], [y], tensors)


def model(nodes: list[NodeProto], tensors: list[TensorProto] | None = None) -> ModelProto:
    return helper.make_model(graph(nodes, tensors or []), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def placed(root: Path, made: ModelProto) -> Path:
    """Put a model into a repository, beside secrets that it must not read."""
    folder = root / "models" / "m" / "1"
    folder.mkdir(parents=True)
    for place in (root / "secret", root / "models" / "m" / "secret"):
        place.write_bytes(SECRET)
    (folder / "data").write_bytes(np.arange(4, dtype=np.float32).tobytes() * 2)
    (folder / "linked").symlink_to(root / "secret")
    (folder / "twice").hardlink_to(root / "secret")
    (folder / "below").mkdir()
    (folder / "below" / "data").write_bytes(SECRET)
    (folder / "away").symlink_to(root)
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    path = folder / "model.onnx"
    path.write_bytes(made.SerializeToString())
    return path


def refused(path: Path) -> str:
    """Return why a model is refused, by whoever would open it."""
    reasons = set()
    for opens in (
        lambda: check_external_data(path),
        lambda: describe(find_model(path.parents[2], "m")),
        lambda: Onnx(WorkerModel(name="m", path=str(path), inputs=()), 1),
    ):
        with pytest.raises(ModelError) as raised:
            opens()
        reasons.add(str(raised.value))
    (reason,) = reasons
    assert len(reason.splitlines()) == 1
    return reason.removeprefix(f"{path}: ")


LOCATIONS = {
    "../secret": "which leads out of its folder",
    "below/../../secret": "which leads out of its folder",
    "linked": "which is reached over a symbolic link",
    "away/secret": "which is reached over a symbolic link",
    "loop": "which is reached over a symbolic link",
    "twice": "which has other names by hard links",
    "pipe": "which is not a regular file",
    "below": "which is not a regular file",
    "absent": "which cannot be read (No such file or directory)",
    "data/x": "which cannot be read (Not a directory)",
    "*/_ORT_MEM_ADDR_/*": "which ONNX Runtime takes for an address in memory",
    "..\\secret": "which is not a path",
    "data\0": "which is not a path",
    "": "which names no file",
    "/etc/passwd": "an absolute path",
}


@pytest.mark.parametrize("location", LOCATIONS)
def test_location_anywhere_but_beside_the_model_is_refused(location: str, tmp_path: Path) -> None:
    reason = refused(placed(tmp_path, in_graph(external(location))))
    what = f"tensor 'w' (initializer) has its data in {location!r}, {LOCATIONS[location]}; "
    assert reason == what + "keep them in a file of their own beside the model"


@pytest.mark.parametrize("place", PLACES)
def test_tensor_of_any_kind_that_names_a_file_elsewhere_is_refused(place: str, tmp_path: Path) -> None:
    name = "" if place.endswith("indices") else "v" if "branch" in place else "w"
    reason = refused(placed(tmp_path, PLACES[place](external("linked"))))
    assert reason.startswith(
        f"tensor {name!r} ({place}) has its data in 'linked', which is reached over a symbolic link"
    )


def test_location_that_is_given_twice_is_checked_each_time(tmp_path: Path) -> None:
    for first, second in (("data", "../secret"), ("../secret", "data")):
        tensor = external(first)
        tensor.external_data.add(key="location", value=second)
        path = placed(tmp_path / first.replace("/", "_"), in_graph(tensor))
        assert "'../secret', which leads out of its folder" in refused(path)


def test_tensor_that_is_not_called_external_but_names_a_file_is_checked(tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(np.ones(4, np.float32), "w")
    tensor.external_data.add(key="location", value="/etc/passwd")
    assert "an absolute path" in refused(placed(tmp_path, in_graph(tensor)))


def test_external_tensor_without_a_location_is_refused(tmp_path: Path) -> None:
    assert "which names no file" in refused(placed(tmp_path, in_graph(external(b""))))


@pytest.mark.parametrize("location", ["data", "./data", "below/data"])
def test_file_beside_the_model_is_served(location: str, tmp_path: Path) -> None:
    path = placed(tmp_path, in_graph(external(location)))
    check_external_data(path)
    assert [spec.name for spec in describe(find_model(path.parents[2], "m")).inputs] == ["x"]


def test_graph_that_is_nested_deeply_is_walked(tmp_path: Path) -> None:
    def field(number: int, data: bytes) -> bytes:
        size = len(data)
        length = bytearray()
        while size > 0x7F:
            length.append(size & 0x7F | 0x80)
            size >>= 7
        return bytes([number << 3 | 2]) + bytes(length) + bytes([size]) + data

    data = field(5, external("../secret").SerializeToString())
    for _ in range(3000):  # graph → node → attribute → graph
        data = field(1, field(5, field(6, data)))
    path = tmp_path / "model.onnx"
    path.write_bytes(field(7, data))
    with pytest.raises(ModelError, match="which leads out of its folder"):
        check_external_data(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), junk=st.binary(min_size=1, max_size=4), cut=st.booleans())
def test_file_of_any_bytes_is_a_model_or_refused(tmp_path: Path, place: int, junk: bytes, cut: bool) -> None:
    data = in_subgraph(numpy_helper.from_array(np.ones(4, np.float32), "w")).SerializeToString()
    place %= len(data)
    path = tmp_path / "model.onnx"
    path.write_bytes(data[:place] + junk + (b"" if cut else data[place + len(junk) :]))
    try:
        check_external_data(path)
    except ModelError as error:
        assert str(path) in str(error)  # noqa: PT017
