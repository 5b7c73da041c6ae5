from __future__ import annotations

import re

import pytest

from cotenant.core.request import Outcome, Request
from cotenant.live.metrics import LaneReading, render_metrics
from cotenant.live.statistics import ModelStatistics
from cotenant.runtime.events import Reply
from cotenant.worker.wire import Timing

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)')
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count"), "counter": ("",), "gauge": ("",)}


BACKEND = {"backend": "cpu", "isolation": "a bucket"}


def parse(text: str) -> dict[str, float]:
    """A strict reader of Prometheus' text format: sample as written → value."""
    samples: dict[str, float] = {}
    families: set[str] = set()
    name = kind = ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in families and len(line.split()) > 3
            families.add(name)
            kind = ""
        elif line.startswith("# TYPE "):
            assert line.split()[2] == name and not kind
            kind = line.split()[3]
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] in [name + suffix for suffix in SUFFIXES[kind]], line
            key = line.rpartition(" ")[0]
            assert key not in samples, f"{key} is there twice"
            samples[key] = float(match[3])
            assert kind == "gauge" or samples[key] >= 0
    return samples


def filled(name: str = "resnet") -> ModelStatistics:
    """Two requests served in one batch, one of them late; one refused, one expired, one failed, one cancelled."""
    counts = ModelStatistics(name, "1", epoch=1000.0)
    timing = Timing(5.0, gather=0.001, infer=0.008, scatter=0.002, pause=0.001, cpu=0.01)
    counts.ran("cpu-0/0", 2, 0.010, 0.012, timing, alone=0.008)
    served = Request(1, name, arrived=4.998, deadline=5.1), Request(2, name, arrived=4.5, deadline=5.0)
    counts.ended(Reply(served, Outcome.SERVED, lane="cpu-0/0", batch=1, started=5.0), 5.012)
    for outcome in (Outcome.REJECTED, Outcome.EXPIRED, Outcome.FAILED, Outcome.CANCELLED):
        counts.ended(Reply((Request(3, name, arrived=5.0, deadline=5.1),), outcome, "why"), 5.1)
    return counts


def test_the_metrics_are_prometheus_and_right() -> None:
    lane = LaneReading(lane="cpu-0/0", up=True, share=400, used_share=389.5, busy=0.012, waiting={"resnet": 3})
    samples = parse(render_metrics([filled(), ModelStatistics("idle", "2", 0.0)], [lane], **BACKEND))
    model = 'model="resnet",version="1"'
    wanted = {
        f"nv_inference_request_success{{{model}}}": 2,
        f'nv_inference_request_failure{{{model},reason="REJECTED"}}': 2,
        f'nv_inference_request_failure{{{model},reason="BACKEND"}}': 1,
        f'nv_inference_request_failure{{{model},reason="CANCELED"}}': 1,
        f"nv_inference_count{{{model}}}": 2,
        f"nv_inference_exec_count{{{model}}}": 1,
        f"nv_inference_request_duration_us{{{model}}}": 526_000,
        f"nv_inference_queue_duration_us{{{model}}}": 502_000,
        f"nv_inference_compute_infer_duration_us{{{model}}}": 18_000,
        f"nv_inference_pending_request_count{{{model}}}": 3,
        f"cotenant_goodput_total{{{model}}}": 1,
        f"cotenant_attainment_ratio{{{model}}}": 0.2,
        'cotenant_attainment_ratio{model="idle",version="2"}': 1,
        'cotenant_requests_total{model="resnet",outcome="served"}': 2,
        'cotenant_rejected_requests_total{model="resnet",outcome="rejected",reason="why"}': 1,
        'cotenant_request_latency_seconds_bucket{model="resnet",le="0.01"}': 0,
        'cotenant_request_latency_seconds_bucket{model="resnet",le="0.02"}': 1,
        'cotenant_request_latency_seconds_bucket{model="resnet",le="+Inf"}': 2,
        'cotenant_request_latency_seconds_count{model="resnet"}': 2,
        'cotenant_batch_predicted_seconds_sum{lane="cpu-0/0",model="resnet"}': 0.010,
        'cotenant_batch_observed_seconds_sum{lane="cpu-0/0",model="resnet"}': 0.012,
        'cotenant_slowdown_predicted_ratio{lane="cpu-0/0",model="resnet"}': 1.25,
        'cotenant_slowdown_observed_ratio{lane="cpu-0/0",model="resnet"}': 1.5,
        'cotenant_partition_up{lane="cpu-0/0"}': 1,
        'cotenant_partition_share_ratio{lane="cpu-0/0"}': 0.4,
        'cotenant_partition_used_share_ratio{lane="cpu-0/0"}': 0.3895,
        'cotenant_partition_over_share{lane="cpu-0/0"}': 0,
        'cotenant_partition_busy_seconds_total{lane="cpu-0/0"}': 0.012,
        'cotenant_queue_length{lane="cpu-0/0",model="resnet"}': 3,
    }
    assert {name: samples.get(name) for name in wanted} == {
        name: pytest.approx(value) for name, value in wanted.items()
    }


def test_a_share_that_nobody_looked_at_is_left_out() -> None:
    assert "used_share_ratio{" not in render_metrics([], [LaneReading(lane="a", up=True, share=1)], **BACKEND)


def test_names_are_escaped() -> None:
    samples = parse(render_metrics([filled('a"b\\c\nd')], [], **BACKEND))
    assert r'cotenant_goodput_total{model="a\"b\\c\nd",version="1"}' in samples


def test_no_models() -> None:
    info = "cotenant_backend_info"
    assert parse(render_metrics([], [], **BACKEND)) == {f'{info}{{backend="cpu",isolation="a bucket"}}': 1.0}
