"""The model repository, in the layout that Triton's users have: `<repository>/<model>/<version>/model.onnx` (or another
file of PLATFORMS), with a `config.pbtxt` beside the versions where there is more to say. Looking through it opens no
model; `describe` does, and neither runs one nor needs PyTorch.
"""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.tensor import DTYPES, ModelInfo, Tensor, TensorSpec
from cotenant.errors import ConfigError, ModelError, NotFoundError
from cotenant.worker import pbtxt
from cotenant.worker.exported import exported
from cotenant.worker.wire import WorkerModel

CONFIG = "config.pbtxt"
DEFAULT_MAX_BATCH = 32  # where nobody says; the profile finds out which batches are worth it

# File that a version holds → Triton's platform and backend. It has no platform for the last two, only the backend.
PLATFORMS = {
    "model.onnx": ("onnxruntime_onnx", "onnxruntime"),
    "model.pt": ("pytorch_libtorch", "pytorch"),
    "model.pt2": ("pytorch_export", "pytorch"),
    "model.py": ("pytorch_module", "pytorch"),
}
ENSEMBLE = "ensemble"  # Triton's platform of what has steps and no file (ensemble.py)

# The fields of Triton's ModelConfig that repeat, maps and what is UNSUPPORTED apart.
REPEATED = frozenset({
    "input", "output", "dims", "shape", "dim", "preferred_batch_size", "model_warmup", "versions", "instance_group",
    "gpus", "secondary_devices", "profile", "resources", "op_library_filename", "agents", "graph_spec",
    "metric_control", "buckets", "gpu_execution_accelerator", "cpu_execution_accelerator", "step",
})  # fmt: skip

# Fields that change what a model computes. To ignore them would be to answer wrongly.
UNSUPPORTED = ("sequence_batching", "batch_input", "batch_output")


class TensorConfig(msgspec.Struct, frozen=True):
    """dims: without the batch dimension where the model batches."""

    name: str
    data_type: str = ""
    dims: tuple[int, ...] = ()
    label_filename: str = ""
    reshape: dict[str, Any] | None = None


class DynamicBatching(msgspec.Struct, frozen=True):
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0


class Latest(msgspec.Struct, frozen=True):
    num_versions: int = 1


class Specific(msgspec.Struct, frozen=True):
    versions: tuple[int, ...]


class VersionPolicy(msgspec.Struct, frozen=True):
    latest: Latest = Latest()
    all: dict[str, Any] | None = None
    specific: Specific | None = None

    def chosen(self, versions: list[int]) -> list[int]:
        """Those of `versions`, ascending, that are to be served."""
        if self.all is not None:
            return versions
        if self.specific is not None:
            return [version for version in versions if version in self.specific.versions]
        return versions[-max(1, self.latest.num_versions) :]


class WarmupInput(msgspec.Struct, frozen=True):
    dims: tuple[int, ...] = ()
    zero_data: bool = False


class Warmup(msgspec.Struct, frozen=True):
    inputs: dict[str, WarmupInput] = {}


class Parameter(msgspec.Struct, frozen=True):
    string_value: str = ""


class EnsembleStep(msgspec.Struct, frozen=True):
    """input_map, output_map: the model's name of a tensor → the ensemble's. model_version: -1 for any."""

    model_name: str
    model_version: int = -1
    input_map: dict[str, str] = {}
    output_map: dict[str, str] = {}


class EnsembleScheduling(msgspec.Struct, frozen=True):
    step: tuple[EnsembleStep, ...] = ()


class GraphSpec(msgspec.Struct, frozen=True):
    batch_size: int = 1


class Cuda(msgspec.Struct, frozen=True):
    graphs: bool = False
    graph_spec: tuple[GraphSpec, ...] = ()


