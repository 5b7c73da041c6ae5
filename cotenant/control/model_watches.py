"""All that a controller observes: each model by itself, and the machine that all of them share."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from cotenant.control.adaptation import Observed
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.model_watch import ModelWatch
from cotenant.control.profile_monitor import Correction
from cotenant.control.slowdown_monitor import SlowdownMonitor, total_latency


class Horizon(NamedTuple):
    """Say which times count. ahead: seconds for which what is planned now has to do. since: the time before
    which rates that were wanted do not count any more."""

    ahead: float
    since: float


class ModelWatches:
    """Hold a watch for each model or application that was ever observed, and one for the machine.

    machine: how slow batches of all models are: other programs slow them all. foreign_load: as in `Observed`.
    """

    def __init__(self, options: ControllerOptions) -> None:
        self.machine = SlowdownMonitor(options.slowdowns)
        self.foreign_load: float | None = None
        self._options = options
        self._watches: dict[str, ModelWatch] = {}
        self._interrupted: frozenset[str] = frozenset()  # models that lacked a worker when they were last observed

    def __getitem__(self, name: str) -> ModelWatch:
        """Return the watch of a model, a new one where nothing is known of it."""
        if name not in self._watches:
            self._watches[name] = ModelWatch(self._options)
        return self._watches[name]

    def __iter__(self) -> Iterator[tuple[str, ModelWatch]]:
        """Yield names and watches in the order of names."""
        return iter(sorted(self._watches.items()))

    def keep(self, names: Collection[str]) -> None:
        """Forget all other models."""
        self._watches = {name: watch for name, watch in self._watches.items() if name in names}

    def observe(self, seen: Observed, planned: Collection[str], horizon: Horizon, now: float) -> None:
        """Take what was seen of models. planned: those that have to be watched though nothing was seen of them."""
        self.foreign_load = seen.foreign_load
        # Whatever is late while a worker is away, and as long again, is no fault of the plan's.
        disturbed = self._interrupted.union(seen.interrupted)
        self._interrupted = frozenset(seen.interrupted)
        for name in {*planned, *seen.offered, *seen.latencies}:
            watch = self[name]
            watch.observe_arrivals(_count(seen.offered.get(name, 0)), seen.seconds, horizon.ahead)
            watch.raise_peak(now, watch.demand, horizon.since)
            watch.pause.observe(seen.seconds, ran=name in seen.latencies)
            if name not in disturbed:
                watch.slowdown.observe(seen.latencies.get(name), seen.seconds)
                watch.attainment.observe(_count(seen.stayed.get(name, 0)), _count(seen.within_target.get(name, 0)))
        latencies = [latency for name, latency in seen.latencies.items() if name not in disturbed]
        if latencies or not disturbed:
            self.machine.observe(total_latency(latencies), seen.seconds)

    def corrections(self, seen: Observed, slowdowns: Mapping[str, float]) -> dict[str, Correction]:
        """Return corrections of profiles that batches do not keep to, with nothing else to blame. slowdowns: that the
        plan in force counts with."""
        quiet = seen.foreign_load is not None and seen.foreign_load <= self._options.quiet
        found = {
            name: watch.profile.observe(seen.latencies.get(name), slowdowns.get(name, 1.0), seen.seconds, quiet=quiet)
            for name, watch in self
        }
        return {name: correction for name, correction in found.items() if correction is not None}

    def slowdown(self, name: str) -> float:
        """Return how many times as long as predicted the batches of a model take, where any have drifted."""
        watch = self._watches.get(name)
        if watch is None or not (self.machine.drifted or any(each.slowdown.drifted for _, each in self)):
            return 1.0
        ratio = watch.slowdown.shrunk_ratio(self.machine.shrunk_ratio(1.0))
        return ratio if abs(ratio - 1.0) > self._options.slowdowns.tolerance / 2 else 1.0

    def drifted(self, slowdowns: Mapping[str, float]) -> dict[str, float]:
        """Return the models whose batches take longer than predicted, or no longer as long as they did, and how many
        times as long. slowdowns: that the plan in force counts with; one that counts with none cannot be wrong by
        batches that are faster."""
        ratios = {name: watch.slowdown.ratio for name, watch in self if watch.slowdown.drifted}
        return {name: ratio for name, ratio in ratios.items() if ratio > 1.0 or slowdowns.get(name, 1.0) > 1.0}

    def doubtful(self, slowdowns: Mapping[str, float]) -> dict[str, float]:
        """Return the models that requests come for, of which no batch has run for long, and that would be slower than
        those that run, each with the slowdown of the slowest of these. slowdowns: that the plan in force counts
        with."""
        if not slowdowns:
            return {}
        others = max([1.0, *(slowdowns.get(name, 1.0) for name, watch in self._watches.items() if watch.pause.runs)])
        limit = others * (1 + self._options.slowdowns.tolerance)
        pausing = [name for name, watch in self if watch.pause.is_long and watch.estimate.rate > 0]
        return {name: others for name in pausing if slowdowns.get(name, 1.0) > limit}

    def forget_attainment(self) -> None:
        """Forget which requests met their target: they were served by another plan."""
        for watch in self._watches.values():
            watch.attainment.reset()

    def forget_batches(self) -> None:
        """Forget how slow batches were, and whether requests met their target: predictions have changed."""
        for watch in self._watches.values():
            watch.slowdown.reset()
        self.machine.reset()
        self.forget_attainment()


def _count(value: float) -> int:
    """Return a count; 0 for what is none."""
    return int(value) if 0 <= value < math.inf else 0
