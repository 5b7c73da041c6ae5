"""Record a run as a `Timeline`: a transparent wrapper between the event loop and the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.request import Outcome
from cotenant.core.units import WHOLE
from cotenant.measure.histogram import Histogram
from cotenant.measure.timeline import Timeline
from cotenant.runtime.events import Applied, Arrived, Command, Died, Drained, Event, Failed, Finished, Reply, Run
from cotenant.runtime.lane_specs import workers_per_partition
from cotenant.sim.loop import Handle

INTERVALS = 60


class LanePlace(msgspec.Struct, frozen=True):
    """Locate a lane. share: its part, in ‰ of the device, of the partition's share. price: of the device, per hour."""

    device: DeviceId
    share: float
    price: float | None


def lane_places(plan: Plan, fleet: Iterable[Kind]) -> dict[LaneId, LanePlace]:
    """Return the place of every lane of a plan."""
    prices = {kind.name: kind.price for kind in fleet}
    return {
        LaneId(device.id, slot, worker): LanePlace(
            device.id, partition.share / workers_per_partition(partition), prices.get(device.kind)
        )
        for device in plan.devices
        for slot, partition in enumerate(device.partitions)
        for worker in range(workers_per_partition(partition))
    }


class Recorder:
    """Record a timeline; callable like a dispatcher's `handle`. Events after `seconds`, when nothing arrives any more,
    are left out.

    slots: places of all lanes of the run. progress: called with the number of completed intervals.
    """

    def __init__(
        self,
        handle: Handle,
        models: Iterable[str],
        slots: Mapping[LaneId, LanePlace],
        *,
        seconds: float,
        intervals: int = INTERVALS,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        names = list(models)
        self._handle = handle
        self._progress = progress
        self._slots = slots
        self._step = seconds / intervals
        self._intervals = intervals
        self._closed = 0
        self._until = self._step
        self._last = 0.0
        self._lanes: set[LaneId] = set()
        self._running: dict[LaneId, int] = {}  # lane → requests of its batch
        self._open = 0  # requests that have not ended
        self._devices = 0
        self._price = 0.0
        self._busy = 0.0  # ‰ of a device on which batches run
        # Of the current interval.
        self._arrived = dict.fromkeys(names, 0)
        self._in_time = dict.fromkeys(names, 0)
        self._late = dict.fromkeys(names, 0)
        self._latency = {name: Histogram() for name in names}
        self._integrals = [0.0] * 4  # of waiting, busy, devices, price over time
        # Of completed intervals.
        self._offered: dict[str, list[float]] = {name: [] for name in names}
        self._goodput: dict[str, list[float]] = {name: [] for name in names}
        self._missed: dict[str, list[float]] = {name: [] for name in names}
        self._p99: dict[str, list[float | None]] = {name: [] for name in names}
        self._means: list[list[float]] = [[], [], [], []]

    def __call__(self, event: Event, now: float) -> list[Command]:
        self._pass(now)
        if type(event) is Arrived:
            self._open += 1
            name = event.request.model
            if name in self._arrived:
                self._arrived[name] += 1
        elif type(event) is Died:
            for lane in (event.lane, *event.others):
                self._freed(lane)
        elif type(event) is Finished or type(event) is Failed:
            self._freed(event.lane)
        elif type(event) is Applied:
            self._lanes.update(spec.id for spec in event.lanes)
            self._count_devices()
        commands = self._handle(event, now)
        for command in commands:
            if type(command) is Run:
                self._running[command.lane] = len(command.requests)
                self._busy += self._share(command.lane)
            elif type(command) is Reply:
                self._ended(command, now)
            elif type(command) is Drained:
                self._freed(command.lane)
                self._lanes.discard(command.lane)
                self._count_devices()
        return commands

    def timeline(self) -> Timeline:
        """Return the timeline, after the run."""
        self._pass(self._intervals * self._step)
        priced = any(slot.price is not None for slot in self._slots.values())
        waiting, busy, devices, price = self._means
        return Timeline(
            step=self._step,
            offered=self._offered,
            goodput=self._goodput,
            missed=self._missed,
            p99=self._p99,
            waiting=waiting,
            busy=[used / (WHOLE * there) if there else 0.0 for used, there in zip(busy, devices, strict=True)],
            devices=devices,
            cost=price if priced else None,
        )

    def _ended(self, reply: Reply, now: float) -> None:
        self._open -= len(reply.requests)
        name = reply.requests[0].model
        if name not in self._in_time or reply.outcome is Outcome.CANCELLED:
            return
        in_time = 0
        if reply.outcome is Outcome.SERVED:
            self._latency[name].extend([now - request.arrived for request in reply.requests])
            in_time = sum([request.deadline >= now for request in reply.requests])
        self._in_time[name] += in_time
        self._late[name] += len(reply.requests) - in_time

    def _freed(self, lane: LaneId) -> None:
        if self._running.pop(lane, None) is not None:
            self._busy -= self._share(lane)

    def _share(self, lane: LaneId) -> float:
        slot = self._slots.get(lane)
        return 0.0 if slot is None else slot.share

    def _count_devices(self) -> None:
        prices = {self._slots[lane].device: self._slots[lane].price for lane in self._lanes if lane in self._slots}
        self._devices = len(prices)
        self._price = sum(price or 0.0 for price in prices.values())

    def _pass(self, now: float) -> None:
        """Advance to `now`; the state has not changed since the last call."""
        while now >= self._until and self._closed < self._intervals:
            self._integrate(self._until)
            self._close()
        self._integrate(now)

    def _integrate(self, now: float) -> None:
        length = now - self._last
        if length > 0:
            waiting = max(0, self._open - sum(self._running.values()))
            for i, value in enumerate((waiting, self._busy, self._devices, self._price)):
                self._integrals[i] += value * length
            self._last = now

    def _close(self) -> None:
        step = self._step
        for name in self._offered:
            self._offered[name].append(self._arrived[name] / step)
            self._goodput[name].append(self._in_time[name] / step)
            self._missed[name].append(self._late[name] / step)
            latency = self._latency[name]
            self._p99[name].append(latency.quantile(0.99) if latency.count else None)
            if latency.count:
                self._latency[name] = Histogram()
            self._arrived[name] = self._in_time[name] = self._late[name] = 0
        for values, integral in zip(self._means, self._integrals, strict=True):
            values.append(integral / step)
        self._integrals = [0.0] * 4
        self._closed += 1
        self._progress(self._closed, self._intervals)
        self._until = self._step * (self._closed + 1)