class Optimization(msgspec.Struct, frozen=True):
    cuda: Cuda = Cuda()


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What Cotenant reads of a ModelConfig. max_batch_size: None where the file has none. runtime: a file of the
    version that says how to run the model; `model.py` is the one that is known.

    fields: all that the file says, in the shape of Triton's JSON.
    """

    name: str = ""
    platform: str = ""
    backend: str = ""
    max_batch_size: int | None = None
    input: tuple[TensorConfig, ...] = ()
    output: tuple[TensorConfig, ...] = ()
    version_policy: VersionPolicy = VersionPolicy()
    dynamic_batching: DynamicBatching | None = None
    default_model_filename: str = ""
    runtime: str = ""
    optimization: Optimization = Optimization()
    model_warmup: tuple[Warmup, ...] = ()
    ensemble_scheduling: EnsembleScheduling | None = None
    parameters: dict[str, Parameter] = {}
    fields: dict[str, Any] = {}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a model.

    folder: the model's, which holds config.pbtxt and the versions. path: the model's file, or the place of the trouble.
    reason: why it cannot be served; empty where it can, as far as looking at it without opening it tells.
    """

    name: str
    folder: Path
    path: Path
    version: str = ""
    platform: str = ""
    config: Config = Config()
    reason: str = ""


def scan(root: Path) -> list[Entry]:
    """Every version to serve of every model, by name and version. A bad model gives an entry that says why, and stops
    no other. Raises ConfigError where there is no repository."""
    return [entry for name in sorted(_names(root)) for entry in _versions(root, name)]


def find(root: Path, name: str, version: str = "") -> Entry:
    """The version asked for, or the latest that is served. It may have a `reason`.

    Raises NotFoundError for what is not there or not one folder of the repository.
    """
    # Looked up, not joined: a name that climbs out, or is no name at all, is simply not among them.
    if name not in _names(root):
        raise NotFoundError(f"no model {name!r} in {str(root)!r}; a model is one of its folders")
    entries = _versions(root, name)
    if not version or not entries[-1].version:
        return entries[-1]
    for entry in entries:
        if entry.version == version:
            return entry
    served = ", ".join(entry.version for entry in entries)
    raise NotFoundError(f"model {name!r} has no version {version!r} to serve; it has {served}")


def _names(root: Path) -> list[str]:
    try:
        return [path.name for path in root.iterdir() if not path.name.startswith(".") and path.is_dir()]
    except OSError as error:
        raise ConfigError(
            f"no model repository at {str(root)!r}: {error.strerror}; name a folder of <model>/<version>/model.onnx"
        ) from None


def _versions(root: Path, name: str) -> list[Entry]:
    """At least one entry. Only one that says why nothing can be served has no version."""
    folder = root / name
    try:
        _stays_inside(root, folder)
        config = read_config(folder)
        numbers = sorted(
            int(path.name) for path in folder.iterdir() if re.fullmatch("[1-9][0-9]*", path.name) and path.is_dir()
        )
        if config.ensemble_scheduling is not None or config.platform == ENSEMBLE:
            return [_ensemble(folder, config, str(numbers[-1] if numbers else 1))]
        if not numbers:
            raise ModelError(f"{folder}: no version; put the model into {folder / '1' / next(iter(PLATFORMS))}")
        chosen = config.version_policy.chosen(numbers)
        if not chosen:
            raise ModelError(
                f"{folder / CONFIG}: version_policy asks for none of the versions that are there: {numbers}"
            )
    except ModelError as error:
        return [Entry(name=name, folder=folder, path=folder, reason=str(error))]
    except OSError as error:
        return [
            Entry(name=name, folder=folder, path=folder, reason=f"{folder}: {error.strerror}; let this user read it")
        ]
    return [_entry(root, folder, config, version) for version in map(str, chosen)]


def _ensemble(folder: Path, config: Config, version: str) -> Entry:
    """An ensemble has no file. In Triton's layout it has an empty folder for its version."""
    path = folder / CONFIG
    reason = ""
    if config.platform != ENSEMBLE:
        reason = f'{path}: ensemble_scheduling in a model of platform {config.platform!r}; write platform: "{ENSEMBLE}"'
    elif config.ensemble_scheduling is None or not config.ensemble_scheduling.step:
        reason = f"{path}: an ensemble without steps; list them in ensemble_scheduling"
    return Entry(
        name=folder.name, folder=folder, path=folder, version=version, platform=ENSEMBLE, config=config, reason=reason
    )


