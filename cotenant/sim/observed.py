"""What a server's event log tells of a stretch of time: what batches really take, with the neighbours they have, which
is the service model of a server as it runs; and how long requests were with the dispatcher."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.request import Outcome
from cotenant.runtime.events import Finished, LaneSpec, Reply, Run
from cotenant.runtime.log import LogLine
from cotenant.sim.service import Batches, Key, Noise

Array = NDArray[np.float64]

ENOUGH = 30  # batches of one size, whose median is taken as it is
PARTS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


class Seen(msgspec.Struct, frozen=True):
    """batches: seconds that they took, by lane and model, by rows. requests: seconds from arrival to answer of those
    that were served, by model."""

    batches: dict[Key, dict[int, list[float]]]
    requests: dict[str, list[float]]

    def and_also(self, other: Seen) -> Seen:
        """What two stretches of time tell together."""
        batches: defaultdict[Key, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        requests: defaultdict[str, list[float]] = defaultdict(list)
        for seen in (self, other):
            for key, by_rows in seen.batches.items():
                for rows, seconds in by_rows.items():
                    batches[key][rows] += seconds
            for model, seconds in seen.requests.items():
                requests[model] += seconds
        return Seen({key: dict(by_rows) for key, by_rows in batches.items()}, dict(requests))


def seen(lines: Iterable[LogLine], since: float, until: float) -> Seen:
    """Of batches that ran and requests that came and were answered, from `since` to `until` (by the log's clock)."""
    batches: defaultdict[Key, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    requests: defaultdict[str, list[float]] = defaultdict(list)
    running: dict[tuple[str, int], tuple[Run, float]] = {}
    for line in lines:
        if line.now > until:
            break
        if isinstance(line.event, Finished):
            run, started = running.pop((line.event.lane, line.event.batch), (None, 0.0))
            if run is not None and since <= started:
                rows = sum(request.size for request in run.requests)
                batches[run.lane, run.model][rows].append(line.now - started)
        for command in line.commands:
            if isinstance(command, Run):
                running[command.lane, command.batch] = command, line.now
            elif isinstance(command, Reply) and command.outcome is Outcome.SERVED:
                for request in command.requests:
                    if since <= request.arrived:
                        requests[request.model].append(line.now - request.arrived)
    return Seen({key: dict(by_rows) for key, by_rows in batches.items()}, dict(requests))


def observed(lanes: Iterable[LaneSpec], took: Mapping[Key, Mapping[int, Sequence[float]]]) -> dict[Key, Batches]:
    """By lane and model, of those that ran at all.

    Sizes that did not run often lie on a line: so many times what the lane predicts, and something for every batch, as
    those that ran have it by least squares.
    """
    predicted = {(lane.id, model.model): model.latencies for lane in lanes for model in lane.models}
    return {key: _batches(predicted[key], by_rows) for key, by_rows in took.items() if key in predicted}


def _batches(predicted: Sequence[float], took: Mapping[int, Sequence[float]]) -> Batches:
    medians = {rows: statistics.median(seconds) for rows, seconds in took.items()}
    fixed, times = _line(
        np.array([predicted[rows - 1] for rows in medians]),
        np.array(list(medians.values())),
        np.array([float(len(seconds)) for seconds in took.values()]),
    )
    curve = [fixed + times * seconds for seconds in predicted]
    for rows, seconds in took.items():
        if len(seconds) >= ENOUGH:
            curve[rows - 1] = medians[rows]
    ratios = np.concatenate([np.array(seconds) / curve[rows - 1] for rows, seconds in took.items()])
    levels = tuple(np.quantile(ratios, PARTS).tolist())
    return Batches(tuple(curve), Noise(float(ratios.std()), levels, PARTS))


def _line(x: Array, y: Array, weight: Array) -> tuple[float, float]:
    """What is fixed and what is proportional, neither below 0; relative errors count."""
    weight = weight / y**2
    mean_x, mean_y = np.average(x, weights=weight), np.average(y, weights=weight)
    spread = float(weight @ (x - mean_x) ** 2)
    times = float(weight @ ((x - mean_x) * (y - mean_y))) / spread if spread > 0 else float(mean_y / mean_x)
    times = min(max(times, 0.0), float((weight @ (x * y)) / (weight @ (x * x))))
    return max(0.0, float(mean_y - times * mean_x)), times
