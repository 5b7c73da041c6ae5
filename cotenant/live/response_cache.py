"""Keep answers of models whose configuration asks for it, by the content of their inputs."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from cotenant.core.tensor import Tensor
from cotenant.live.deployment import ServableModel
from cotenant.worker.repository import Entry

Key = bytes

OVERHEAD = 512  # bytes that an entry takes besides its tensors
MAX_PART = 8  # an answer above this part of the cache is not kept: it would cost too many others


class ResponseCache:
    """Hold at most `size` bytes of answers, those that were asked for last.

    An answer is found by a hash (BLAKE2b, 256 bits) of the inputs' names, types, shapes and bytes, and of what is
    served under the model's name: other files, another version or configuration find nothing.
    """

    def __init__(self, size: int) -> None:
        self.used = 0
        self._size = size
        self._answers: OrderedDict[Key, tuple[tuple[Tensor, ...], int]] = OrderedDict()
        self._served: dict[str, tuple[Entry, int]] = {}  # what is served under a name, and its number
        self._numbers = 0

    def get(self, key: Key) -> tuple[Tensor, ...] | None:
        """Return the outputs of an answer that is kept."""
        kept = self._answers.get(key)
        if kept is None:
            return None
        self._answers.move_to_end(key)
        return kept[0]

    def accepts(self, key: Key, size: int) -> bool:
        """Return whether an answer would be kept, of so many bytes of tensors."""
        return size + OVERHEAD <= self._size // MAX_PART and key not in self._answers

    def put(self, key: Key, outputs: tuple[Tensor, ...], size: int) -> None:
        """Keep an answer, in place of those that were not asked for for longest. outputs: in memory of their own, see
        `copied`; size: bytes of these."""
        if not self.accepts(key, size):
            return
        size += OVERHEAD
        self._answers[key] = outputs, size
        self.used += size
        while self.used > self._size:
            _, (_, gone) = self._answers.popitem(last=False)
            self.used -= gone

    def number(self, offered: ServableModel) -> int:
        """Return the number of what is served: another one once its files or its configuration are others."""
        name, entry = offered.info.name, offered.entry
        known = self._served.get(name)
        if known is not None and (known[0] is entry or known[0] == entry):
            return known[1]
        self._numbers += 1
        self._served[name] = entry, self._numbers
        return self._numbers


def key_of(name: str, number: int, inputs: Sequence[Tensor]) -> Key:
    """Return what an answer of a model is kept under. number: of what is served under its name."""
    hashed = hashlib.blake2b(digest_size=32)
    heads = [(tensor.name, tensor.datatype, tensor.shape, len(tensor.data)) for tensor in inputs]
    hashed.update(repr((name, number, heads)).encode())
    for tensor in inputs:
        hashed.update(tensor.data)
    return hashed.digest()


def copied(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return outputs in memory of their own: the workers' is lent for the time of a request.

    NumPy copies, which lets other threads run meanwhile; `bytes` does not.
    """
    return tuple(
        [
            Tensor(out.name, out.datatype, out.shape, np.frombuffer(out.data, np.uint8).copy().data.toreadonly())
            for out in outputs
        ]
    )
