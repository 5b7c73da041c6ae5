"""Gather the inputs of many requests into one batch and scatter its outputs back to them."""

from __future__ import annotations

import itertools
import math
import mmap
import time
from collections.abc import Sequence

import numpy as np

from cotenant.core.tensor import DTYPES
from cotenant.errors import ModelError
from cotenant.worker.runners import Runner
from cotenant.worker.runners.arrays import Array, datatype, decode_strings, encode_strings, one_line
from cotenant.worker.wire import LARGE, TensorPart, aligned

Request = Sequence[TensorPart]


class BatchBuilder:
    """Run requests as one batch on a runner.

    memory: the arena. room: start and size in bytes of the block for large outputs. gather, infer, scatter, device:
    seconds, as in `Timing`.
    """

    def __init__(self, runner: Runner, memory: mmap.mmap, room: tuple[int, int]) -> None:
        self.gather = 0.0
        self.infer = 0.0
        self.scatter = 0.0
        self.device = 0.0
        self.rows = 0
        self._runner = runner
        # numpy has no bfloat16: such outputs come as another dtype and are labelled by the model's description.
        self._datatypes = {spec.name: spec.datatype for spec in runner.model.outputs if spec.datatype == "BF16"}
        self._memory = memory
        self._start = room[0]
        self._end = room[0] + room[1]

    def run(self, requests: Sequence[Request]) -> list[list[TensorPart] | str]:
        """Return the outputs of each request, or the reason why the model failed on it.

        Requests whose tensors differ in more than their rows run separately. A batch that fails is bisected, so that
        one bad request does not cost the others their answers. Raises DeviceError if the device runs nothing any more.
        """
        answers: list[list[TensorPart] | str] = [[] for _ in requests]
        pending = self._compatible(requests)
        while pending:
            members = pending.pop()
            try:
                outputs = self._run_once([requests[member] for member in members])
            except (ModelError, ValueError, MemoryError) as error:
                if len(members) > 1:
                    half = len(members) // 2
                    pending += [members[:half], members[half:]]
                else:
                    answers[members[0]] = one_line(error)
            else:
                for member, parts in zip(members, outputs, strict=True):
                    answers[member] = parts
        return answers

    def _run_once(self, requests: Sequence[Request]) -> list[list[TensorPart]]:
        begun = time.monotonic()
        sizes = [request[0].shape[0] for request in requests] if self._runner.model.batched else [1]
        rows = sum(sizes)
        inputs = {parts[0].name: self._join(parts, rows) for parts in zip(*requests, strict=True)}
        gathered = time.monotonic()
        self.rows += rows
        self.gather += gathered - begun
        try:
            outputs = self._runner.run(inputs)
        finally:
            inferred = time.monotonic()
            self.infer += inferred - gathered
        self.device += self._runner.device
        split = [self._split(name, array, sizes) for name, array in outputs]
        self.scatter += time.monotonic() - inferred
        return [list(parts) for parts in zip(*split, strict=True)]

    def _compatible(self, requests: Sequence[Request]) -> list[list[int]]:
        """Group the indices of requests that can share a batch."""
        if len(requests) == 1 or not self._runner.model.batched:
            return [[index] for index in range(len(requests))]
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, request in enumerate(requests):
            key = tuple([(part.name, part.datatype, part.shape[1:]) for part in request])
            groups.setdefault(key, []).append(index)
        return list(groups.values())

    def _join(self, parts: Sequence[TensorPart], rows: int) -> Array:
        first = parts[0]
        inline = [part.data for part in parts if part.data is not None]
        arrays: list[Array]
        if len(inline) == len(parts) > 1 and first.datatype != "BYTES":  # joining bytes is much faster than numpy
            arrays = [np.frombuffer(b"".join(inline), DTYPES[first.datatype]).reshape(rows, *first.shape[1:])]
        else:
            arrays = [self._array(part) for part in parts]
        shape = arrays[0].shape if len(arrays) == 1 else (rows, *first.shape[1:])
        joined = self._runner.join(first.name, arrays, shape)
        if joined is not None:
            return joined
        if len(arrays) > 1:
            return np.concatenate(arrays)
        return arrays[0] if arrays[0].flags.aligned else arrays[0].copy()

    def _array(self, part: TensorPart) -> Array:
        data = memoryview(self._memory)[part.start : part.start + part.size] if part.data is None else part.data
        if part.datatype == "BYTES":
            return decode_strings(data, part.shape)
        return np.frombuffer(data, DTYPES[part.datatype]).reshape(part.shape)

    def _split(self, name: str, array: Array, sizes: Sequence[int]) -> list[TensorPart]:
        """Split an output by the rows of each request. Raises ModelError if its first dimension is not the batch."""
        if len(sizes) == 1:
            shapes = [array.shape]
        elif array.shape[:1] == (sum(sizes),):
            shapes = [(size, *array.shape[1:]) for size in sizes]
        else:
            raise ModelError(
                f"output {name!r} has the shape {list(array.shape)} for {sum(sizes)} rows, so it cannot be divided "
                "among requests; set max_batch_size: 0 in the model's config.pbtxt"
            )
        if array.dtype == object:
            ends = itertools.accumulate(sizes)
            rows = [array[end - size : end] if len(sizes) > 1 else array for end, size in zip(ends, sizes, strict=True)]
            return [TensorPart(name, "BYTES", row.shape, memoryview(encode_strings(row))) for row in rows]
        kind = self._datatypes.get(name, datatype(array))
        place, data = self._start, None
        if array.nbytes >= LARGE and place + array.nbytes <= self._end:
            self._start += aligned(array.nbytes)
            np.frombuffer(self._memory, array.dtype, array.size, place).reshape(array.shape)[...] = array
        else:
            place, data = 0, memoryview(array.tobytes())
        parts = []
        for shape in shapes:
            size = array.itemsize * math.prod(shape)
            parts.append(
                TensorPart(name, kind, shape, None if data is None else data[place : place + size], place, size)
            )
            place += size
        return parts
