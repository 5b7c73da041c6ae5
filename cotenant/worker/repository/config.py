"""`config.pbtxt`: what is read of Triton's ModelConfig, and what of it is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from cotenant.errors import ModelError
from cotenant.worker import pbtxt

CONFIG = "config.pbtxt"

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
    max_queue_delay_microseconds: int = 0


class LatestVersions(msgspec.Struct, frozen=True):
    num_versions: int = 1


class SpecificVersions(msgspec.Struct, frozen=True):
    versions: tuple[int, ...]


class VersionPolicy(msgspec.Struct, frozen=True):
    latest: LatestVersions = LatestVersions()
    all: dict[str, Any] | None = None
    specific: SpecificVersions | None = None

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


def read_config(folder: Path) -> Config:
    """`config.pbtxt` of a model, checked; all defaults where there is none. Raises ModelError with file and line."""
    path = folder / CONFIG
    stays_inside(folder.parent, path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Config()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; let this user read it, or take it away") from None
    except UnicodeDecodeError:
        raise ModelError(f"{path}: not text; write it as protobuf text, such as `max_batch_size: 8`") from None
    fields = pbtxt.read_pbtxt(text, REPEATED, str(path))
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


def stays_inside(root: Path, path: Path) -> None:
    """Raises ModelError where links lead out of the repository."""
    real = os.path.realpath(path)  # unlike Path.resolve it bears a loop
    if not Path(real).is_relative_to(os.path.realpath(root)):
        raise ModelError(f"{path}: leads out of the repository, to {real}; move the model into {root}")
