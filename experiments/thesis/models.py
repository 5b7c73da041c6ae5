"""Group the thesis' eighteen workloads by their six models: each was run with 1,024, 2,048 and 4,096 samples."""

from __future__ import annotations

from collections.abc import Sequence


def by_model(workloads: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of the workloads of each model, in their order: `onnx_resnet50_1024` is of `onnx_resnet50`."""
    indices: dict[str, list[int]] = {}
    for index, workload in enumerate(workloads):
        indices.setdefault(workload.rpartition("_")[0], []).append(index)
    return indices


def short_name(model: str) -> str:
    """Return a model's name in two lines, for pictures."""
    backend, _, name = model.partition("_")
    return f"{ {'onnx': 'ONNX', 'tensorflow': 'TensorFlow'}[backend] }\n{name.replace('_', ' ')}"
