"""Metrics in Prometheus' text format: Triton's names where the meaning is the same, and what nobody else exports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import msgspec

from cotenant.core.request import Outcome
from cotenant.core.units import WHOLE
from cotenant.live.statistics import BUCKETS, ModelStatistics, Sum

# Triton's reason of a failure → our ends. What it calls OTHER never reaches the dispatcher here.
_FAILURES = {
    "REJECTED": (Outcome.REJECTED, Outcome.EXPIRED),
    "CANCELED": (Outcome.CANCELLED,),
    "BACKEND": (Outcome.FAILED,),
    "OTHER": (),
}


class LaneReading(msgspec.Struct, frozen=True, kw_only=True):
    """A partition at this moment.

    up: its worker is ready. lost: its device is. share: ‰, as planned. used_share: ‰ that it used of late, as seen from
    outside; None where that is not known. over_share: it used more than its share. busy: seconds in which it ran
    batches. restarts: of its worker. waiting: requests in its queues, by model.
    """

    lane: str
    up: bool
    share: int
    lost: bool = False
    used_share: float | None = None
    over_share: bool = False
    busy: float = 0.0
    restarts: int = 0
    waiting: dict[str, int] = {}


Sample = tuple[str, dict[str, str], float]  # what is added to the name of the family, labels, value


def render_metrics(
    models: Iterable[ModelStatistics], lanes: Iterable[LaneReading], *, backend: str, isolation: str
) -> str:
    """backend: its name; isolation: in words, what enforces the shares of workers."""
    models, lanes = list(models), list(lanes)
    waiting = {model.name: sum(lane.waiting.get(model.name, 0) for lane in lanes) for model in models}
    lines: list[str] = []

    def family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> None:
        lines.append(f"# HELP {name} {text}")
        lines.append(f"# TYPE {name} {kind}")
        lines.extend(f"{name}{suffix}{_labels(labels)} {_number(value)}" for suffix, labels, value in samples)

    def by_model(name: str, kind: str, text: str, value: Callable[[ModelStatistics], float]) -> None:
        family(name, kind, text, [("", {"model": m.name, "version": m.version}, value(m)) for m in models])

    def by_lane(name: str, kind: str, text: str, value: Callable[[LaneReading], float | None]) -> None:
        readings = [(lane.lane, value(lane)) for lane in lanes]
        family(name, kind, text, [("", {"lane": lane}, reading) for lane, reading in readings if reading is not None])

    by_model(
        "nv_inference_request_success", "counter", "Requests that were answered.", lambda m: m.outcomes[Outcome.SERVED]
    )
    family(
        "nv_inference_request_failure",
        "counter",
        "Requests that were not answered, by reason.",
        [
            (
                "",
                {"model": m.name, "version": m.version, "reason": reason},
                sum(m.outcomes[outcome] for outcome in outcomes),
            )
            for m in models
            for reason, outcomes in _FAILURES.items()
        ],
    )
    by_model("nv_inference_count", "counter", "Rows that were inferred.", lambda m: m.rows)
    by_model("nv_inference_exec_count", "counter", "Batches that were run.", lambda m: m.executions)
    for phase, text, value in _DURATIONS:
        by_model(f"nv_inference_{phase}_duration_us", "counter", text, value)
    by_model(
        "nv_inference_pending_request_count", "gauge", "Requests that wait for a batch.", lambda m: waiting[m.name]
    )

    by_model("cotenant_goodput_total", "counter", "Answers within their latency target.", lambda m: m.within)
    by_model(
        "cotenant_attainment_ratio",
        "gauge",
        "Fraction of requests answered within their target, of those whose caller stayed.",
        lambda m: m.attainment,
    )
    family(
        "cotenant_requests_total",
        "counter",
        "Requests that ended, by how.",
        [("", {"model": m.name, "outcome": end.value}, count) for m in models for end, count in m.outcomes.items()],
    )
    family(
        "cotenant_rejected_requests_total",
        "counter",
        "Requests that were refused at arrival or expired in the queue, by reason.",
        [
            ("", {"model": m.name, "outcome": end.value, "reason": reason}, count)
            for m in models
            for (end, reason), count in sorted(m.rejections.items(), key=lambda item: (item[0][0].value, item[0][1]))
        ],
    )
    family(
        "cotenant_request_latency_seconds",
        "histogram",
        "From arrival to answer, of requests that were answered.",
        [sample for m in models for sample in _histogram({"model": m.name}, m.latency, m.success)],
    )
    for name, text in (("predicted", "Latency of batches as the plan had it."), ("observed", "Latency of batches.")):
        family(
            f"cotenant_batch_{name}_seconds",
            "summary",
            text,
            [
                sample
                for m in models
                for lane, total in getattr(m, name).items()
                for sample in _summary({"lane": lane, "model": m.name}, total)
            ],
        )
    for name, text in (
        ("predicted", "Latency of batches as the plan had it, over that without neighbours."),
        ("observed", "Latency of batches, over that without neighbours."),
    ):
        family(
            f"cotenant_slowdown_{name}_ratio",
            "gauge",
            text,
            [
                ("", {"lane": lane, "model": m.name}, total.seconds / m.alone[lane].seconds)
                for m in models
                for lane, total in getattr(m, name).items()
                if m.alone[lane].seconds > 0
            ],
        )
    family(
        "cotenant_backend_info",
        "gauge",
        "What runs the partitions, and what enforces their shares.",
        [("", {"backend": backend, "isolation": isolation}, 1)],
    )
    for name, kind, text, reading in _PARTITION:
        by_lane(f"cotenant_partition_{name}", kind, text, reading)
    family(
        "cotenant_queue_length",
        "gauge",
        "Requests that wait.",
        [("", {"lane": lane.lane, "model": model}, count) for lane in lanes for model, count in lane.waiting.items()],
    )
    return "\n".join(lines) + "\n"


_DURATIONS: tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...] = (
    ("request", "Time from arrival to answer.", lambda m: m.success.seconds * 1e6),
    ("queue", "Time in the queue.", lambda m: m.queue.seconds * 1e6),
    ("compute_input", "Time to put inputs together.", lambda m: m.gather.seconds * 1e6),
    ("compute_infer", "Time to run the model.", lambda m: m.infer.seconds * 1e6),
    ("compute_output", "Time to take outputs apart.", lambda m: m.scatter.seconds * 1e6),
)


_PARTITION: tuple[tuple[str, str, str, Callable[[LaneReading], float | None]], ...] = (
    ("up", "gauge", "Whether its worker is ready.", lambda r: int(r.up)),
    ("lost", "gauge", "Whether its device is lost.", lambda r: int(r.lost)),
    ("share_ratio", "gauge", "Share of the device, as planned.", lambda r: r.share / WHOLE),
    (
        "used_share_ratio",
        "gauge",
        "Share of the device that it used of late.",
        lambda r: None if r.used_share is None else r.used_share / WHOLE,
    ),
    ("over_share", "gauge", "Whether it uses more than its share.", lambda r: int(r.over_share)),
    ("busy_seconds_total", "counter", "Time in which it ran batches.", lambda r: r.busy),
    ("restarts_total", "counter", "How often its worker was started again.", lambda r: r.restarts),
)


def _summary(labels: dict[str, str], total: Sum) -> list[Sample]:
    return [("_sum", labels, total.seconds), ("_count", labels, total.count)]


def _histogram(labels: dict[str, str], counts: Sequence[int], total: Sum) -> list[Sample]:
    bounds = [*map(str, BUCKETS), "+Inf"]
    buckets: list[Sample] = [
        ("_bucket", {**labels, "le": bound}, count) for bound, count in zip(bounds, accumulate(counts), strict=True)
    ]
    return buckets + _summary(labels, total)


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(value)