def _entry(root: Path, folder: Path, config: Config, version: str) -> Entry:
    path = folder / version
    platform = reason = ""
    try:
        file, platform = _file(path, config)
        path /= file
        _stays_inside(root, path)
        if not path.is_file():
            raise ModelError(f"{path}: no such file; a version holds {' or '.join(PLATFORMS)}")
        if not path.stat().st_size:
            raise ModelError(f"{path}: the file is empty; export the model again")
        if not os.access(path, os.R_OK):
            raise ModelError(f"{path}: no permission to read it; let this user read it")
    except ModelError as error:
        reason = str(error)
    except OSError as error:
        reason = f"{path}: {error.strerror}; let this user read it"
    return Entry(
        name=folder.name, folder=folder, path=path, version=version, platform=platform, config=config, reason=reason
    )


def _file(version: Path, config: Config) -> tuple[str, str]:
    """The name of the model's file, and its platform."""
    said = config.platform or config.backend
    fits = {
        file: platform
        for file, (platform, backend) in PLATFORMS.items()
        if config.platform in ("", platform) and config.backend in ("", backend)
    }
    if not fits:
        known = " or ".join(f'platform: "{platform}"' for platform, _ in PLATFORMS.values())
        raise ModelError(f"{version.parent / CONFIG}: there is nothing to run {said!r} models with; give {known}")
    if config.runtime in fits:
        return config.runtime, fits[config.runtime]
    name = config.default_model_filename
    found = [file for file in fits if (Path(file).suffix == Path(name).suffix if name else (version / file).exists())]
    if not found and not said:
        raise ModelError(f"{version}: no model in it that can be run; put {' or '.join(PLATFORMS)} there")
    file = next(iter(found or fits))
    return name or file, fits[file]


def _stays_inside(root: Path, path: Path) -> None:
    real = os.path.realpath(path)  # unlike Path.resolve it bears a loop
    if not Path(real).is_relative_to(os.path.realpath(root)):
        raise ModelError(f"{path}: leads out of the repository, to {real}; move the model into {root}")


def read_config(folder: Path) -> Config:
    """`config.pbtxt` of a model, checked; all defaults where there is none. Raises ModelError with file and line."""
    path = folder / CONFIG
    _stays_inside(folder.parent, path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Config()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; let this user read it, or take it away") from None
    except UnicodeDecodeError:
        raise ModelError(f"{path}: not text; write it as protobuf text, such as `max_batch_size: 8`") from None
    fields = pbtxt.read(text, REPEATED, str(path))
    try:
        config = msgspec.structs.replace(msgspec.convert(fields, Config), fields=fields)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}; see Triton's ModelConfig for the field's type") from None
    if config.name not in ("", folder.name):
        raise ModelError(f"{path}: name {config.name!r} in the folder {folder.name!r}; make them the same")
    if config.max_batch_size is not None and config.max_batch_size < 0:
        raise ModelError(f"{path}: max_batch_size {config.max_batch_size} is below 0; 0 means no batch dimension")
    for field in UNSUPPORTED:
        if field in fields:
            raise ModelError(f"{path}: {field} is not supported; take it out, or serve this model elsewhere")
    for file in (config.default_model_filename, *(tensor.label_filename for tensor in config.output)):
        if file in (".", "..") or re.search(r"[/\\\0]", file):
            raise ModelError(f"{path}: {file!r} is not the name of a file; give one, without folders")
    for tensor in (*config.input, *config.output):
        if tensor.reshape is not None:
            raise ModelError(f"{path}: reshape of {tensor.name!r} is not supported; give dims as the model has them")
    return config


def labels(entry: Entry, output: str) -> tuple[str, ...]:
    """Names of an output's classes, one for each line of its `label_filename`; none where it has no such file."""
    for tensor in entry.config.output:
        if tensor.name == output and tensor.label_filename:
            path = entry.folder / tensor.label_filename
            try:
                _stays_inside(entry.folder.parent, path)
                return tuple(path.read_text(encoding="utf-8").splitlines())
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(
                    f"{path}: cannot read the labels of {output!r}: {error}; or drop label_filename"
                ) from None
    return ()


