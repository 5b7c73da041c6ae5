"""Export metrics for Prometheus: under Triton's names where the meaning is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from cotenant import __version__
from cotenant.control.controller_status import ModelState
from cotenant.core.identity import LaneId
from cotenant.core.job import JobStatus
from cotenant.core.request import Outcome
from cotenant.core.units import WHOLE
from cotenant.live.job_metrics import job_families
from cotenant.live.nodes.node_status import NodeStatus, node_families
from cotenant.live.partition_labels import PartitionLabel
from cotenant.live.statistics import ModelCounts
from cotenant.measure.histogram import Histogram

# Triton's reason of a failure → outcomes. What it calls OTHER never reaches the dispatcher here.
_FAILURES = {
    "REJECTED": (Outcome.REJECTED, Outcome.EXPIRED),
    "CANCELED": (Outcome.CANCELLED,),
    "BACKEND": (Outcome.FAILED,),
    "OTHER": (),
}
# Upper bounds of the latency histogram, in seconds.
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_PHASE_BUCKETS = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)  # the same, of phases of rollouts
_STEP_BUCKETS = (0.0001, 0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # the same, of steps of adaptation
_PROCESS = ProcessCollector(registry=None)
_PLATFORM = PlatformCollector(registry=None)


class LaneReading(msgspec.Struct, frozen=True, kw_only=True):
    """A partition of the plan in force at this moment, or one of its workers.

    models: that it holds. up: its worker is ready. lost: its device is. share: ‰, as planned. used_share: ‰ that it
    used of late, as seen from outside; None where that is not known. over_share: it used more than its share. busy:
    seconds in which it ran batches. lent: seconds by which these ended earlier than its share alone would have let
    them. restarts: of its worker; promotions: those by a standby worker. standby: one is ready. waiting: requests in
    its queues, by model.
    """

    lane: LaneId
    partition: PartitionLabel
    models: tuple[str, ...] = ()
    up: bool
    share: int
    lost: bool = False
    used_share: float | None = None
    over_share: bool = False
    busy: float = 0.0
    lent: float = 0.0
    restarts: int = 0
    promotions: int = 0
    standby: bool = False
    waiting: dict[str, int] = {}


class RolloutReading(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts at this moment. revision: the number of the one in force, 0 where none is. phase: of the rollout under
    way, empty where none is. outcomes: how many ended so. durations: of their phases, in seconds."""

    revision: int = 0
    phase: str = ""
    outcomes: dict[str, int] = {}
    durations: dict[str, Histogram] = {}


NO_ROLLOUT = RolloutReading()


class AdaptationReading(msgspec.Struct, frozen=True, kw_only=True):
    """The controller at this moment, with what it knows of each model. replans: by cause and by the step that was
    taken. late: requests that missed their target while a rollout that it asked for was under way. handling, solving,
    rollouts: durations in seconds; see `AdaptationStatistics`."""

    models: dict[str, ModelState]
    foreign_load: float | None
    short: bool
    replans: dict[tuple[str, str], int]
    late: int
    handling: Histogram
    solving: Histogram
    rollouts: Histogram


