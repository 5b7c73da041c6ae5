"""Reckon with what serving costs beside the batches themselves: time of the front end, and noise of the machine."""

from __future__ import annotations

import math

import msgspec

# Processor time of the server's event loop for one request, without its worker, where it was not measured
# (`app.front_end_source`): 0.07 to 0.1 ms for a small request over HTTP.
REQUEST_SECONDS = 1e-4
# From the caller to the queue and back: half a millisecond where nothing waits (docs/benchmarks.md, "Shares"), and as
# much again for what does.
REQUEST_LATENCY = 1e-3
MAX_LATENCY = 0.5  # of a target, that are kept for the front end at most
# Batches that are served take 0.93 to 1.13 times as long as profiled on a quiet machine: another program looks in, a
# cache is cold. Below 1.2 times, nobody plans again (`control.slowdown_monitor`).
NOISE = 1.1
MAX_UTILISATION = 0.7  # of the one processor that an event loop can use: beyond, requests wait for being read
MAX_TAKEN = 0.9  # of a device that is made of processors


class FrontEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Say what the front end costs, and from where it takes that.

    seconds: of a processor for one request. latency: seconds of a request's target that pass outside its batches.
    noise: how many times as long as profiled batches may take with nothing to blame. reserved: processors that are kept
    for it. processors: those that models get, where they run on processors of the same machine; 0 where they do not.
    """

    seconds: float = REQUEST_SECONDS
    latency: float = 0.0
    noise: float = 1.0
    reserved: float = 0.0
    processors: float = 0.0

    @property
    def max_rate(self) -> float:
        """Return the requests/s that it can read."""
        return MAX_UTILISATION / self.seconds

    def slowdown(self, rate: float) -> float:
        """Return how many times as long as profiled batches are planned for. rate: requests/s of all models."""
        beyond = rate * self.seconds - self.reserved
        if beyond <= 0 or self.processors == 0:
            return self.noise
        return self.noise / (1.0 - min(beyond / self.processors, MAX_TAKEN))

    def target(self, slo: float) -> float:
        """Return the seconds of a target that are left to batches and their queue."""
        return slo - min(self.latency, MAX_LATENCY * slo)


def cores_of(processors: float, front_end: FrontEnd | None) -> tuple[int, ...]:
    """Return the cores of a device that gives so many processors to models: what is kept for the front end is of them,
    too."""
    reserved = front_end.reserved / front_end.processors if front_end is not None and front_end.processors else 0.0
    return tuple(range(math.ceil(processors * (1 + reserved) - 1e-9)))
