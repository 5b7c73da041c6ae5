"""Worker processes that are started ahead: a lane that takes one has only its models to load.

What they have behind them is the interpreter and its libraries, which with PyTorch is most of a start. They have no
model and no CUDA context, and so take no device memory; what a share is under MPS is read when a context is made.
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
    """What a process has from its start. shared: it can serve many lanes. modules: those that it has imported."""

    shared: bool
    modules: frozenset[str]


class WarmPool:
    """count: how many there are to be of each outfit. begin: starts one, by its name, outfit and the modules that it is
    to import ahead."""

    def __init__(self, count: int, begin: Callable[[str, WorkerTemplate, Sequence[str]], WorkerProcess]) -> None:
        self._count = count
        self._begin = begin
        self._kept: defaultdict[WorkerTemplate, list[WorkerProcess]] = defaultdict(list)
        self._failed: set[WorkerTemplate] = set()  # not tried again before a process of that outfit was needed

    @property
    def ready(self) -> int:
        """How many wait for a lane."""
        return sum(process.waits for processes in self._kept.values() for process in processes)

    def take(self, outfit: WorkerTemplate, name: str) -> WorkerProcess | None:
        """One that is ready, which is then no spare any more, but the process of whoever has that name."""
        self._failed.discard(outfit)
        for process in self._kept[outfit]:
            if process.take(name):
                self._kept[outfit].remove(process)
                return process
        return None

    def keep(self, wanted: Set[WorkerTemplate]) -> None:
        """Have as many as there are to be of these outfits, and none of others; those that are missing are started."""
        for outfit in self._kept.keys() - wanted:
            for process in self._kept.pop(outfit):
                process.kill("it is not needed any more")
        if self._count:
            for outfit in wanted - self._failed:
                self._fill(outfit)

    def _fill(self, outfit: WorkerTemplate) -> None:
        while len(self._kept[outfit]) < self._count:
            try:
                process = self._begin("a spare", outfit, sorted(outfit.modules))
            except WorkerError as error:
                self._failed.add(outfit)
                logger.warning("%s", error)
                return
            self._kept[outfit].append(process)
            process.gone.add_done_callback(functools.partial(self._left, outfit, process))

    def _left(self, outfit: WorkerTemplate, process: WorkerProcess, gone: asyncio.Future[str]) -> None:
        if process in self._kept[outfit]:
            self._kept[outfit].remove(process)
            self._failed.add(outfit)
            logger.warning("a spare worker died, and is missed only by the next lane that starts: %s", gone.result())
