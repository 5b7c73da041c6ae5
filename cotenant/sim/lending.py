"""Simulate processors whose idle share is lent: a batch computes, then is held until its share's time is up, unless
nobody else needs the cores (`runtime.lending`).

The rules are the server's own: the board on which lanes see each other, how often a held worker looks at it, how lanes
are pinned to cores. Cores are shared fairly among the threads that compute on them at the same moment.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cotenant.core.cpu_shares import CorePins, check_lending, computing_parts, threads_of
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.front_end import cores_of
from cotenant.runtime.events import Died, Event, Finished, Run
from cotenant.runtime.lane_assignment import LaneAssignment
from cotenant.runtime.lending import BOARD_SIZE, MAX_CREDIT, LendingBoard, look_interval
from cotenant.sim.loop import Actor, Tell
from cotenant.sim.metrics import CountingService

_EPSILON = 1e-8  # seconds of computing that rounding may leave; after 100 days it does 1e-9


@dataclass(slots=True)
class _Batch:
    """A batch in flight. due: when its share's time is up. left: seconds that it has yet to compute, on cores of its
    own. look: when its worker looks at the board next; infinite while it computes."""

    run: Run
    rows: int
    predicted: float
    started: float
    due: float
    left: float
    look: float = math.inf


@dataclass(slots=True)
class _Seat:
    """Where a lane runs. slot: on the board. credit: for its last batch that ended late, in seconds."""

    cores: tuple[int, ...]
    threads: int
    slot: int
    credit: float = 0.0


class _Machine:
    """One device: its cores, the lanes on them, and what they are doing."""

    def __init__(self, processors: float, cores: tuple[int, ...]) -> None:
        self.batches: dict[LaneId, _Batch] = {}
        self.seats: dict[LaneId, _Seat] = {}
        self.due = math.inf  # of what happens next
        self._processors = processors
        self._cores = cores
        self._board = LendingBoard(memoryview(bytearray(BOARD_SIZE)), fresh=True)
        self._speeds: dict[LaneId, float] = {}  # of the lanes that compute
        self._at = 0.0  # up to when computing is accounted for

    def open(self, lanes: Mapping[LaneId, LaneAssignment], now: float) -> None:
        """Pin lanes anew, the largest first; those that are not among them are about to leave."""
        self._advance(now)
        pins = CorePins()
        for name, lane in sorted(lanes.items(), key=lambda each: -each[1].partition.share):
            share = lane.partition.share
            threads = threads_of(share, self._processors)
            each = self._processors * share / WHOLE / threads
            cores = pins.pin(name, self._cores, threads, each) or self._cores
            if name in self.seats:
                seat = self.seats[name]
                seat.cores, seat.threads = cores, threads
                self._board.move(seat.slot, cores)
            elif (slot := self._board.open(cores)) is not None:
                self.seats[name] = _Seat(cores, threads, slot)
        self._reschedule()

    def close(self, lane: LaneId) -> None:
        """Take a lane away that runs nothing any more."""
        self._board.close(self.seats.pop(lane).slot)

    def drop(self, lane: LaneId, now: float) -> None:
        """Forget the batch of a worker that died."""
        if self.batches.pop(lane, None) is not None:
            self._advance(now)
            self._board.clear(self.seats[lane].slot)
            self.seats[lane].credit = 0.0  # the next has waited for nothing
            self._reschedule()

    def begin(self, batch: _Batch) -> None:
        lane = batch.run.lane
        self._advance(batch.started)
        batch.due -= self.seats[lane].credit
        self.batches[lane] = batch
        self._board.set_work(self.seats[lane].slot, True)
        self._reschedule()

    def step(self, now: float) -> _Batch | None:
        """Do what is due; return the batch that ends by it, if one does."""
        self._advance(now)
        for lane, batch in self.batches.items():
            if batch.look == math.inf and batch.left <= _EPSILON and batch.due > now:
                self._board.hold(self.seats[lane].slot, batch.due)
                batch.look = now
        ended = self._ending(now)
        if ended is not None:
            lane = ended.run.lane
            del self.batches[lane]
            self._board.resume(self.seats[lane].slot)
            self.seats[lane].credit = min(max(now - ended.due, 0.0), MAX_CREDIT)
        self._reschedule()
        return ended

    def ended(self, lane: LaneId) -> None:
        """Hear that a lane's batch has ended: it has no work, unless it was given a batch at once."""
        if lane not in self.batches and lane in self.seats:
            self._board.set_work(self.seats[lane].slot, False)

    def idle(self) -> float:
        """Return the share, in ‰, with which no lane computes now."""
        computing = [(lane, self.seats[lane]) for lane, batch in self.batches.items() if batch.look == math.inf]
        loads = self._loads(computing)
        return max(WHOLE * (1 - sum(min(load, 1.0) for load in loads.values()) / self._processors), 0.0)

    def _ending(self, now: float) -> _Batch | None:
        for lane, batch in self.batches.items():
            if batch.look > now:
                if batch.look == math.inf and batch.left <= _EPSILON:
                    return batch  # computed, and its share's time is up
                continue
            if batch.due <= now or self._board.may_resume(self.seats[lane].slot):
                return batch
            batch.look = now + look_interval(batch.due - now)
        return None

    def _advance(self, now: float) -> None:
        for lane, speed in self._speeds.items():
            if lane in self.batches:
                self.batches[lane].left -= (now - self._at) * speed
        self._at = now

    def _reschedule(self) -> None:
        computing = [lane for lane, batch in self.batches.items() if batch.look == math.inf]
        self._speeds = self._share_cores(computing)
        self.due = min(
            (
                self._at + max(batch.left, 0.0) / self._speeds[lane] if batch.look == math.inf else batch.look
                for lane, batch in self.batches.items()
            ),
            default=math.inf,
        )

    def _share_cores(self, lanes: Sequence[LaneId]) -> dict[LaneId, float]:
        """Return the speed at which each lane computes, over that on cores of its own. Lanes that float take the cores
        that the pinned ones leave."""
        seats = [(lane, self.seats[lane]) for lane in lanes]
        loads = self._loads(seats)
        return {lane: sum(1 / max(loads[core], 1.0) for core in seat.cores) / len(seat.cores) for lane, seat in seats}

    def _loads(self, seats: Sequence[tuple[LaneId, _Seat]]) -> dict[int, float]:
        """Return the threads that compute on each core."""
        loads = dict.fromkeys(self._cores, 0.0)
        for _, seat in sorted(seats, key=lambda each: len(each[1].cores)):
            _spread(loads, seat)
        return loads