def describe(entry: Entry) -> ModelInfo:
    """Open the model and say what it takes and gives. Seconds of work where the model is large.

    Where the first dimension of every input and output is dynamic it is the batch dimension. Raises ModelError for
    what cannot be loaded, or is not what `config.pbtxt` says.
    """
    if entry.reason:
        raise ModelError(entry.reason)
    open_ = {"onnxruntime_onnx": _open, "pytorch_export": exported}.get(entry.platform)
    inputs, outputs = open_(entry.path) if open_ else (_declared(entry, "input"), _declared(entry, "output"))
    max_batch_size = _max_batch(entry, inputs + outputs)
    lead = 1 if max_batch_size else 0
    return ModelInfo(
        name=entry.name,
        version=entry.version,
        platform=entry.platform,
        inputs=agree(entry, "input", entry.config.input, inputs, lead),
        outputs=agree(entry, "output", entry.config.output, outputs, lead),
        max_batch_size=max_batch_size,
        labels={spec.name: names for spec in outputs if (names := labels(entry, spec.name))},
    )


def loadable(entry: Entry, info: ModelInfo) -> WorkerModel:
    """What a worker loads to serve the model."""
    cuda = entry.config.optimization.cuda
    sizes = [spec.batch_size for spec in cuda.graph_spec] or [1 << power for power in range(6)]
    inference = entry.config.parameters.get("INFERENCE_MODE", Parameter("true"))
    return WorkerModel(
        name=entry.name,
        path=str(entry.path),
        platform=entry.platform,
        max_batch=max(1, info.max_batch_size),
        inputs=info.inputs,
        outputs=info.outputs,
        batched=info.max_batch_size > 0,
        gradients=inference.string_value.lower() == "false",
        graphs=tuple(max(1, size) for size in sizes) if cuda.graphs else (),
    )


def _declared(entry: Entry, kind: str) -> tuple[TensorSpec, ...]:
    """Inputs or outputs as config.pbtxt lists them, for files that do not say themselves. Where all names end with
    their place, as in INPUT__0, that is their order."""
    place = entry.folder / CONFIG
    config = entry.config
    listed = config.input if kind == "input" else config.output
    if not listed:
        raise ModelError(
            f"{place}: {entry.path.name} does not say what it {'takes' if kind == 'input' else 'gives'}; list it: "
            f'`{kind} {{ name: "{kind.upper()}__0" data_type: TYPE_FP32 dims: [3, 224, 224] }}`'
        )
    for tensor in listed:
        known = tensor.data_type.removeprefix("TYPE_")
        if known not in DTYPES:
            why = "PyTorch has no strings" if known == "STRING" else "none of Triton's types"
            raise ModelError(
                f"{place}: {kind} {tensor.name!r} has the data_type {tensor.data_type!r}, {why}; give one such as "
                "TYPE_FP32"
            )
        if not tensor.name or not tensor.dims:
            raise ModelError(f"{place}: {kind} {tensor.name!r} needs a name and dims, without the batch dimension")
    if all(re.fullmatch(r".*__\d+", tensor.name) for tensor in listed):
        listed = tuple(sorted(listed, key=lambda tensor: int(tensor.name.rpartition("__")[2])))
    lead = (-1,) if config.max_batch_size else ()
    return tuple(
        TensorSpec(tensor.name, tensor.data_type.removeprefix("TYPE_"), (*lead, *tensor.dims)) for tensor in listed
    )


