"""Keep worker processes pre-started: a lane that takes one has only its models to load.

They have started the interpreter and imported its libraries, which with PyTorch is most of a start. They have no model
and no CUDA context, and so take no device memory; under MPS, a client's share is read when its context is created.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from cotenant.errors import WorkerError
from cotenant.live.process import WorkerProcess

logger = logging.getLogger(__name__)


class WorkerTemplate(NamedTuple):
    """Describe what a pre-started process has loaded. shared: it can serve many lanes. modules: those that it has
    imported."""

    shared: bool
    modules: frozenset[str]


class WarmPool:
    """Keep `count` pre-started processes per worker template. begin: starts one, given its name, its template and the
    modules to import."""

    def __init__(self, count: int, begin: Callable[[str, WorkerTemplate, Sequence[str]], WorkerProcess]) -> None:
        self._count = count
        self._begin = begin
        self._kept: defaultdict[WorkerTemplate, list[WorkerProcess]] = defaultdict(list)
        self._failed: set[WorkerTemplate] = set()  # not retried until a process of that template is needed

    @property
    def ready(self) -> int:
        """Return the number of pre-started processes that wait for a lane."""
        return sum(process.waits for processes in self._kept.values() for process in processes)

    def take(self, template: WorkerTemplate, name: str) -> WorkerProcess | None:
        """Take a process that is ready out of the pool and name it after its new owner; None where none is ready."""
        self._failed.discard(template)
        for process in self._kept[template]:
            if process.take(name):
                self._kept[template].remove(process)
                return process
        return None

    def keep(self, wanted: Set[WorkerTemplate]) -> None:
        """Fill the pool for these templates, and end processes of all others."""
        for template in self._kept.keys() - wanted:
            for process in self._kept.pop(template):
                process.kill("it is not needed any more")
        if self._count:
            for template in wanted - self._failed:
                self._fill(template)

    def _fill(self, template: WorkerTemplate) -> None:
        while len(self._kept[template]) < self._count:
            try:
                process = self._begin("a pre-started worker", template, sorted(template.modules))
            except WorkerError as error:
                self._failed.add(template)
                logger.warning("%s", error)
                return
            self._kept[template].append(process)
            process.gone.add_done_callback(functools.partial(self._left, template, process))

    def _left(self, template: WorkerTemplate, process: WorkerProcess, gone: asyncio.Future[str]) -> None:
        if process in self._kept[template]:
            self._kept[template].remove(process)
            self._failed.add(template)
            logger.warning("a pre-started worker died; the next lane starts without one: %s", gone.result())
