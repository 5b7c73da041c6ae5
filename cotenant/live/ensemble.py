"""Hold the tensors of one request of an ensemble between its steps."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cotenant.core.application import MAX_REQUESTS
from cotenant.core.tensor import Tensor, TensorSpec, nbytes
from cotenant.errors import FailedError
from cotenant.live.rows import concatenate
from cotenant.worker.ensemble import Ensemble, EnsembleStage


class EnsembleTensors:
    """Hold the inputs of the request and the outputs of its steps, by the ensemble's names.

    Data is passed on, and copied only where the outputs of a step that ran for each row are concatenated.
    """

    def __init__(self, ensemble: Ensemble, inputs: Sequence[Tensor]) -> None:
        self._ensemble = ensemble
        self._tensors = {tensor.name: tensor for tensor in inputs}
        self._rows: dict[str, dict[int, Tensor]] = {}  # outputs of such a step, by name and row

    def inputs(self, number: int, item: int) -> tuple[Tensor, ...]:
        """Return the inputs of the step with that number; one row of them, where it runs per row."""
        step = self._ensemble.steps[number]
        given = [_renamed(self._tensors[theirs], own) for own, theirs in step.inputs.items()]
        return tuple(_row(tensor, item) if step.each else tensor for tensor in given)

    def made(self, number: int, outputs: Sequence[Tensor]) -> dict[int, int]:
        """Return by step, for steps that run per row of this step's outputs, the number of rows. Raises FailedError
        where outputs differ in rows, or have too many."""
        step = self._ensemble.steps[number]
        return {
            later: self._count(other, step, outputs)
            for later, other in enumerate(self._ensemble.steps)
            if other.each and other.after == (step.name,)
        }

    def _count(self, later: EnsembleStage, step: EnsembleStage, outputs: Sequence[Tensor]) -> int:
        rows = {
            step.outputs[tensor.name]: tensor.shape[0]
            for tensor in outputs
            if tensor.name in step.outputs and tensor.shape
        }
        counts = {theirs: rows[theirs] for theirs in later.inputs.values()}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{count} of {name!r}" for name, count in counts.items())
            raise FailedError(f"step {later.name!r} runs for each row, and there are {told}")
        count = next(iter(counts.values()))
        if count > MAX_REQUESTS:
            raise FailedError(f"step {later.name!r} runs for each row, {MAX_REQUESTS} at most; there are {count}")
        return count

    def take(self, number: int, item: int, outputs: Sequence[Tensor]) -> None:
        """Keep the outputs of the step with that number; of that row, where it runs per row."""
        step = self._ensemble.steps[number]
        for tensor in outputs:
            if tensor.name in step.outputs:
                name = step.outputs[tensor.name]
                if step.each:
                    self._rows.setdefault(name, {})[item] = tensor
                else:
                    self._tensors[name] = _renamed(tensor, name)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return the outputs of the ensemble. Raises FailedError where rows differ in shape."""
        return tuple(self._tensors.get(spec.name) or self._concatenated(spec) for spec in self._ensemble.info.outputs)

    def _concatenated(self, spec: TensorSpec) -> Tensor:
        """Concatenate rows in order; without rows, return an empty tensor of the right shape."""
        rows = [_renamed(row, spec.name) for _, row in sorted(self._rows.get(spec.name, {}).items())]
        if not rows:
            return Tensor(spec.name, spec.datatype, (0, *(max(0, size) for size in spec.shape[1:])), b"")
        return concatenate(rows)


def _row(tensor: Tensor, item: int) -> Tensor:
    shape = (1, *tensor.shape[1:])
    size = nbytes(tensor.datatype, shape)
    return msgspec.structs.replace(
        tensor,
        shape=shape,
        data=memoryview(tensor.data)[item * size : (item + 1) * size],
        start=tensor.start + item * size,
    )


def _renamed(tensor: Tensor, name: str) -> Tensor:
    return tensor if tensor.name == name else msgspec.structs.replace(tensor, name=name)
