"""Let the steps of a job run on as many multiprocessors of a GPU as it is granted, by CUDA green contexts.

A share changes at the next step: the step runs on a stream of another green context of the same process, and the
weights stay where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

from cotenant.worker.green import Multiprocessors
from cotenant.worker.jobs.context import JobContext


def groups_for(share: float, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the groups of multiprocessors that make up a share, from 0 to 1, and at least one: the last of the device,
    since those that serve are given the first. sizes: of all groups; a remainder of another size cannot be joined with
    others, and belongs to the whole alone."""
    if share >= 1:
        return tuple(range(len(sizes)))
    equal = sizes.count(sizes[0])
    count = max(1, min(equal, int(share * sum(sizes)) // sizes[0]))
    return tuple(range(equal - count, equal))


class StepStreams:
    """Run each step on a stream of the groups that its share gives. Without effect unless `enabled`."""

    def __init__(self, context: JobContext, *, enabled: bool, processors: Multiprocessors | None = None) -> None:
        self._context = context
        self._processors = (processors or Multiprocessors()) if enabled else None
        self._leases = contextlib.ExitStack()
        self._groups: tuple[int, ...] = ()
        self._handle = 0

    def __enter__(self) -> StepStreams:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leases.close()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run a step within the block. Raises DeviceError."""
        if self._processors is None:
            yield
            return
        import torch

        stream = torch.cuda.ExternalStream(self.handle())
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()  # the next step may run elsewhere, and what was granted is used up when it is done

    def handle(self) -> int:
        """Return the stream for the next step, a new one where the share has changed. Raises DeviceError."""
        assert self._processors is not None
        groups = groups_for(self._context.share, self._processors.sizes)
        if groups != self._groups:
            self._leases.close()
            self._handle = self._leases.enter_context(self._processors.stream(groups))
            self._groups = groups
        return self._handle
