"""What a server's event log tells of a stretch of time: what batches really take, with the neighbours they have, which
is the service model of a server as it runs; and how long requests were with the dispatcher."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.request import Outcome
from cotenant.runtime.events import Finished, LaneSpec, Reply, Run
from cotenant.runtime.log import LogLine
from cotenant.sim.service import BatchTimes, Key, Noise, RecordedBatches

Array = NDArray[np.float64]

ENOUGH = 30  # batches of one size, whose median is taken as it is
PARTS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


class ObservedBatch(msgspec.Struct, frozen=True):
    """A batch. start, seconds: from its stretch of time's begin, and how long."""

    start: float
    rows: int
    seconds: float


class Observations(msgspec.Struct, frozen=True):
    """batches: as they started, by lane and model. requests: seconds from arrival to answer of those that were served,
    by model."""

    batches: dict[Key, list[ObservedBatch]]
    requests: dict[str, list[float]]


def collect_observations(lines: Iterable[LogLine], since: float, until: float) -> Observations:
    """Of batches that ran and requests that came and were answered, from `since` to `until` (by the log's clock)."""
    batches: defaultdict[Key, list[ObservedBatch]] = defaultdict(list)
    requests: defaultdict[str, list[float]] = defaultdict(list)
    running: dict[tuple[str, int], tuple[Run, float]] = {}
    for line in lines:
        if line.now > until:
            break
        if isinstance(line.event, Finished):
            run, started = running.pop((line.event.lane, line.event.batch), (None, 0.0))
            if run is not None and since <= started:
                rows = sum(request.size for request in run.requests)
                batches[run.lane, run.model].append(ObservedBatch(started - since, rows, line.now - started))
        for command in line.commands:
            if isinstance(command, Run):
                running[command.lane, command.batch] = command, line.now
            elif isinstance(command, Reply) and command.outcome is Outcome.SERVED:
                for request in command.requests:
                    if since <= request.arrived:
                        requests[request.model].append(line.now - request.arrived)
    return Observations(dict(batches), dict(requests))


def fit_batch_times(lanes: Iterable[LaneSpec], batches: Mapping[Key, Sequence[ObservedBatch]]) -> dict[Key, BatchTimes]:
    """How long batches take and how much that varies, by lane and model, of those that ran at all: for a run with other
    arrivals, or at another time."""
    return {key: _batches(_curve(predicted, ran), ran) for key, predicted, ran in _known(lanes, batches)}


def recorded_batches(
    lanes: Iterable[LaneSpec], batches: Mapping[Key, Sequence[ObservedBatch]]
) -> dict[Key, RecordedBatches]:
    """The very batches, by lane and model, of those that ran at all: for a run with the same arrivals, from the same
    time on. What is left between it and what was seen is not for the batches."""
    return {key: _record(_curve(predicted, ran), ran) for key, predicted, ran in _known(lanes, batches)}


def _known(
    lanes: Iterable[LaneSpec], batches: Mapping[Key, Sequence[ObservedBatch]]
) -> Iterator[tuple[Key, Sequence[float], Sequence[ObservedBatch]]]:
    """With what the lane predicts of 1, 2, … rows."""
    predicted = {(lane.id, model.model): model.latencies for lane in lanes for model in lane.models}
    return ((key, predicted[key], ran) for key, ran in batches.items() if ran and key in predicted)


def _curve(predicted: Sequence[float], ran: Sequence[ObservedBatch]) -> tuple[float, ...]:
    """Medians of 1, 2, … rows.

    Sizes that did not run often lie on a line: so many times what the lane predicts, and something for every batch, as
    those that ran have it by least squares.
    """
    took: defaultdict[int, list[float]] = defaultdict(list)
    for batch in ran:
        took[batch.rows].append(batch.seconds)
    medians = {rows: statistics.median(seconds) for rows, seconds in took.items()}
    fixed, times = _line(
        np.array([predicted[rows - 1] for rows in medians]),
        np.array(list(medians.values())),
        np.array([float(len(seconds)) for seconds in took.values()]),
    )
    often = {rows for rows, seconds in took.items() if len(seconds) >= ENOUGH}
    return tuple(
        medians[rows] if rows in often else fixed + times * seconds for rows, seconds in enumerate(predicted, 1)
    )


def _batches(curve: tuple[float, ...], ran: Sequence[ObservedBatch]) -> BatchTimes:
    factors = np.array([batch.seconds / curve[batch.rows - 1] for batch in ran])
    levels = tuple(np.quantile(factors, PARTS).tolist())
    return BatchTimes(curve, Noise(float(factors.std()), levels, PARTS))


def _record(curve: tuple[float, ...], ran: Sequence[ObservedBatch]) -> RecordedBatches:
    ran = sorted(ran, key=lambda batch: batch.start)
    return RecordedBatches(
        latencies=curve,
        starts=tuple(batch.start for batch in ran),
        rows=tuple(batch.rows for batch in ran),
        factors=tuple(batch.seconds / curve[batch.rows - 1] for batch in ran),
    )


def _line(x: Array, y: Array, weight: Array) -> tuple[float, float]:
    """What is fixed and what is proportional, neither below 0; relative errors count."""
    weight = weight / y**2
    mean_x, mean_y = np.average(x, weights=weight), np.average(y, weights=weight)
    spread = float(weight @ (x - mean_x) ** 2)
    times = float(weight @ ((x - mean_x) * (y - mean_y))) / spread if spread > 0 else float(mean_y / mean_x)
    times = min(max(times, 0.0), float((weight @ (x * y)) / (weight @ (x * x))))
    return max(0.0, float(mean_y - times * mean_x)), times