def _spread(loads: dict[int, float], seat: _Seat) -> None:
    """Add a lane's threads to its cores, the least loaded first."""
    left = float(seat.threads)
    cores = sorted(seat.cores, key=lambda core: loads[core])
    for count, core in enumerate(cores, 1):
        level = loads[cores[count]] if count < len(cores) else math.inf
        room = (level - loads[core]) * count
        step = min(room, left) / count
        for each in cores[:count]:
            loads[each] += step
        left -= step * count
        if left <= 0:
            return


class LentProcessors:
    """The machines of a run whose idle shares are lent; devices without processors lend nothing. Raises ConfigError
    where none has any."""

    def __init__(self, problem: Problem) -> None:
        self.now = 0.0
        self.due = math.inf  # when the next thing happens on any of them
        check_lending(problem.fleet)
        self._problem = problem
        self._processors = {kind.name: kind.processors for kind in problem.fleet if kind.processors}
        self._machines: dict[DeviceId, _Machine] = {}
        self._by_lane: dict[LaneId, _Machine] = {}
        self._computing: dict[tuple[LaneId, str], tuple[float, ...]] = {}

    def open(self, lanes: Mapping[LaneId, LaneAssignment]) -> None:
        """Add lanes, or change them from now on."""
        by_device: defaultdict[DeviceId, dict[LaneId, LaneAssignment]] = defaultdict(dict)
        for name, lane in lanes.items():
            if lane.device.kind in self._processors:
                by_device[lane.device.id][name] = lane
        for device, there in by_device.items():
            processors = self._processors[device.kind]
            if device not in self._machines:
                self._machines[device] = _Machine(processors, cores_of(processors, self._problem.front_end))
            machine = self._machines[device]
            machine.open(there, self.now)
            self._by_lane.update(dict.fromkeys(there.keys() & machine.seats.keys(), machine))
            for name, lane in there.items():
                for model in lane.spec.models:
                    profile = self._problem.profiles[model.model, device.kind]
                    self._computing[name, model.model] = computing_parts(profile, lane.partition.share, processors)
        self._reschedule()

    def idle(self, device: DeviceId) -> float:
        """Return the share of a device, in ‰, with which no lane computes now."""
        return self._machines[device].idle() if device in self._machines else float(WHOLE)

    def lends(self, lane: LaneId) -> bool:
        return lane in self._by_lane

    def begin(self, run: Run, rows: int, predicted: float, seconds: float, now: float) -> None:
        """Start a batch of a lane that lends. seconds: that it takes if it is held until its share's time is up."""
        self.now = now
        computing = seconds * self._computing[run.lane, run.model][rows - 1]
        self._by_lane[run.lane].begin(_Batch(run, rows, predicted, now, now + seconds, computing))
        self._reschedule()

    def step(self, now: float) -> _Batch | None:
        """Do what is due; return the batch that ends by it, if one does. Then call `ended`."""
        self.now = now
        machine = min(self._machines.values(), key=lambda machine: machine.due)
        ended = machine.step(now)
        self._reschedule()
        return ended

    def ended(self, lane: LaneId) -> None:
        """Hear that a lane whose batch has ended was given another, if there is one, or was closed for want of any."""
        if lane in self._by_lane:
            self._by_lane[lane].ended(lane)

    def drop(self, lanes: Iterable[LaneId], now: float) -> None:
        """Forget the batches of workers that died."""
        for lane in lanes:
            if lane in self._by_lane:
                self._by_lane[lane].drop(lane, now)
        self._reschedule()

    def close(self, lane: LaneId) -> None:
        """Take a lane away that runs nothing any more."""
        if lane in self._by_lane:
            self._by_lane.pop(lane).close(lane)

    def _reschedule(self) -> None:
        self.due = min((machine.due for machine in self._machines.values()), default=math.inf)


