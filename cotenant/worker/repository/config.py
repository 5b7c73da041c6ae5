"""Read and write `config.pbtxt`: Triton's ModelConfig as protobuf text, the part of it that is honoured, and checks."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf import json_format, text_format

from cotenant.errors import ModelError
from cotenant.protocol import messages
from cotenant.worker.repository.config_fields import Use, uses_of

CONFIG = "config.pbtxt"

MAX_NESTING = 32  # messages within messages of a configuration in JSON

_UNKNOWN_FIELD = re.compile(r'Message type "(?P<message>[\w.]+)" has no field named "(?P<field>\w+)"')


class TensorConfig(msgspec.Struct, frozen=True):
    """Describe a tensor.

    dims: without the batch dimension where the model batches.
    """

    name: str
    data_type: str = ""
    dims: tuple[int, ...] = ()
    label_filename: str = ""


class QueuePolicy(msgspec.Struct, frozen=True):
    timeout_action: str = "REJECT"
    default_timeout_microseconds: int = 0


class DynamicBatching(msgspec.Struct, frozen=True):
    max_queue_delay_microseconds: int = 0
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()


class LatestVersions(msgspec.Struct, frozen=True):
    num_versions: int = 1


class SpecificVersions(msgspec.Struct, frozen=True):
    versions: tuple[int, ...]


class VersionPolicy(msgspec.Struct, frozen=True):
    latest: LatestVersions = LatestVersions()
    all: dict[str, Any] | None = None
    specific: SpecificVersions | None = None

    def select(self, versions: list[int]) -> list[int]:
        """Return those of `versions`, ascending, that are to be served."""
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
    """Describe a step of an ensemble.

    input_map, output_map: the model's name of a tensor → the ensemble's. model_version: -1 for any.
    """

    model_name: str
    model_version: int = -1
    input_map: dict[str, str] = {}
    output_map: dict[str, str] = {}


class EnsembleScheduling(msgspec.Struct, frozen=True):
    step: tuple[EnsembleStep, ...] = ()


class GraphLowerBound(msgspec.Struct, frozen=True):
    batch_size: int = 1


class GraphSpec(msgspec.Struct, frozen=True):
    """Describe a CUDA graph. graph_lower_bound: batches from that size on are padded to it; none without it."""

    batch_size: int = 1
    graph_lower_bound: GraphLowerBound | None = None


class Cuda(msgspec.Struct, frozen=True):
    graphs: bool = False
    graph_spec: tuple[GraphSpec, ...] = ()


class ResponseCache(msgspec.Struct, frozen=True):
    enable: bool = False


class Optimization(msgspec.Struct, frozen=True):
    """cuda: None where the file has none, which leaves it to the server."""

    cuda: Cuda | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the honoured part of a ModelConfig.

    max_batch_size: None where the file has none. runtime: a file of the version that says how to run the model;
    `model.py` is the one that is known. fields: all that the file says, in protobuf's JSON mapping.
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
    response_cache: ResponseCache = ResponseCache()
    model_warmup: tuple[Warmup, ...] = ()
    ensemble_scheduling: EnsembleScheduling | None = None
    parameters: dict[str, Parameter] = {}
    fields: dict[str, Any] = {}


def read_config(folder: Path) -> Config:
    """Read and check a model's `config.pbtxt`; all defaults where there is none.

    Raises ModelError that names the file, and the line and column of what is no ModelConfig.
    """
    path = folder / CONFIG
    stays_inside(folder.parent, path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Config()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; let this user read it, or remove it") from None
    except UnicodeDecodeError:
        raise ModelError(f"{path}: not text; write it as protobuf text, such as `max_batch_size: 8`") from None
    config = _parse(text, path)
    _check(config, folder.name, str(path))
    return config


def parse_json_config(text: str, model: str) -> Config:
    """Parse a ModelConfig in its JSON shape, as requests to load a model bring it. Raises ModelError."""
    place = f"the config of the request to load {model!r}"
    try:
        message = json_format.Parse(text, messages.ModelConfig(), max_recursion_depth=MAX_NESTING)
    except json_format.ParseError as error:
        raise ModelError(f"{place}: {_without_package(str(error))}; give Triton's ModelConfig as JSON") from None
    config = _converted(message, place)
    _check(config, model, place)
    return config


def write_config(fields: Mapping[str, Any]) -> str:
    """Write a ModelConfig, given as its fields, as protobuf text: the inverse of `read_config`."""
    message = messages.ModelConfig(**fields)
    return text_format.MessageToString(message, as_utf8=True, use_short_repeated_primitives=True)


def stays_inside(root: Path, path: Path) -> None:
    """Raise ModelError where links lead out of the repository."""
    real = os.path.realpath(path)  # unlike Path.resolve it tolerates a loop
    if not Path(real).is_relative_to(os.path.realpath(root)):
        raise ModelError(f"{path}: leads out of the repository, to {real}; move the model into {root}")


def _parse(text: str, path: Path) -> Config:
    try:
        message = text_format.Parse(text, messages.ModelConfig())
    except text_format.ParseError as error:
        raise _syntax_error(path, text, error) from None
    return _converted(message, str(path))


def _converted(message: Any, place: str) -> Config:
    fields = json_format.MessageToDict(message, preserving_proto_field_name=True)
    try:
        # Not strict: protobuf's JSON mapping has 64-bit integers as strings.
        config = msgspec.convert(fields, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"{place}: {error}; see Triton's ModelConfig for the field") from None
    return msgspec.structs.replace(config, fields=fields)


def _syntax_error(path: Path, text: str, error: text_format.ParseError) -> ModelError:
    line, column = error.GetLine() or 1, error.GetColumn() or 1
    reason = str(error).partition(" : ")[2].rstrip(".")
    reason = reason.removeprefix(f"'{text.split(chr(10))[line - 1]}': ")  # the place says as much
    hint = "expected protobuf text, such as `max_batch_size: 8`"
    if unknown := _UNKNOWN_FIELD.search(reason):
        known = messages.pool.FindMessageTypeByName(unknown["message"]).fields_by_name
        nearest = difflib.get_close_matches(unknown["field"], known, n=1)
        reason = f"unknown field {unknown['field']!r}"
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"available: {', '.join(sorted(known))}"
    return ModelError(f"{path}:{line}:{column}: {reason}; {hint}")


def _without_package(message: str) -> str:
    return " ".join(message.split()).replace("inference.", "").rstrip(".")


def _check(config: Config, model: str, path: str) -> None:
    """Raise ModelError for what the message allows but Cotenant cannot honour. path: where it stands."""
    if config.name not in ("", model):
        raise ModelError(f"{path}: name {config.name!r} in the folder {model!r}; make them the same")
    if config.max_batch_size is not None and config.max_batch_size < 0:
        raise ModelError(f"{path}: max_batch_size {config.max_batch_size} is below 0; 0 means no batch dimension")
    for field, use in uses_of(config.fields).items():
        if use.use is Use.REFUSED:
            raise ModelError(f"{path}: {field} is not supported: {use.why}; remove it, or serve this model elsewhere")
    batching = config.dynamic_batching
    if batching is not None and batching.default_queue_policy.timeout_action == "DELAY":
        raise ModelError(
            f"{path}: dynamic_batching.default_queue_policy.timeout_action DELAY is not supported: a request whose "
            "deadline has passed is not answered late, but at once with that; use REJECT"
        )
    for file in (config.default_model_filename, *(tensor.label_filename for tensor in config.output)):
        if file in (".", "..") or re.search(r"[/\\\0]", file):
            raise ModelError(f"{path}: {file!r} is not the name of a file; give one, without folders")
