"""What a collector of OpenTelemetry is sent, by the real exporter, over OTLP."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cotenant.backends.cpu import Cpu
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Outcome, Request
from cotenant.errors import ConfigError, UnavailableError
from cotenant.live.deployment import Deployment
from cotenant.live.http import HttpServer
from cotenant.live.oip import InferRequest
from cotenant.live.server import Server
from cotenant.live.tracing import MOST_LANES, RequestTracer, tracing
from cotenant.predictors.samples import Sample
from cotenant.runtime.events import Reply, Run
from cotenant.worker.wire import Timing
from tests.live.deployment import repository, sample_deployment
from tests.live.test_server import floats, indices, run

pytest.importorskip("opentelemetry.sdk", reason="needs the extra 'otel'")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ERROR = 2  # of a span's status


class Collector:
    """Take spans over OTLP. spans: by name, in the order in which they came; service: whose they are."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.spans: dict[str, list[Any]] = {}
        self.paths: set[str] = set()
        self.service: dict[str, str] = {}

    def take(self, path: str, body: bytes) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        self.paths.add(path)
        for resource in message.resource_spans:
            self.service |= {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.setdefault(span.name, []).append(span)

    def one(self, name: str) -> Any:
        (span,) = self.spans[name]
        return span


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken.take(self.path, gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    taken = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield taken
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
    raise NotImplementedError


async def traced(root: Path, to: Collector, ask: Any) -> None:
    """Let a real server answer what `ask` asks, and export its traces."""
    async with tracing(to.address) as tracer:
        server = Server(sample_deployment(root), Cpu(), prepare, tracer=tracer)
        try:
            await server.start()
            await ask(server)
        finally:
            await server.drain(1.0)
            await server.stop(1.0)


async def answer(server: Server, model: str, tensor: Any, **given: Any) -> Any:
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    server.infer(InferRequest(model=model, inputs=(tensor,), **given), answered.set_result)
    return await answered


def test_request_over_http_is_a_span_below_its_callers_with_queue_batch_and_run(tmp_path: Path) -> None:
    async def ask(server: Server) -> None:
        front = HttpServer(server)
        port = await front.listen("127.0.0.1", 0)
        body = (
            b'{"inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": %s}]}' % str([0.0] * 16).encode()
        )

        def call() -> int:
            connection = http.client.HTTPConnection(f"127.0.0.1:{port}")
            connection.request("POST", "/v2/models/identity/infer", body, {"traceparent": PARENT})
            status = connection.getresponse().status
            connection.close()
            return status

        assert await asyncio.to_thread(call) == 200
        await front.stop(1.0)

    with collector() as to:
        run(traced(repository(tmp_path), to, ask))
        root, queue, batch, ran = (to.one(name) for name in ("infer identity", "queue", "batch", "run"))
        assert (
            root.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
            and root.parent_span_id.hex() == "b7ad6b7169203331"
        )
        assert {span.trace_id for span in (root, queue, batch, ran)} == {root.trace_id}
        assert queue.parent_span_id == batch.parent_span_id == root.span_id and ran.parent_span_id == batch.span_id
        assert root.start_time_unix_nano == queue.start_time_unix_nano
        assert queue.end_time_unix_nano == batch.start_time_unix_nano <= ran.start_time_unix_nano
        assert ran.start_time_unix_nano < ran.end_time_unix_nano <= batch.end_time_unix_nano == root.end_time_unix_nano
        assert attributes(root)["cotenant.outcome"] == "served" and attributes(root)["cotenant.within_target"] is True
        assert attributes(batch)["cotenant.rows"] == 1 and attributes(batch)["cotenant.lane"].startswith("cpu-0/")
        assert to.service["service.name"] == "cotenant" and to.paths == {"/v1/traces"}


def test_requests_that_are_not_served_are_errors_with_their_reason(tmp_path: Path) -> None:
    async def ask(server: Server) -> None:
        assert isinstance(await answer(server, "identity", floats(), timeout=1e-6), UnavailableError)
        await answer(server, "lookup", indices(9), traceparent="not a traceparent")

    with collector() as to:
        run(traced(repository(tmp_path), to, ask))
        rejected, failed = to.one("infer identity"), to.one("infer lookup")
        assert (
            attributes(rejected)["cotenant.outcome"] == "rejected"
            and attributes(failed)["cotenant.outcome"] == "failed"
        )
        assert rejected.status.code == failed.status.code == ERROR and rejected.status.message
        assert not rejected.parent_span_id and not failed.parent_span_id


def test_batch_of_several_requests_is_in_the_trace_of_each(tmp_path: Path) -> None:
    async def ask(server: Server) -> None:
        await asyncio.gather(*(answer(server, "identity", floats()) for _ in range(12)))

    with collector() as to:
        run(traced(repository(tmp_path), to, ask))
        assert len(to.spans["infer identity"]) == len(to.spans["batch"]) == len(to.spans["run"]) == 12
        assert len({span.trace_id for span in to.spans["batch"]}) == 12
        batches = {
            (attributes(span)["cotenant.batch"], attributes(span)["cotenant.requests"]) for span in to.spans["batch"]
        }
        assert sum(requests for _, requests in batches) == 12


def test_stage_of_an_application_is_a_span_below_its_request() -> None:
    exported = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    tracer = RequestTracer(provider)
    whole, stage = Request(1, "app", 1.0, 2.0), Request(2, "stage", 1.1, 2.0)
    tracer.arrived(whole, PARENT)
    tracer.spawned(1, stage)
    tracer.ended(Reply((stage,), Outcome.EXPIRED, "too late"), 1.5)
    tracer.ended(Reply((whole,), Outcome.EXPIRED, "too late"), 1.6)
    spans = {span.name: span for span in exported.get_finished_spans()}
    assert spans["infer stage"].parent == spans["infer app"].context != spans["infer app"].parent
    assert not tracer._spans


def test_batches_of_lanes_that_no_plan_has_any_more_are_forgotten() -> None:
    exported = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    tracer = RequestTracer(provider)
    for number in range(3 * MOST_LANES):
        lane = LaneId(DeviceId("cloud", number), 0)
        request = Request(number, "a", 1.0, 2.0)
        tracer.arrived(request, "")
        tracer.ran(Run(lane, 1, "a", (request,)), Timing(1.2, 0.1, 0.2, 0.1, 0.0, 0.2))
        tracer.ended(Reply((request,), Outcome.SERVED, lane=lane, batch=1, started=1.2), 1.8)
    assert len(tracer._batches) == MOST_LANES
    assert sum(span.name == "run" for span in exported.get_finished_spans()) == 3 * MOST_LANES


def test_collector_that_is_away_costs_no_answer(tmp_path: Path) -> None:
    with collector() as to:
        away = to.address

    async def ask(server: Server) -> None:
        assert not isinstance(await answer(server, "identity", floats()), Exception)

    run(traced(repository(tmp_path), Collector(away), ask))


def test_tracing_without_its_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"pip install 'cotenant\[otel\]'"):
            async with tracing("http://localhost:4318"):
                pass

    asyncio.run(main())
