"""Keep the worker processes of a pool: new ones, pre-started ones, and those that serve several lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set

from cotenant.core.identity import LaneId
from cotenant.live.confinement import Confinement
from cotenant.live.descriptors import DescriptorReserve
from cotenant.live.process import WorkerConnection, WorkerProcess
from cotenant.live.warm_pool import WarmPool, WorkerTemplate


class WorkerProcesses:
    """arena: the descriptor that processes inherit. left: see `WorkerProcess`. warm_workers: pre-started processes per
    worker template."""

    def __init__(
        self, arena: int, left: Callable[[Sequence[WorkerConnection], str], None], *, warm_workers: int = 0
    ) -> None:
        self.confinement = Confinement()  # of processes that start from now on
        self.descriptors = DescriptorReserve()
        self._arena = arena
        self._left = left
        self._running: set[WorkerProcess] = set()  # processes that have not exited, pre-started ones included
        self._shared: dict[str, WorkerProcess] = {}  # by name
        self._warm = WarmPool(warm_workers, self._begin)

    def take(self, lane: LaneId, shared_by: str, modules: frozenset[str]) -> WorkerProcess:
        """Return the process for a lane: a shared one, a pre-started one, or a new one. shared_by: the name of a
        process that serves several lanes; empty where it serves this one alone. Raises ProcessLimitError."""
        shared = self._shared.get(shared_by)
        if shared is not None and not shared.ending:
            return shared
        template = WorkerTemplate(bool(shared_by), modules)
        name = shared_by or lane
        process = self._warm.take(template, name) or self._begin(name, template)
        if shared_by:
            self._shared[shared_by] = process
        return process

    def keep_warm(self, templates: Set[WorkerTemplate]) -> None:
        """Keep processes pre-started for these templates, and end those for others."""
        self._warm.keep(templates)

    @property
    def warm(self) -> int:
        """Return the number of pre-started processes."""
        return self._warm.ready

    async def close(self) -> None:
        """End all processes that have not exited."""
        await asyncio.gather(*(process.stop("the server has stopped") for process in self._running))
        self.descriptors.close()

    def _begin(self, name: str, template: WorkerTemplate, preload: Sequence[str] | None = None) -> WorkerProcess:
        with self.descriptors.lent():
            process = WorkerProcess(
                name,
                self._arena,
                left=self._left,
                shared=template.shared,
                preload=preload,
                confinement=self.confinement,
            )
        self._running.add(process)
        process.gone.add_done_callback(lambda gone: self._running.discard(process))
        return process
