"""Fit a service model to a server's event log: true batch latencies under co-location, and how long requests spent in
the dispatcher."""

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

MIN_BATCHES = 30  # of one size, from which their median is used directly
PROBABILITIES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


class ObservedBatch(msgspec.Struct, frozen=True):
    """Hold an observed batch. start: seconds from the beginning of the observed period. seconds: its duration."""

    start: float
    rows: int
    seconds: float


class Observations(msgspec.Struct, frozen=True):
    """Hold observations. batches: in order of their start, by lane and model. requests: seconds from arrival to reply
    of served requests, by model."""

    batches: dict[Key, list[ObservedBatch]]
    requests: dict[str, list[float]]


def collect_observations(lines: Iterable[LogLine], since: float, until: float) -> Observations:
    """Collect the batches that ran, and the requests that arrived and were served, from `since` to `until` (log
    clock)."""
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
    """Fit latencies and their variation to observed batches, by lane and model, to simulate other arrivals."""
    return {key: _batch_times(_curve(predicted, ran), ran) for key, predicted, ran in _with_predictions(lanes, batches)}


def recorded_batches(
    lanes: Iterable[LaneSpec], batches: Mapping[Key, Sequence[ObservedBatch]]
) -> dict[Key, RecordedBatches]:
    """Return the observed batches, by lane and model, to replay under the same arrivals from the same time on; what
    then still differs from the observation is not due to batch latencies."""
    return {key: _recorded(_curve(predicted, ran), ran) for key, predicted, ran in _with_predictions(lanes, batches)}


def _with_predictions(
    lanes: Iterable[LaneSpec], batches: Mapping[Key, Sequence[ObservedBatch]]
) -> Iterator[tuple[Key, Sequence[float], Sequence[ObservedBatch]]]:
    """Yield the observed batches with the latencies that their lane predicts for 1, 2, … rows."""
    predicted = {(lane.id, model.model): model.latencies for lane in lanes for model in lane.models}
    return ((key, predicted[key], ran) for key, ran in batches.items() if ran and key in predicted)


def _curve(predicted: Sequence[float], ran: Sequence[ObservedBatch]) -> tuple[float, ...]:
    """Return median latencies of 1, 2, … rows.

    Sizes with few batches lie on a line fitted by least squares: a constant plus a multiple of the lane's prediction.
    """
    observed: defaultdict[int, list[float]] = defaultdict(list)
    for batch in ran:
        observed[batch.rows].append(batch.seconds)
    medians = {rows: statistics.median(seconds) for rows, seconds in observed.items()}
    fixed, times = _line(
        np.array([predicted[rows - 1] for rows in medians]),
        np.array(list(medians.values())),
        np.array([float(len(seconds)) for seconds in observed.values()]),
    )
    frequent = {rows for rows, seconds in observed.items() if len(seconds) >= MIN_BATCHES}
    return tuple(
        medians[rows] if rows in frequent else fixed + times * seconds for rows, seconds in enumerate(predicted, 1)
    )


def _batch_times(curve: tuple[float, ...], ran: Sequence[ObservedBatch]) -> BatchTimes:
    factors = np.array([batch.seconds / curve[batch.rows - 1] for batch in ran])
    quantiles = tuple(np.quantile(factors, PROBABILITIES).tolist())
    return BatchTimes(curve, Noise(float(factors.std()), quantiles, PROBABILITIES))


def _recorded(curve: tuple[float, ...], ran: Sequence[ObservedBatch]) -> RecordedBatches:
    ran = sorted(ran, key=lambda batch: batch.start)
    return RecordedBatches(
        latencies=curve,
        starts=tuple(batch.start for batch in ran),
        rows=tuple(batch.rows for batch in ran),
        factors=tuple(batch.seconds / curve[batch.rows - 1] for batch in ran),
    )


def _line(x: Array, y: Array, weight: Array) -> tuple[float, float]:
    """Fit constant and slope, neither negative, by least squares of relative errors."""
    weight = weight / y**2
    mean_x, mean_y = np.average(x, weights=weight), np.average(y, weights=weight)
    spread = float(weight @ (x - mean_x) ** 2)
    times = float(weight @ ((x - mean_x) * (y - mean_y))) / spread if spread > 0 else float(mean_y / mean_x)
    times = min(max(times, 0.0), float((weight @ (x * y)) / (weight @ (x * x))))
    return max(0.0, float(mean_y - times * mean_x)), times
