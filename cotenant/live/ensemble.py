"""The tensors of one request of an ensemble, on their way from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cotenant.core.tensor import Tensor
from cotenant.worker.ensemble import Ensemble


class Blackboard:
    """Holds what the request brought and what steps made, by the ensemble's names. Data is passed on, never copied."""

    def __init__(self, ensemble: Ensemble, inputs: Sequence[Tensor]) -> None:
        self._ensemble = ensemble
        self._tensors = {tensor.name: tensor for tensor in inputs}

    def inputs(self, number: int) -> tuple[Tensor, ...]:
        """What the step of that number takes."""
        step = self._ensemble.steps[number]
        return tuple(_renamed(self._tensors[theirs], own) for own, theirs in step.inputs.items())

    def take(self, number: int, outputs: Sequence[Tensor]) -> None:
        """What the step of that number made."""
        names = self._ensemble.steps[number].outputs
        self._tensors.update((names[it.name], _renamed(it, names[it.name])) for it in outputs if it.name in names)

    def outputs(self) -> tuple[Tensor, ...]:
        return tuple(self._tensors[spec.name] for spec in self._ensemble.info.outputs)


def _renamed(tensor: Tensor, name: str) -> Tensor:
    return tensor if tensor.name == name else msgspec.structs.replace(tensor, name=name)
