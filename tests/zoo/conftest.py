from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import onnxruntime
import pytest

from cotenant import zoo
from cotenant.core.tensor import Tensor
from cotenant.worker import repository

Run = Callable[[str, Sequence[Tensor]], tuple[Tensor, ...]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the smaller half of the zoo."""
    root = tmp_path_factory.mktemp("zoo") / "models"
    zoo.build_models(root, ["digits", "cancer", "wine", "minilm", "lenet", "mobilenet_v2", "ssd_mobilenet"])
    return root


@pytest.fixture(scope="session")
def run(models: Path) -> Run:
    """Answer a request of a model, all as the server would."""
    sessions: dict[str, onnxruntime.InferenceSession] = {}

    def run(name: str, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        entry = repository.find_model(models, name)
        if name not in sessions:
            sessions[name] = onnxruntime.InferenceSession(entry.path, providers=["CPUExecutionProvider"])
        outputs = [tensor.name for tensor in sessions[name].get_outputs()]
        values = sessions[name].run(outputs, {tensor.name: tensor.array() for tensor in inputs})
        types = {tensor.name: tensor.data_type.removeprefix("TYPE_") for tensor in entry.config.output}
        return tuple(
            Tensor(output, types[output], value.shape, value.tobytes())
            for output, value in zip(outputs, values, strict=True)
        )

    return run
