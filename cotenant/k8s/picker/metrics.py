"""Count what the endpoint picker decides, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cotenant.k8s.picker.picker import Decision, Picked, Rejected, Unavailable

_SECONDS = (25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3)


class PickerMetrics:
    """The metrics of a picker. ready: how many replicas take requests."""

    def __init__(self, ready: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        requests = Counter(
            "cotenant_picker_requests",
            "Requests by decision: picked, rejected (429), unavailable (503).",
            ["decision"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "cotenant_picker_decision_seconds", "Time to decide.", buckets=_SECONDS, registry=self.registry
        )
        replicas = Gauge("cotenant_picker_ready_replicas", "Replicas that take requests.", registry=self.registry)
        replicas.set_function(ready)
        kinds: tuple[type[Decision], ...] = (Picked, Rejected, Unavailable)
        self._by_decision = {kind: requests.labels(kind.__name__.lower()) for kind in kinds}

    def decided(self, decision: Decision, seconds: float) -> None:
        """Count a decision that took so many seconds."""
        self._seconds.observe(seconds)
        self._by_decision[type(decision)].inc()
