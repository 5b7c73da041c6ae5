"""Reckon with what reading and answering requests costs the machine itself, whatever its models cost."""

from __future__ import annotations

import msgspec

# Processor time of the server's event loop for one request, without its worker: 0.08 to 0.1 ms for a small request over
# HTTP (docs/benchmarks.md, "Server overload", and docs/quickstart.md).
REQUEST_SECONDS = 1e-4
MAX_UTILISATION = 0.7  # of the one processor that an event loop can use: beyond, requests wait for being read
MAX_TAKEN = 0.9  # of a device that is made of processors


class FrontEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Say what the front end costs, and from where it takes that.

    seconds: of a processor for one request. reserved: processors that are kept for it. processors: those that models
    get, where they run on processors of the same machine; 0 where they do not.
    """

    seconds: float = REQUEST_SECONDS
    reserved: float = 0.0
    processors: float = 0.0

    @property
    def max_rate(self) -> float:
        """Return the requests/s that it can read."""
        return MAX_UTILISATION / self.seconds

    def slowdown(self, rate: float) -> float:
        """Return how many times as long batches take because it takes more than is reserved for it. rate: requests/s of
        all models."""
        beyond = rate * self.seconds - self.reserved
        if beyond <= 0 or self.processors == 0:
            return 1.0
        return 1.0 / (1.0 - min(beyond / self.processors, MAX_TAKEN))
