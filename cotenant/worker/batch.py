"""From the inputs of many requests to one batch, and from its outputs back to each."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence

import numpy as np

from cotenant.core.tensor import DTYPES
from cotenant.errors import ModelError
from cotenant.worker.runners import Array, Runner, datatype, decode_strings, encode_strings
from cotenant.worker.wire import LARGE, Part, aligned

Request = Sequence[Part]


class Batch:
    """Requests that a runner takes as one batch.

    memory: the arena; room: start and size of the place in it for large outputs. gather, infer, scatter: see `Timing`.
    """

    def __init__(self, runner: Runner, memory: mmap.mmap, room: tuple[int, int]) -> None:
        self.gather = 0.0
        self.infer = 0.0
        self.scatter = 0.0
        self.rows = 0
        self._runner = runner
        self._memory = memory
        self._start = room[0]
        self._end = room[0] + room[1]

    def run(self, requests: Sequence[Request]) -> list[list[Part]]:
        """The outputs of each request. Requests that differ in more than their rows run one after another."""
        answers: list[list[Part]] = [[] for _ in requests]
        for members in self._groups(requests):
            begun = time.monotonic()
            group = [requests[member] for member in members]
            sizes = [request[0].shape[0] for request in group] if self._runner.model.batched else [1]
            inputs = {parts[0].name: self._join(parts) for parts in zip(*group, strict=True)}
            gathered = time.monotonic()
            outputs = self._runner.run(inputs)
            inferred = time.monotonic()
            for name, array in outputs:
                for member, part in zip(members, self._split(name, array, sizes), strict=True):
                    answers[member].append(part)
            self.rows += sum(sizes)
            self.gather += gathered - begun
            self.infer += inferred - gathered
            self.scatter += time.monotonic() - inferred
        return answers

    def _groups(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Indices of requests that fit into one batch."""
        if not self._runner.model.batched:
            return ([index] for index in range(len(requests)))
        alike: dict[tuple[object, ...], list[int]] = {}
        for index, request in enumerate(requests):
            key = tuple([(part.name, part.datatype, part.shape[1:]) for part in request])
            alike.setdefault(key, []).append(index)
        return iter(alike.values())

    def _join(self, parts: Sequence[Part]) -> Array:
        arrays = [self._array(part) for part in parts]
        if len(arrays) > 1:
            return np.concatenate(arrays)
        return arrays[0] if arrays[0].flags.aligned else arrays[0].copy()

    def _array(self, part: Part) -> Array:
        data = memoryview(self._memory)[part.start : part.start + part.size] if part.data is None else part.data
        if part.datatype == "BYTES":
            return decode_strings(data, part.shape)
        return np.frombuffer(data, DTYPES[part.datatype]).reshape(part.shape)

    def _split(self, name: str, array: Array, sizes: Sequence[int]) -> list[Part]:
        if len(sizes) == 1:
            pieces = [array]
        elif array.shape[:1] == (sum(sizes),):
            ends = np.cumsum(sizes).tolist()
            pieces = [array[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        else:
            raise ModelError(
                f"output {name!r} has the shape {list(array.shape)} for {sum(sizes)} rows, so it cannot be divided "
                "among requests; set max_batch_size: 0 in the model's config.pbtxt"
            )
        if array.dtype == object:
            return [Part(name, "BYTES", piece.shape, memoryview(encode_strings(piece))) for piece in pieces]
        kind = datatype(array)
        if array.nbytes < LARGE or self._start + array.nbytes > self._end:
            return [Part(name, kind, piece.shape, memoryview(piece.tobytes())) for piece in pieces]
        start = self._start
        self._start += aligned(array.nbytes)
        np.frombuffer(self._memory, array.dtype, array.size, start).reshape(array.shape)[...] = array
        parts = []
        for piece in pieces:
            parts.append(Part(name, kind, piece.shape, None, start, piece.nbytes))
            start += piece.nbytes
        return parts
