"""Present a server as Triton does: a model's configuration, and the trace and log settings, which are fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cotenant.core.identity import LaneId, own_kind
from cotenant.core.tensor import ModelInfo, TensorSpec
from cotenant.errors import InvalidError, UnsupportedError
from cotenant.live.deployment import ServableModel
from cotenant.runtime.lane_assignment import LaneAssignment
from cotenant.worker.repository import ENSEMBLE

# Nothing is traced, and the log goes to standard error: what can be read, and what it can be set to.
TRACE: dict[str, Any] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
LOG: dict[str, Any] = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


def model_config(info: ModelInfo, offered: ServableModel, lanes: Mapping[LaneId, LaneAssignment]) -> dict[str, Any]:
    """Return Triton's ModelConfig in its JSON shape. lanes: those that hold the model."""
    batching: dict[str, Any] = {}
    if info.platform == ENSEMBLE:
        batching = {"ensemble_scheduling": msgspec.to_builtins(offered.entry.config.ensemble_scheduling)}
    elif info.max_batch_size:
        max_queue_delay = round(offered.model.max_queue_delay * 1e6)
        batching = {
            "dynamic_batching": {
                "preferred_batch_size": sorted(
                    {
                        len(held.latencies)
                        for lane in lanes.values()
                        for held in lane.spec.models
                        if held.model == info.name
                    }
                ),
                "max_queue_delay_microseconds": max_queue_delay,
                "priority_queue_policy": {},
            }
            | _queue_policy(offered)
        }
    first = 1 if info.max_batch_size else 0
    return {
        "name": info.name,
        "platform": info.platform,
        "backend": "",
        "version_policy": {"specific": {"versions": [int(info.version)]}},
        "max_batch_size": info.max_batch_size,
        "input": [_tensor_config(spec, first) for spec in info.inputs],
        "output": [_tensor_config(spec, first) for spec in info.outputs],
        **batching,
        "instance_group": [
            {"name": str(name), "kind": "KIND_CPU" if own_kind(lane.device.kind) == "cpu" else "KIND_GPU", "count": 1}
            for name, lane in lanes.items()
        ],
        "default_model_filename": "" if info.platform == ENSEMBLE else offered.entry.path.name,
        # Load generators that send random inputs need it, such as `cotenant loadtest`.
        "model_warmup": [
            {
                "inputs": {
                    name: {"dims": given.dims, "zero_data": given.zero_data} for name, given in each.inputs.items()
                }
            }
            for each in offered.entry.config.model_warmup
        ],
        "parameters": {
            name: {"string_value": parameter.string_value}
            for name, parameter in offered.entry.config.parameters.items()
        },
    }


def _queue_policy(offered: ServableModel) -> dict[str, Any]:
    """Return what is honoured of a configuration's priorities and queue policy."""
    batching = offered.entry.config.dynamic_batching
    if batching is None:
        return {}
    policy: dict[str, Any] = {}
    if batching.priority_levels:
        policy["priority_levels"] = batching.priority_levels
        policy["default_priority_level"] = batching.default_priority_level
    if timeout := batching.default_queue_policy.default_timeout_microseconds:
        policy["default_queue_policy"] = {"timeout_action": "REJECT", "default_timeout_microseconds": timeout}
    return policy


def updated_settings(settings: dict[str, Any], update: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """Return the settings. Raises InvalidError for an update of an unknown one, UnsupportedError for one that would
    change a value."""
    for name, value in (update or {}).items():
        if name not in settings:
            raise InvalidError(f"unknown {what} '{name}'; available: {', '.join(settings)}")
        if value not in (None, settings[name]):
            raise UnsupportedError(f"{what} '{name}' is {settings[name]!r} and cannot be set to {value!r}")
    return settings


def _tensor_config(spec: TensorSpec, first: int) -> dict[str, Any]:
    kind = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.shape[first:])}
