"""Describe a model: its inputs and outputs as its file and `config.pbtxt` have them, which must agree."""

from __future__ import annotations

import itertools
import re
import textwrap
from pathlib import Path
from typing import Any

from cotenant.core.tensor import DTYPES, ModelInfo, TensorSpec
from cotenant.errors import ModelError
from cotenant.worker.external_data import check_external_data
from cotenant.worker.repository.config import CONFIG, Cuda, Parameter, TensorConfig
from cotenant.worker.repository.layout import Entry, read_labels
from cotenant.worker.torch_export import load_exported
from cotenant.worker.tree_models import tree_specs
from cotenant.worker.wire import WorkerModel

CAPTURED = (
    "pytorch_libtorch",
    "pytorch_export",
)  # whose files hold the whole computation, unless scripted code keeps state
DEFAULT_MAX_BATCH = 32  # rows, without a max_batch_size; the profile finds out which batches are worth it


def describe(entry: Entry) -> ModelInfo:
    """Open a model and describe its inputs and outputs. Takes seconds where the model is large.

    Where the first dimension of every input and output is dynamic, it is the batch dimension. Raises ModelError for a
    model that cannot be loaded, or that differs from its `config.pbtxt`.
    """
    if entry.reason:
        raise ModelError(entry.reason)
    inputs, outputs = _tensors(entry)
    max_batch_size = _max_batch(entry, inputs + outputs)
    lead = 1 if max_batch_size else 0
    return ModelInfo(
        name=entry.name,
        version=entry.version,
        platform=entry.platform,
        inputs=check_config_matches(entry, "input", entry.config.input, inputs, lead),
        outputs=check_config_matches(entry, "output", entry.config.output, outputs, lead),
        max_batch_size=max_batch_size,
        labels={spec.name: names for spec in outputs if (names := read_labels(entry, spec.name))},
    )


def _tensors(entry: Entry) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    match entry.platform:
        case "onnxruntime_onnx":
            return _read_onnx(entry.path)
        case "pytorch_export":
            return load_exported(entry.path)
        case "xgboost_json" | "lightgbm_text":
            return tree_specs(entry.path, entry.platform, _parameters(entry))
    return _declared(entry, "input"), _declared(entry, "output")


def _parameters(entry: Entry) -> dict[str, str]:
    return {name: parameter.string_value for name, parameter in entry.config.parameters.items()}


def worker_model(entry: Entry, info: ModelInfo) -> WorkerModel:
    """Return what a worker loads to serve the model."""
    inference = entry.config.parameters.get("INFERENCE_MODE", Parameter("true"))
    gradients = inference.string_value.lower() == "false"
    return WorkerModel(
        name=entry.name,
        path=str(entry.path),
        platform=entry.platform,
        max_batch=max(1, info.max_batch_size),
        inputs=info.inputs,
        outputs=info.outputs,
        batched=info.max_batch_size > 0,
        gradients=gradients,
        graphs=_graphs(entry, max(1, info.max_batch_size), gradients=gradients),
        must_capture=(entry.config.optimization.cuda or Cuda()).graphs,
        parameters=_parameters(entry),
    )


