"""Generate the scenarios of MLPerf Inference's load generator (MLPerf Inference Rules, section Scenarios, as of v2.0).

Single stream, multi stream and offline have no latency target: their requests never time out.
"""

from __future__ import annotations

import math

from cotenant.workload import Workload
from cotenant.workload.sources import ClosedLoop, Offline, Poisson

SAMPLES_PER_QUERY = 8
OFFLINE_SAMPLES = 24_576


def single_stream(name: str) -> Workload:
    """Return the workload that sends the next query when the last is answered; its metric is p90 latency."""
    return Workload({name: ClosedLoop(1)}, {name: math.inf})


def multi_stream(name: str, samples: int = SAMPLES_PER_QUERY) -> Workload:
    """Return the workload that sends the next query, of several samples, when the last is answered.

    Its metric is p99 latency.
    """
    return Workload({name: ClosedLoop(1, samples=samples)}, {name: math.inf})


def server(name: str, rate: float) -> Workload:
    """Return Poisson queries of one sample; the metric is the largest rate at which 99 % meet the model's target."""
    return Workload({name: Poisson(rate)})


def offline(name: str, samples: int = OFFLINE_SAMPLES) -> Workload:
    """Return the workload that sends all samples at once; its metric is throughput."""
    return Workload({name: Offline(samples)}, {name: math.inf})
