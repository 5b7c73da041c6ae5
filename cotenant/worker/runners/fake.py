"""Pretend to run a model: sleep as long as the profile says."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.errors import ModelError
from cotenant.worker.runners.arrays import Array, filled_array
from cotenant.worker.wire import WorkerModel


class Fake:
    """Run nothing. An output repeats the input at its position if datatype and shape match, and is zero otherwise."""

    device = 0.0
    memory = 0
    warmed = False

    def __init__(self, model: WorkerModel) -> None:
        if len(model.latencies) < model.max_batch:
            raise ModelError(
                f"model {model.name!r} has latencies for {len(model.latencies)} rows, and {model.max_batch} as its "
                "largest batch; profile it up to there"
            )
        self.model = model

    def join(self, name: str, parts: Sequence[Array], shape: tuple[int, ...]) -> None:
        return None

    def run(self, inputs: dict[str, Array]) -> list[tuple[str, Array]]:
        model = self.model
        rows = next(iter(inputs.values())).shape[0] if model.batched else 1
        sources = (*model.inputs, *(None for _ in model.outputs))
        return [
            (spec.name, inputs[source.name])
            if source and (source.datatype, source.shape[1:]) == (spec.datatype, spec.shape[1:])
            else (spec.name, filled_array(spec, rows, 0, batched=model.batched))
            for spec, source in zip(model.outputs, sources, strict=False)
        ]

    def improve(self) -> bool:
        return False

    def minimum_seconds(self, rows: int) -> float:
        return self.model.latencies[min(rows, len(self.model.latencies)) - 1]

    def close(self) -> None:
        pass