class ServerCollector(Collector):
    """Collect a server's metrics, and those of its process.

    lanes: of the plan in force; others have no series. workers: how many there are, by state. backend: its name;
    isolation: in words, what enforces the shares of workers. jobs: best-effort jobs. nodes: where there are any. It may
    be collected in a thread while the event loop goes on counting: tables that grow are copied at once, lanes and
    latencies have been read before.
    """

    def __init__(
        self,
        models: Iterable[ModelCounts],
        lanes: Iterable[LaneReading],
        *,
        workers: Mapping[str, int] = MappingProxyType({}),
        rollouts: RolloutReading = NO_ROLLOUT,
        adaptation: AdaptationReading | None = None,
        backend: str,
        isolation: str,
        jobs: Iterable[JobStatus] = (),
        nodes: Iterable[NodeStatus] = (),
    ) -> None:
        self._models = list(models)
        self._lanes = list(lanes)
        self._workers = dict(workers)
        self._rollouts = rollouts
        self._adaptation = adaptation
        self._steps = [] if adaptation is None else _read_steps(adaptation)
        self._phases = {
            phase: _read_durations(seconds, _PHASE_BUCKETS) for phase, seconds in rollouts.durations.items()
        }
        self._latencies = {model.name: _read_durations(model.ledger.latency, _BUCKETS) for model in self._models}
        self._backend = {"backend": backend, "isolation": isolation}
        self._jobs = tuple(jobs)
        self._nodes = tuple(nodes)

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("cotenant_build", "Version of the server.", {"version": __version__})
        yield InfoMetricFamily(
            "cotenant_backend", "What runs the partitions, and what enforces their shares.", self._backend
        )
        yield from self._triton()
        yield from self._requests()
        yield from self._batches()
        yield from self._partitions()
        yield from self._rollout()
        if self._adaptation is not None:
            yield from self._adapt(self._adaptation)
        if self._nodes:
            yield from node_families(self._nodes)
        if self._jobs:
            yield from job_families(self._jobs)
        yield from _PROCESS.collect()
        yield from _PLATFORM.collect()

    def _triton(self) -> Iterator[Metric]:
        # Not counters by type: the name of a counter ends with _total, in OpenMetrics by rule, and Triton's do not.
        failures = UnknownMetricFamily(
            "nv_inference_request_failure", "Requests that were not answered.", labels=("model", "version", "reason")
        )
        for model in self._models:
            for reason, outcomes in _FAILURES.items():
                count = sum(model.ledger.outcomes[outcome] for outcome in outcomes)
                failures.add_metric((model.name, model.version, reason), count)
        yield failures
        duration = UnknownMetricFamily(
            "nv_inference_request_duration_us", "Time from arrival to answer.", labels=("model", "version")
        )
        for model in self._models:
            duration.add_metric((model.name, model.version), self._latencies[model.name].seconds * 1e6)
        yield duration
        for name, text, value in _TRITON:
            family = UnknownMetricFamily(name, text, labels=("model", "version"))
            for model in self._models:
                family.add_metric((model.name, model.version), value(model))
            yield family
        pending = GaugeMetricFamily(
            "nv_inference_pending_request_count", "Queued requests.", labels=("model", "version")
        )
        for model in self._models:
            waiting = sum(lane.waiting.get(model.name, 0) for lane in self._lanes)
            pending.add_metric((model.name, model.version), waiting)
        yield pending

    def _requests(self) -> Iterator[Metric]:
        goodput = CounterMetricFamily(
            "cotenant_goodput", "Answers within their latency target.", labels=("model", "version")
        )
        attainment = GaugeMetricFamily(
            "cotenant_attainment_ratio",
            "Fraction of requests answered within their target, of those whose caller stayed.",
            labels=("model", "version"),
        )
        requests = CounterMetricFamily("cotenant_requests", "Requests, by outcome.", labels=("model", "outcome"))
        rejected = CounterMetricFamily(
            "cotenant_rejected_requests",
            "Requests that were rejected at arrival or expired in the queue, by reason.",
            labels=("model", "outcome", "reason"),
        )
        latency = HistogramMetricFamily(
            "cotenant_request_latency_seconds",
            "From arrival to answer, of requests that were answered.",
            labels=("model",),
        )
        for model in self._models:
            ledger, seen = model.ledger, self._latencies[model.name]
            goodput.add_metric((model.name, model.version), ledger.within_target)
            if (ratio := ledger.attainment) is not None:
                attainment.add_metric((model.name, model.version), ratio)
            for outcome, count in ledger.outcomes.items():
                requests.add_metric((model.name, outcome.value), count)
            for (outcome, reason), count in tuple(ledger.reasons.items()):
                rejected.add_metric((model.name, outcome.value, reason), count)
            latency.add_metric((model.name,), seen.buckets, seen.seconds)
        return iter((goodput, attainment, requests, rejected, latency))

    def _batches(self) -> Iterator[Metric]:
        labels = ("device", "partition", "model")
        in_force = {(lane.partition, model) for lane in self._lanes for model in lane.models}
        times = {
            "predicted": SummaryMetricFamily(
                "cotenant_batch_predicted_seconds", "Predicted latency of batches.", labels=labels
            ),
            "observed": SummaryMetricFamily(
                "cotenant_batch_observed_seconds", "Observed latency of batches.", labels=labels
            ),
        }
        slowdowns = {
            "predicted": GaugeMetricFamily(
                "cotenant_slowdown_predicted_ratio",
                "Predicted latency of batches over the profiled one without co-located models.",
                labels=labels,
            ),
            "observed": GaugeMetricFamily(
                "cotenant_slowdown_observed_ratio",
                "Observed latency of batches over the profiled one without co-located models.",
                labels=labels,
            ),
        }
        for model in self._models:
            for partition, batches in tuple(model.partitions.items()):
                if (partition, model.name) not in in_force:
                    continue
                for kind, total in (("predicted", batches.predicted), ("observed", batches.observed)):
                    times[kind].add_metric((*partition, model.name), total.count, total.seconds)
                    if batches.alone.seconds > 0:
                        slowdowns[kind].add_metric((*partition, model.name), total.seconds / batches.alone.seconds)
        return iter((*times.values(), *slowdowns.values()))

    def _partitions(self) -> Iterator[Metric]:
        labels = ("device", "partition")
        info = InfoMetricFamily(
            "cotenant_partition", "Models of a partition, and its lane's name in logs.", labels=labels
        )
        for lane in self._lanes:
            info.add_metric(lane.partition, {"lane": lane.lane, "models": ",".join(lane.models)})
        yield info
        for name, family_of, text, reading in _PARTITION:
            family = family_of(f"cotenant_partition_{name}", text, labels=labels)
            for lane in self._lanes:
                if (value := reading(lane)) is not None:
                    family.add_metric(lane.partition, value)
            yield family
        queues = GaugeMetricFamily("cotenant_queue_length", "Queued requests.", labels=(*labels, "model"))
        for lane in self._lanes:
            for model, count in lane.waiting.items():
                queues.add_metric((*lane.partition, model), count)
        yield queues
        workers = GaugeMetricFamily("cotenant_workers", "Worker processes, by state.", labels=("state",))
        for state, number in self._workers.items():
            workers.add_metric((state,), number)
        yield workers

    def _rollout(self) -> Iterator[Metric]:
        rollouts = self._rollouts
        yield GaugeMetricFamily("cotenant_rollout_revision", "Number of the plan revision in force.", rollouts.revision)
        yield GaugeMetricFamily(
            "cotenant_rollout_in_progress", "Whether a rollout is under way.", float(bool(rollouts.phase))
        )
        ended = CounterMetricFamily("cotenant_rollouts", "Rollouts, by outcome.", labels=("outcome",))
        for outcome, count in rollouts.outcomes.items():
            ended.add_metric((outcome,), count)
        yield ended
        durations = HistogramMetricFamily(
            "cotenant_rollout_phase_seconds", "Durations of the phases of rollouts.", labels=("phase",)
        )
        for phase, read in self._phases.items():
            durations.add_metric((phase,), read.buckets, read.seconds)
        yield durations

    def _adapt(self, adaptation: AdaptationReading) -> Iterator[Metric]:
        for name, text, value in _ADAPTED:
            family = GaugeMetricFamily(f"cotenant_adaptation_{name}", text, labels=("model",))
            for model, state in adaptation.models.items():
                family.add_metric((model,), value(state))
            yield family
        if adaptation.foreign_load is not None:
            yield GaugeMetricFamily(
                "cotenant_foreign_load_ratio",
                "Part of the processors that other programs use.",
                adaptation.foreign_load,
            )
        yield GaugeMetricFamily(
            "cotenant_adaptation_short",
            "Whether the devices cannot serve all offered requests.",
            float(adaptation.short),
        )
        replans = CounterMetricFamily(
            "cotenant_adaptation_replans", "Plans made while serving, by cause and step.", labels=("cause", "step")
        )
        for labels, count in adaptation.replans.items():
            replans.add_metric(labels, count)
        yield replans
        yield CounterMetricFamily(
            "cotenant_adaptation_late_requests",
            "Requests that missed their target while an adaptation's rollout was under way.",
            adaptation.late,
        )
        durations = HistogramMetricFamily(
            "cotenant_adaptation_seconds",
            "Durations: of handling an event on the event loop, of solving, of whole rollouts.",
            labels=("step",),
        )
        for step, read in self._steps:
            durations.add_metric((step,), read.buckets, read.seconds)
        yield durations


