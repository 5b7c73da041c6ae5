"""What Prometheus is told, read back by its own parsers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client import parser as text_parser
from prometheus_client.core import CounterMetricFamily, Metric, Sample, SummaryMetricFamily
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.registry import CollectorRegistry

from cotenant import __version__
from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome, Request
from cotenant.live.metrics import LaneReading, ServerCollector, render
from cotenant.live.partition_labels import RETIRED, PartitionLabel
from cotenant.live.statistics import ModelCounts
from cotenant.runtime.events import Reply
from cotenant.worker.wire import Timing

# What Prometheus 3 sends.
SCRAPER = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


FIRST = PartitionLabel("cpu-0", "0")


def lane_of(*models: str, **reading: Any) -> LaneReading:
    """The only partition of a device, with its first lane."""
    given: dict[str, Any] = {"lane": LaneId.parse("cpu-0/0"), "partition": FIRST, "up": True, "share": 1000} | reading
    return LaneReading(models=models, **given)


def collector(models: Iterable[ModelCounts] = (), lanes: Iterable[LaneReading] = ()) -> ServerCollector:
    return ServerCollector(models, lanes, backend="cpu", isolation="a bucket")


def samples(collected: ServerCollector, accept: str = "") -> dict[str, float]:
    """Sample as written, its labels in order → value. The parser of OpenMetrics is a strict one."""
    body, content_type = render(collected, accept)
    openmetrics = content_type.startswith("application/openmetrics-text")
    parse = (openmetrics_parser if openmetrics else text_parser).text_string_to_metric_families
    values: dict[str, float] = {}
    for family in parse(body.decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in values, f"{key} is there twice"
            values[key] = sample.value
    return values


def filled(name: str = "resnet") -> ModelCounts:
    """Two requests served in one batch, one of them late; one rejected, one expired, one failed, one cancelled."""
    counts = ModelCounts(name, "1")
    timing = Timing(5.0, gather=0.001, infer=0.008, scatter=0.002, pause=0.001, cpu=0.01)
    counts.ran(LaneId.parse("cpu-0/0"), FIRST, 2, 0.010, 0.012, timing, alone=0.008)
    served = Request(1, name, arrived=4.998, deadline=5.1), Request(2, name, arrived=4.5, deadline=5.0)
    counts.ended(Reply(served, Outcome.SERVED, lane=LaneId.parse("cpu-0/0"), batch=1, started=5.0), 5.012)
    for outcome in (Outcome.REJECTED, Outcome.EXPIRED, Outcome.FAILED, Outcome.CANCELLED):
        counts.ended(Reply((Request(3, name, arrived=5.0, deadline=5.1),), outcome, "why"), 5.1)
    return counts


@pytest.mark.parametrize("accept", ["", "text/plain", "application/openmetrics-text; version=1.0.0", SCRAPER])
def test_metrics_filled_model_gives_its_counts_in_every_format(accept: str) -> None:
    lane = lane_of("resnet", share=400, used_share=389.5, busy=0.012, waiting={"resnet": 3})
    values = samples(collector([filled(), ModelCounts("idle", "2")], [lane]), accept)
    model = 'model="resnet",version="1"'
    wanted = {
        f"nv_inference_request_success{{{model}}}": 2,
        'nv_inference_request_failure{model="resnet",reason="REJECTED",version="1"}': 2,
        'nv_inference_request_failure{model="resnet",reason="BACKEND",version="1"}': 1,
        'nv_inference_request_failure{model="resnet",reason="CANCELED",version="1"}': 1,
        'nv_inference_request_failure{model="resnet",reason="OTHER",version="1"}': 0,
        f"nv_inference_count{{{model}}}": 2,
        f"nv_inference_exec_count{{{model}}}": 1,
        f"nv_inference_request_duration_us{{{model}}}": 526_000,
        f"nv_inference_queue_duration_us{{{model}}}": 502_000,
        f"nv_inference_compute_infer_duration_us{{{model}}}": 18_000,
        f"nv_inference_pending_request_count{{{model}}}": 3,
        f"cotenant_goodput_total{{{model}}}": 1,
        f"cotenant_attainment_ratio{{{model}}}": 0.2,
        'cotenant_requests_total{model="resnet",outcome="served"}': 2,
        'cotenant_requests_total{model="idle",outcome="failed"}': 0,
        'cotenant_rejected_requests_total{model="resnet",outcome="rejected",reason="why"}': 1,
        'cotenant_request_latency_seconds_bucket{le="0.01",model="resnet"}': 0,
        'cotenant_request_latency_seconds_bucket{le="0.02",model="resnet"}': 1,
        'cotenant_request_latency_seconds_bucket{le="+Inf",model="resnet"}': 2,
        'cotenant_request_latency_seconds_count{model="resnet"}': 2,
        'cotenant_batch_predicted_seconds_sum{device="cpu-0",model="resnet",partition="0"}': 0.010,
        'cotenant_batch_observed_seconds_sum{device="cpu-0",model="resnet",partition="0"}': 0.012,
        'cotenant_batch_observed_seconds_count{device="cpu-0",model="resnet",partition="0"}': 1,
        'cotenant_slowdown_predicted_ratio{device="cpu-0",model="resnet",partition="0"}': 1.25,
        'cotenant_slowdown_observed_ratio{device="cpu-0",model="resnet",partition="0"}': 1.5,
        'cotenant_backend_info{backend="cpu",isolation="a bucket"}': 1,
        f'cotenant_build_info{{version="{__version__}"}}': 1,
        'cotenant_partition_up{device="cpu-0",partition="0"}': 1,
        'cotenant_partition_lost{device="cpu-0",partition="0"}': 0,
        'cotenant_partition_share_ratio{device="cpu-0",partition="0"}': 0.4,
        'cotenant_partition_used_share_ratio{device="cpu-0",partition="0"}': 0.3895,
        'cotenant_partition_over_share{device="cpu-0",partition="0"}': 0,
        'cotenant_partition_busy_seconds_total{device="cpu-0",partition="0"}': 0.012,
        'cotenant_partition_restarts_total{device="cpu-0",partition="0"}': 0,
        'cotenant_queue_length{device="cpu-0",model="resnet",partition="0"}': 3,
    }
    assert {name: values.get(name) for name in wanted} == {name: pytest.approx(value) for name, value in wanted.items()}
    assert not any(name.startswith("cotenant_attainment_ratio") and "idle" in name for name in values)
    assert values["process_resident_memory_bytes"] > 0 and values["process_cpu_seconds_total"] > 0
    assert any(name.startswith("python_info{") for name in values)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/json", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        ("application/openmetrics-text; version=high", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain; version=1.x", "text/plain; version=0.0.4; charset=utf-8"),
    ],
)
def test_render_accept_header_chooses_the_format(accept: str, content_type: str) -> None:
    body, answered = render(collector(), accept)
    assert answered == content_type
    assert body.endswith(b"# EOF\n") == ("openmetrics" in content_type)


def test_metrics_all_families_have_names_of_their_own() -> None:
    every = collector([filled()], [lane_of("resnet")])
    CollectorRegistry(auto_describe=True).register(every)  # raises if one name stands for two families
    names = [family.name for family in every.collect()]
    assert len(names) == len(set(names))
    assert {"cotenant_goodput", "cotenant_partition_share_ratio"} <= set(names)


def test_metrics_unknown_used_share_is_left_out() -> None:
    values = samples(collector(lanes=[lane_of("resnet")]))
    assert 'cotenant_partition_share_ratio{device="cpu-0",partition="0"}' in values
    assert not any(name.startswith("cotenant_partition_used_share_ratio") for name in values)


def test_metrics_batches_without_a_profile_have_no_slowdown() -> None:
    counts = ModelCounts("m", "1")
    counts.ran(LaneId.parse("cpu-0/0"), FIRST, 1, 0.0, 0.01, Timing(5.0, 0.0, 0.01, 0.0, 0.0, 0.01), alone=0.0)
    values = samples(collector([counts], [lane_of("m")]))
    assert values['cotenant_batch_observed_seconds_count{device="cpu-0",model="m",partition="0"}'] == 1
    assert not any(name.startswith("cotenant_slowdown") for name in values)


@pytest.mark.parametrize("accept", ["", SCRAPER])
def test_metrics_model_name_with_quotes_reads_back(accept: str) -> None:
    name = 'a"b\\c\nd é'
    assert f'cotenant_goodput_total{{model="{name}",version="1"}}' in samples(collector([filled(name)]), accept)


def test_metrics_no_models_gives_the_backend() -> None:
    values = samples(collector())
    assert values['cotenant_backend_info{backend="cpu",isolation="a bucket"}'] == 1
    assert not any("model=" in name for name in values)


def test_collector_lanes_and_reasons_that_come_while_collected_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = filled()
    timing = Timing(5.0, gather=0.001, infer=0.008, scatter=0.002, pause=0.001, cpu=0.01)
    add_batch, add_rejection = SummaryMetricFamily.add_metric, CounterMetricFamily.add_metric

    def batch(*args: Any, **named: Any) -> None:
        add_batch(*args, **named)
        new = PartitionLabel("cpu-1", str(len(counts.partitions)))
        counts.ran(LaneId.parse("cpu-1/0"), new, 2, 0.010, 0.012, timing, alone=0.008)

    def rejection(*args: Any, **named: Any) -> None:
        add_rejection(*args, **named)
        why = f"why {len(counts.ledger.reasons)}"
        counts.ended(Reply((Request(3, "resnet", 5.0, 5.1),), Outcome.REJECTED, why), 5.1)

    monkeypatch.setattr(SummaryMetricFamily, "add_metric", batch)
    monkeypatch.setattr(CounterMetricFamily, "add_metric", rejection)
    collected = collector([counts], [lane_of("resnet")]).collect()
    assert {sample.labels["partition"] for family in collected for sample in batch_samples(family)} == {"0"}
    assert len(counts.partitions) > 1 and len(counts.ledger.reasons) > 1


def batch_samples(family: Metric) -> list[Sample]:
    return [sample for sample in family.samples if sample.name.startswith("cotenant_batch_")]


def test_metrics_batches_of_what_a_plan_no_longer_has_are_in_no_series() -> None:
    counts, timing = filled(), Timing(5.0, gather=0.001, infer=0.008, scatter=0.002, pause=0.001, cpu=0.01)
    for gone in (PartitionLabel("cpu-0", "1"), RETIRED):
        counts.ran(LaneId.parse("cpu-0/7"), gone, 2, 0.010, 0.012, timing, alone=0.008)
    here, elsewhere = (samples(collector([counts], [lane_of(name)])) for name in ("resnet", "other"))
    assert here['cotenant_batch_observed_seconds_count{device="cpu-0",model="resnet",partition="0"}'] == 1
    assert not any(re.search(r'partition="(1|)"', name) for name in here)
    assert not any(name.startswith(("cotenant_batch_", "cotenant_slowdown_")) for name in elsewhere)


def test_metrics_partition_info_names_lane_and_models() -> None:
    values = samples(collector([], [lane_of("a", "b", lane=LaneId.parse("cpu-0/7"))]), SCRAPER)
    assert values['cotenant_partition_info{device="cpu-0",lane="cpu-0/7",models="a,b",partition="0"}'] == 1
