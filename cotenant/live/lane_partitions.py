"""Open, resize and close the partitions of lanes by a backend, and give them their places on the lending board."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from cotenant.backends import Backend
from cotenant.core.identity import LaneId
from cotenant.live.lane_workers import LaneWorker, WorkerLane
from cotenant.live.lending import Lending

logger = logging.getLogger(__name__)

_Args = TypeVarTuple("_Args")
_T = TypeVar("_T")


class LanePartitions:
    """Call a backend for the lanes of a pool. Its calls raise ConfigError and DeviceError."""

    def __init__(self, backend: Backend, lending: Lending) -> None:
        self.backend = backend
        self._lending = lending
        self._turns = ThreadPoolExecutor(1, "cotenant-backend")  # ends with the pool; lanes may outlast its `close`

    async def open(self, worker: LaneWorker, leaving: Collection[LaneId]) -> None:
        """Open the partition of a worker's lane, anew where it is open, unless the worker has been killed meanwhile."""
        lane = worker.lane
        if lane.opened:
            await self._in_turn(self.backend.close, lane.name)
            if worker.killed:
                return  # the partition may be closed for good: what is opened now, nobody would close
        lane.opened = True
        share = lane.share
        lane.launch = await self._in_turn(self.backend.open, lane.name, share, leaving)
        if lane.share != share:  # it was changed meanwhile
            lane.launch = self.backend.resize({lane.name: lane.share})[lane.name]
        self._lend(lane)

    async def started(self, lane: LaneId, pid: int) -> None:
        """Tell the backend of the process of a lane's worker."""
        await self._in_turn(self.backend.on_worker_started, lane, pid)

    def resize(self, lanes: Sequence[WorkerLane]) -> list[WorkerLane]:
        """Give the partitions of lanes that are open their lanes' shares; return those that are launched otherwise from
        now on."""
        launches = self.backend.resize({lane.name: lane.share for lane in lanes if lane.opened})
        resized = [lane for lane in lanes if lane.name in launches]
        for lane in resized:
            lane.launch = launches[lane.name]
            self._lend(lane)
        return resized

    async def close(self, lane: LaneId) -> None:
        """Close a lane's partition for good. What goes wrong is logged: nothing can be done about it."""
        try:
            await self._in_turn(self.backend.close, lane)
        except Exception:
            logger.exception("the partition of %s could not be taken down", lane)
        self._lending.close(lane)

    def _lend(self, lane: WorkerLane) -> None:
        if lane.launch.lend and not lane.launch.lent_by_kernel:
            self._lending.open(lane.name, lane.launch.cores)

    async def _in_turn(self, call: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """Run a call of the backend in its thread, since drivers are slow: one at a time, in order, and to its end even
        if the caller is cancelled."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._turns, call, *args))