def _open(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    # ONNX Runtime's exceptions have no class of their own in common. Text that is not UTF-8 gives a ValueError.
    failures: tuple[type[Exception], ...] = (
        *(it for it in vars(state).values() if isinstance(it, type) and issubclass(it, Exception)),
        RuntimeError,
        ValueError,
    )
    try:
        # Its fallback would print, and try the same again.
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
    """ONNX Runtime's message without its own place, the file's, and where in its source it was raised."""
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
    asked = entry.config.max_batch_size
    fixed = next((tensor for tensor in tensors if tensor.shape[:1] != (-1,)), None)
    if asked is None:
        # As in Triton, dims as long as the model's own shape leave no batch dimension.
        declared = {tensor.name: tensor.dims for tensor in entry.config.input + entry.config.output}
        whole = any(len(declared.get(tensor.name, ())) == len(tensor.shape) for tensor in tensors)
        return 0 if fixed or whole else DEFAULT_MAX_BATCH
    if asked and fixed:
        raise ModelError(
            f"{entry.folder / CONFIG}: max_batch_size {asked}, but {fixed.name!r} of {entry.path.name} has the shape "
            f"{list(fixed.shape)}; export it with a dynamic first dimension, or set max_batch_size: 0"
        )
    return asked


def agree(
    entry: Entry, kind: str, declared: tuple[TensorConfig, ...], tensors: tuple[TensorSpec, ...], lead: int
) -> tuple[TensorSpec, ...]:
    """The model's tensors, with what config.pbtxt says more exactly. It need not say everything, but nothing else.
    Raises ModelError.

    lead: 1 where there is a batch dimension, which dims leave out; else 0.
    """
    place = entry.folder / CONFIG
    specs = {tensor.name: tensor for tensor in tensors}
    for tensor in declared:
        spec = specs.get(tensor.name)
        if spec is None:
            raise ModelError(f"{place}: {kind} {tensor.name!r} is not in {entry.path.name}; it has {', '.join(specs)}")
        if tensor.data_type.removeprefix("TYPE_").replace("STRING", "BYTES") not in ("", spec.datatype):
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


def sample(entry: Entry, info: ModelInfo, rows: int, rng: np.random.Generator) -> tuple[Tensor, ...]:
    """Inputs of that many rows, to warm up and profile with.

    Whole numbers are 0 or 1, which suit token ids and masks; fractions lie in [0, 1). Raises ModelError where a
    dimension is dynamic, is not the batch, and `model_warmup` in config.pbtxt does not give it.
    """
    if not 1 <= rows <= max(1, info.max_batch_size):
        raise ModelError(f"{entry.path}: {rows} rows at once; this model takes 1 to {max(1, info.max_batch_size)}")
    return tuple(_sample(entry, info, spec, rows, rng) for spec in info.inputs)


def _sample(entry: Entry, info: ModelInfo, spec: TensorSpec, rows: int, rng: np.random.Generator) -> Tensor:
    warmups = (warmup.inputs[spec.name] for warmup in entry.config.model_warmup if spec.name in warmup.inputs)
    warmup = next(warmups, WarmupInput())
    lead = (rows,) if info.max_batch_size else ()
    fixed = spec.shape[len(lead) :]
    dims = warmup.dims or fixed
    agree = len(dims) == len(fixed) and all(want in (-1, dim) for dim, want in zip(dims, fixed, strict=True))
    if not agree or min(dims, default=1) < 0:
        example = [dim if dim >= 0 else 16 for dim in fixed]
        raise ModelError(
            f"{entry.folder / CONFIG}: input {spec.name!r} has dims {list(fixed)}, and model_warmup gives "
            f'{list(warmup.dims)}; add `model_warmup {{ inputs {{ key: "{spec.name}" value {{ dims: {example} }} }} }}`'
        )
    shape = (*lead, *dims)
    return Tensor(spec.name, spec.datatype, shape, _data(spec.datatype, shape, rng, zero=warmup.zero_data))


def _data(datatype: str, shape: tuple[int, ...], rng: np.random.Generator, *, zero: bool) -> bytes:
    if datatype == "BYTES":
        text = b"" if zero else b"text"
        return (len(text).to_bytes(4, "little") + text) * int(np.prod(shape))
    values: NDArray[Any]
    if zero:
        values = np.zeros(shape, DTYPES[datatype])
    elif datatype == "BF16":  # the upper half of a float32
        values = (rng.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif datatype.startswith("FP"):
        values = rng.random(shape, np.float32).astype(DTYPES[datatype])
    else:
        values = rng.integers(0, 2, shape).astype(DTYPES[datatype])
    return values.tobytes()
