"""Hold the tensors of a request that runs in parts: its rows on their way to several batches, and what these answer."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.request import Request
from cotenant.core.tensor import Tensor
from cotenant.errors import FailedError
from cotenant.live.rows import concatenate, split_rows

Tensors = tuple[Tensor, ...]


class SplitTensors:
    """Collect the outputs of the parts of a request. request: its id."""

    def __init__(self, request: int) -> None:
        self.request = request
        self._rows: dict[int, tuple[int, int]] = {}  # of each part: the first, and how many
        self._outputs: dict[int, Tensors] = {}

    @property
    def parts(self) -> Sequence[int]:
        """Return the ids of all parts."""
        return list(self._rows)

    def split(self, request: int, inputs: Tensors, parts: Sequence[Request]) -> list[Tensors]:
        """Return the inputs of the parts that take the place of the request, or of one of its parts."""
        first, _ = self._rows.pop(request, (0, 0))
        self._outputs.pop(request, None)
        sizes = [part.size for part in parts]
        for part in parts:
            self._rows[part.id] = first, part.size
            first += part.size
        apart = [split_rows(tensor, sizes) for tensor in inputs]
        return [tuple([tensors[number] for tensors in apart]) for number in range(len(parts))]

    def take(self, part: int, outputs: Tensors) -> Tensors | None:
        """Keep the outputs of a part; return those of the request once there are all, its rows in order.

        A part that is retried may come twice. Raises FailedError where the outputs of a part do not have its rows, or
        those of parts do not fit together.
        """
        _, size = self._rows[part]
        for tensor in outputs:
            if tensor.shape[:1] != (size,):
                raise FailedError(
                    f"output {tensor.name!r} has the shape {list(tensor.shape)} for {size} rows, so it cannot be put "
                    "together with others; set max_batch_size: 0 in the model's config.pbtxt"
                )
        self._outputs[part] = outputs
        if len(self._outputs) < len(self._rows):
            return None
        ordered = [self._outputs[part] for part, _ in sorted(self._rows.items(), key=lambda entry: entry[1])]
        return tuple([concatenate(tensors) for tensors in zip(*ordered, strict=True)])