class _Durations(msgspec.Struct, frozen=True):
    """Durations: their sum, and counts by upper bound, as the exposition writes them."""

    seconds: float
    buckets: list[tuple[str, float]]


def _read_durations(histogram: Histogram, bounds: Sequence[float]) -> _Durations:
    counts = zip(map(str, bounds), histogram.cumulative(bounds), strict=True)
    return _Durations(histogram.total, [*counts, ("+Inf", histogram.count)])


def _read_steps(adaptation: AdaptationReading) -> list[tuple[str, _Durations]]:
    steps = {"handle": adaptation.handling, "solve": adaptation.solving, "rollout": adaptation.rollouts}
    return [(step, _read_durations(seconds, _STEP_BUCKETS)) for step, seconds in steps.items()]


def render(collector: Collector, accept: str) -> tuple[bytes, str]:
    """Render metrics in the format that an Accept header asks for: OpenMetrics or Prometheus' text.

    Returns the body and its content type.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:  # what it makes of a version that is no number
        encode, content_type = choose_encoder("")
    return encode(collector), content_type


_TRITON: tuple[tuple[str, str, Callable[[ModelCounts], float]], ...] = (
    ("nv_inference_request_success", "Requests that were answered.", lambda m: m.ledger.served),
    ("nv_inference_count", "Rows that were inferred.", lambda m: m.ledger.rows),
    ("nv_inference_exec_count", "Batches that were run.", lambda m: m.ledger.batches),
    ("nv_inference_queue_duration_us", "Time in the queue.", lambda m: m.queue.seconds * 1e6),
    ("nv_inference_compute_input_duration_us", "Time to assemble inputs.", lambda m: m.gather.seconds * 1e6),
    ("nv_inference_compute_infer_duration_us", "Time to run the model.", lambda m: m.infer.seconds * 1e6),
    ("nv_inference_compute_output_duration_us", "Time to split outputs.", lambda m: m.scatter.seconds * 1e6),
    ("nv_cache_num_hits_per_model", "Requests answered from the response cache.", lambda m: m.cache_hit.count),
    ("nv_cache_num_misses_per_model", "Requests that were not in the response cache.", lambda m: m.cache_miss.count),
    ("nv_cache_hit_duration_per_model", "Time of cache hits, in us.", lambda m: m.cache_hit.seconds * 1e6),
    ("nv_cache_miss_duration_per_model", "Time of cache misses, in us.", lambda m: m.cache_miss.seconds * 1e6),
)

_PARTITION: tuple[
    tuple[str, type[GaugeMetricFamily] | type[CounterMetricFamily], str, Callable[[LaneReading], float | None]],
    ...,
] = (
    ("up", GaugeMetricFamily, "Whether its worker is ready.", lambda r: int(r.up)),
    ("lost", GaugeMetricFamily, "Whether its device is lost.", lambda r: int(r.lost)),
    ("share_ratio", GaugeMetricFamily, "Share of the device, as planned.", lambda r: r.share / WHOLE),
    (
        "used_share_ratio",
        GaugeMetricFamily,
        "Share of the device used recently.",
        lambda r: None if r.used_share is None else r.used_share / WHOLE,
    ),
    ("over_share", GaugeMetricFamily, "Whether it uses more than its share.", lambda r: int(r.over_share)),
    ("busy_seconds", CounterMetricFamily, "Time spent running batches.", lambda r: r.busy),
    ("lent_seconds", CounterMetricFamily, "Time saved on batches by lent share.", lambda r: r.lent),
    (
        "restarts",
        CounterMetricFamily,
        "Restarts of its worker, and takeovers by standby workers.",
        lambda r: r.restarts,
    ),
    ("promotions", CounterMetricFamily, "Takeovers by standby workers.", lambda r: r.promotions),
    ("standby_up", GaugeMetricFamily, "Whether it has a standby worker that is ready.", lambda r: int(r.standby)),
)

_ADAPTED: tuple[tuple[str, str, Callable[[ModelState], float]], ...] = (
    ("offered_rate", "Requests/s that are offered, as estimated.", lambda m: m.offered),
    ("planned_rate", "Requests/s that the plan in force was made for.", lambda m: m.planned),
    ("sustained_rate", "Requests/s that the plan in force serves within the SLO.", lambda m: m.sustained),
    ("slowdown_ratio", "Planned slowdown of batches.", lambda m: m.slowdown),
    ("observed_slowdown_ratio", "Recently observed over planned latency of batches.", lambda m: m.observed_slowdown),
)
