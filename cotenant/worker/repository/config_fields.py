"""What becomes of every field of Triton's ModelConfig: honoured, ignored for a reason that is told, or refused.

A field is ignored where that changes no answer; the server says so once, when it reads the configuration. One whose
loss would change answers, or let a model do what its configuration forbids, keeps the model from being served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple


class Use(StrEnum):
    HONOURED = "honoured"
    IGNORED = "ignored"
    REFUSED = "refused"


class FieldUse(NamedTuple):
    """Say what becomes of a field, and of all below it that have no entry of their own."""

    use: Use
    why: str


def _honoured(why: str) -> FieldUse:
    return FieldUse(Use.HONOURED, why)


def _ignored(why: str) -> FieldUse:
    return FieldUse(Use.IGNORED, why)


def _refused(why: str) -> FieldUse:
    return FieldUse(Use.REFUSED, why)


_PLAN = "the plan places workers, by measured profiles"
_ONE_DEFAULT = "priorities order the requests of a model; they share one timeout"

# By path. `docs/reference.md` has the same table; a test holds it and Triton's message against this one.
FIELDS: Mapping[str, FieldUse] = {
    "name": _honoured("must be the folder's name"),
    "platform": _honoured("selects the runner"),
    "backend": _honoured("selects the runner"),
    "runtime": _honoured("names the file that runs the model, such as `model.py`"),
    "version_policy": _honoured(
        "selects the version to serve, the latest that it allows; others that it allows are named in the log"
    ),
    "max_batch_size": _honoured("largest request in rows; the plan's batches are at most as large"),
    "input": _honoured("names, types and dims are checked against the model's file"),
    "input.format": _ignored("it describes dims, and changes no data"),
    "input.reshape": _refused("give dims as the model has them"),
    "input.is_shape_tensor": _refused("for TensorRT, which is not supported"),
    "input.allow_ragged_batch": _ignored("requests of different shapes run in batches of their own"),
    "input.optional": _ignored("a request brings every input"),
    "input.is_non_linear_format_io": _refused("for TensorRT, which is not supported"),
    "output": _honoured("names, types and dims are checked against the model's file; `label_filename` names classes"),
    "output.reshape": _refused("give dims as the model has them"),
    "output.is_shape_tensor": _refused("for TensorRT, which is not supported"),
    "output.is_non_linear_format_io": _refused("for TensorRT, which is not supported"),
    "batch_input": _refused("batches would lack an input"),
    "batch_output": _refused("outputs would differ from the model's"),
    "optimization": _ignored("runners choose how to compute"),
    "optimization.cuda": _honoured("without `graphs: true`, nothing is captured; without it, what can be is"),
    "optimization.cuda.graphs": _honoured("whether PyTorch models on a GPU are captured as CUDA graphs"),
    "optimization.cuda.graph_spec": _honoured(
        "batch sizes to capture, and from which on to pad; its inputs are ignored"
    ),
    "optimization.execution_accelerators": _ignored("ONNX Runtime runs models itself, without TensorRT or OpenVINO"),
    "optimization.priority": _ignored("`priority` of the settings says which models come first"),
    "optimization.eager_batching": _ignored("a batch is formed when its partition is free"),
    "dynamic_batching": _honoured("models batch with and without it"),
    "dynamic_batching.preferred_batch_size": _ignored("the plan chooses batches, by measured profiles"),
    "dynamic_batching.max_queue_delay_microseconds": _honoured("how long an idle partition may wait for more rows"),
    "dynamic_batching.preserve_ordering": _ignored("answers of a stream keep the order of its requests anyway"),
    "dynamic_batching.priority_levels": _honoured("a request of a level above gets the default level"),
    "dynamic_batching.default_priority_level": _honoured("of requests without a priority"),
    "dynamic_batching.default_queue_policy": _honoured("its timeout is that of requests without one of their own"),
    "dynamic_batching.default_queue_policy.timeout_action": _honoured("REJECT"),
    "dynamic_batching.default_queue_policy.default_timeout_microseconds": _honoured(
        "from arrival to answer, as every timeout here; in Triton it bounds the wait alone"
    ),
    "dynamic_batching.default_queue_policy.allow_timeout_override": _ignored("every request may bring its timeout"),
    "dynamic_batching.default_queue_policy.max_queue_size": _ignored(
        "a request that cannot be answered in time is rejected on arrival, which bounds the queue"
    ),
    "dynamic_batching.priority_queue_policy": _refused(_ONE_DEFAULT),
    "sequence_batching": _refused("requests of a sequence may run anywhere, in any order"),
    "ensemble_scheduling": _honoured("steps, which may also run once for each row"),
    "ensemble_scheduling.max_inflight_requests": _ignored("admission bounds what is in flight"),
    "ensemble_scheduling.step.model_namespace": _refused("there is one repository"),
    "instance_group": _ignored(_PLAN),
    "default_model_filename": _honoured("the model's file in a version"),
    "cc_model_filenames": _refused("one file runs on every device; give default_model_filename"),
    "metric_tags": _ignored("metrics have the labels of docs/reference.md"),
    "model_metrics": _ignored("histograms have buckets that fit every model"),
    "parameters": _honoured("those that a runner knows; all are in the model's configuration"),
    "model_warmup": _honoured("dims and zero_data of inputs, for warm-up and profiling"),
    "model_warmup.name": _honoured("a name for people"),
    "model_warmup.batch_size": _honoured("the smallest and the largest batch are run"),
    "model_warmup.count": _ignored("the smallest and the largest batch are run"),
    "model_warmup.inputs.data_type": _honoured("it is the input's"),
    "model_warmup.inputs.random_data": _honoured("data are random unless zero_data is set"),
    "model_warmup.inputs.input_data_file": _ignored("data are random or zero"),
    "model_operations": _refused("libraries of operators are not loaded"),
    "model_transaction_policy": _honoured("a request has one answer"),
    "model_transaction_policy.decoupled": _refused("a request has one answer"),
    "model_repository_agents": _refused("agents, which may have to verify or decrypt the model, are not run"),
    "response_cache": _honoured("if the settings have a `response_cache`; not for ensembles"),
}


def uses_of(fields: Mapping[str, Any]) -> dict[str, FieldUse]:
    """Return what becomes of the fields that a configuration sets, by path. fields: in protobuf's JSON mapping."""
    return {path: FIELDS[known] for path in _paths(fields, "") if (known := _known(path)) is not None}


def _paths(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of all that is set; keys of maps and places in lists are left out."""
    if isinstance(value, list):
        for item in value:
            yield from _paths(item, path)
    elif isinstance(value, Mapping) and value:
        for name, below in value.items():
            inner = f"{path}.{name}" if path else name
            # What is no field is a key of a map, whose values are what the map's field describes.
            yield from _paths(below, inner if _is_field(inner) else path)
    else:
        yield path


def _is_field(path: str) -> bool:
    return path in FIELDS or "." not in path or any(known.startswith(f"{path}.") for known in FIELDS)


def _known(path: str) -> str | None:
    """Return the path of the entry that covers a field."""
    while path:
        if path in FIELDS:
            return path
        path = path.rpartition(".")[0]
    return None