def _graphs(entry: Entry, max_batch: int, *, gradients: bool) -> tuple[tuple[int, int], ...]:
    """Return the batch sizes to capture as CUDA graphs, each with the fewest rows that are padded to it.

    Without `graph_spec` every batch is padded, by a half at most. Without `cuda` those models are captured whose file
    holds the whole computation: a Python module may do on the host what a graph would leave out.
    """
    cuda = entry.config.optimization.cuda or Cuda(graphs=entry.platform in CAPTURED and not gradients)
    if not cuda.graphs or not entry.platform.startswith("pytorch"):
        return ()
    if cuda.graph_spec:
        return tuple(
            (max(1, spec.batch_size), max(1, (spec.graph_lower_bound or spec).batch_size)) for spec in cuda.graph_spec
        )
    powers = [1 << power for power in range(max_batch.bit_length())]
    sizes = sorted({size for power in powers for size in (power, power * 3 // 2) if size < max_batch} | {max_batch})
    return tuple((size, below + 1) for below, size in itertools.pairwise([0, *sizes]))


def _declared(entry: Entry, kind: str) -> tuple[TensorSpec, ...]:
    """Return inputs or outputs as config.pbtxt lists them, for model files that do not tell. Where all names end with
    an index, as in INPUT__0, that is their order."""
    place = entry.folder / CONFIG
    config = entry.config
    listed = config.input if kind == "input" else config.output
    if not listed:
        raise ModelError(
            f"{place}: {entry.path.name} does not say what it {'takes' if kind == 'input' else 'gives'}; list it: "
            f'`{kind} {{ name: "{kind.upper()}__0" data_type: TYPE_FP32 dims: [3, 224, 224] }}`'
        )
    for tensor in listed:
        known = _datatype(tensor)
        if known not in DTYPES and not (known == "BYTES" and entry.platform == "python"):
            why = "PyTorch has no strings" if known == "BYTES" else "none of Triton's types"
            raise ModelError(
                f"{place}: {kind} {tensor.name!r} has the data_type {tensor.data_type!r}, {why}; give one such as "
                "TYPE_FP32"
            )
        if not tensor.name or not tensor.dims:
            raise ModelError(f"{place}: {kind} {tensor.name!r} needs a name and dims, without the batch dimension")
    if all(re.fullmatch(r".*__\d+", tensor.name) for tensor in listed):
        listed = tuple(sorted(listed, key=lambda tensor: int(tensor.name.rpartition("__")[2])))
    lead = (-1,) if config.max_batch_size else ()
    return tuple(TensorSpec(tensor.name, _datatype(tensor), (*lead, *tensor.dims)) for tensor in listed)


def _datatype(tensor: TensorConfig) -> str:
    """Return the protocol's name of a data_type."""
    return tensor.data_type.removeprefix("TYPE_").replace("STRING", "BYTES")


def _read_onnx(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    # ONNX Runtime's exceptions have no class of their own in common. Text that is not UTF-8 gives a ValueError.
    failures: tuple[type[Exception], ...] = (
        *(kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)),
        RuntimeError,
        ValueError,
    )
    check_external_data(path)
    try:
        # The fallback would print, and try the same again.
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        inputs = tuple(_spec(path, node) for node in session.get_inputs())
        outputs = tuple(_spec(path, node) for node in session.get_outputs())
    except failures as error:
        raise ModelError(
            f"{path}: no model that ONNX Runtime {onnxruntime.__version__} can load: {_short(str(error))}; "
            "export it again as ONNX, with an opset that this version knows"
        ) from None
    return inputs, outputs


def _short(message: str) -> str:
    """Strip ONNX Runtime's message of its error code, the model's path and the place in its source."""
    message = message.partition(" failed:")[2] or re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", message)
    message = re.sub(r"^/\S+:\d+ .*?\) (?=[A-Z])", "", " ".join(message.split()))
    return textwrap.shorten(message, 240, placeholder=" …").rstrip(".")


_ONNX_TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float": "FP32", "double": "FP64",
    "bfloat16": "BF16", "string": "BYTES",
}  # fmt: skip


def _spec(path: Path, node: Any) -> TensorSpec:
    datatype = _ONNX_TYPES.get(node.type.removeprefix("tensor(").removesuffix(")"))
    if datatype is None:
        raise ModelError(f"{path}: {node.name!r} is a {node.type}; export the model with plain tensors only")
    return TensorSpec(
        node.name, datatype, tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape)
    )


def _max_batch(entry: Entry, tensors: tuple[TensorSpec, ...]) -> int:
    configured = entry.config.max_batch_size
    fixed = next((tensor for tensor in tensors if tensor.shape[:1] != (-1,)), None)
    if configured is None:
        # As in Triton, dims as many as in the model's own shape leave no batch dimension.
        declared = {tensor.name: tensor.dims for tensor in entry.config.input + entry.config.output}
        whole = any(len(declared.get(tensor.name, ())) == len(tensor.shape) for tensor in tensors)
        return 0 if fixed or whole else DEFAULT_MAX_BATCH
    if configured and fixed:
        raise ModelError(
            f"{entry.folder / CONFIG}: max_batch_size {configured}, but {fixed.name!r} of {entry.path.name} has the "
            f"shape {list(fixed.shape)}; export it with a dynamic first dimension, or set max_batch_size: 0"
        )
    return configured


def check_config_matches(
    entry: Entry, kind: str, declared: tuple[TensorConfig, ...], tensors: tuple[TensorSpec, ...], lead: int
) -> tuple[TensorSpec, ...]:
    """Return the model's tensors, with the dimensions that config.pbtxt gives more exactly.

    It need not list all tensors, but those it lists must be the model's. lead: 1 where there is a batch dimension,
    which dims leave out; else 0. Raises ModelError.
    """
    place = entry.folder / CONFIG
    specs = {tensor.name: tensor for tensor in tensors}
    for tensor in declared:
        spec = specs.get(tensor.name)
        if spec is None:
            raise ModelError(f"{place}: {kind} {tensor.name!r} is not in {entry.path.name}; it has {', '.join(specs)}")
        if _datatype(tensor) not in ("", spec.datatype):
            raise ModelError(
                f"{place}: {kind} {tensor.name!r} is {tensor.data_type}, but {spec.datatype} in {entry.path.name}; "
                "make them the same"
            )
        if tensor.dims:
            dims = spec.shape[lead:]
            if len(tensor.dims) != len(dims) or not all(
                -1 in pair or pair[0] == pair[1] for pair in zip(tensor.dims, dims, strict=True)
            ):
                raise ModelError(
                    f"{place}: {kind} {tensor.name!r} has dims {list(tensor.dims)}, but {list(dims)} in "
                    f"{entry.path.name}{' after the batch dimension' if lead else ''}; make them the same"
                )
            exact = tuple(max(pair) for pair in zip(tensor.dims, dims, strict=True))
            specs[tensor.name] = TensorSpec(spec.name, spec.datatype, spec.shape[:lead] + exact)
    return tuple(specs.values())