class LendingActor:
    """Serve batches on processors that are lent, and end them; the actor of `sim.loop.play`, around another.

    counted: draws how long batches take on their share, and counts them.
    """

    def __init__(self, processors: LentProcessors, counted: CountingService, actor: Actor) -> None:
        self._processors = processors
        self._counted = counted
        self._actor = actor
        self._told: Tell = lambda event, now: None

    @property
    def due(self) -> float:
        return min(self._actor.due, self._processors.due)

    def serve(self, run: Run, now: float) -> float:
        """Start a batch; return its seconds, or infinity where only its end will tell."""
        if not self._processors.lends(run.lane):
            return self._counted.serve(run, now)
        rows, predicted, seconds = self._counted.draw(run, now)
        self._processors.begin(run, rows, predicted, seconds, now)
        return math.inf

    def act(self, now: float, tell: Tell) -> None:
        self._processors.now = now
        if self._actor.due <= self._processors.due:
            self._told = tell
            self._actor.act(now, self._tell)
            return
        batch = self._processors.step(now)
        if batch is None:
            return
        took = now - batch.started
        lent = max(batch.due - now, 0.0)
        self._counted.count(batch.run, batch.rows, batch.predicted, took, lent)
        tell(Finished(batch.run.lane, batch.run.batch, lent=lent), now)
        self._processors.ended(batch.run.lane)

    def drained(self, lane: LaneId, now: float) -> None:
        self._processors.close(lane)
        self._actor.drained(lane, now)

    def _tell(self, event: Event, now: float) -> None:
        if isinstance(event, Died):
            self._processors.drop((event.lane, *event.others), now)
        self._told(event, now)
