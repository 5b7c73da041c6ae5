"""Trace requests for OpenTelemetry, from what the driver is told and carries out; needs the extra `otel`.

A request is a span from its arrival to its answer, below its caller's where that sent a `traceparent`. Below it are
`queue`, until its batch begins, and `batch`, and below that `run`, while the model itself runs. A stage of an
application is a request below the application's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from cotenant import __version__
from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome, Request
from cotenant.errors import ConfigError
from cotenant.live.serving_observer import EPOCH
from cotenant.runtime.events import Reply, Run
from cotenant.worker.wire import Timing

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

PATH = "/v1/traces"  # of OTLP over HTTP, below its endpoint
MOST_LANES = 1000  # whose last batch is kept: every change of plan names some that no later one does
TIMEOUT = 3.0  # seconds for a collector to take spans; one that is away holds up the end of the server for as long


class RequestTracer:
    """Make spans of requests. Times are of the driver's clock, in seconds."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._tracer = provider.get_tracer("cotenant", __version__)
        self._extract = TraceContextTextMapPropagator().extract
        self._spans: dict[int, Span] = {}  # of requests in flight
        self._batches: dict[LaneId, tuple[Run, Timing]] = {}  # the last of each lane, the latest last

    def arrived(self, request: Request, parent: str) -> None:
        """Hear of a request. parent: the caller's `traceparent`, "" where it sent none."""
        self._begin(request, self._extract({"traceparent": parent}) if parent else None)

    def spawned(self, whole: int, request: Request) -> None:
        """Hear of a request of a stage of an application's request."""
        span = self._spans.get(whole)
        self._begin(request, None if span is None else self._trace.set_span_in_context(span))

    def ran(self, run: Run, timing: Timing) -> None:
        """Hear of a batch that is done, before its requests end."""
        self._batches.pop(run.lane, None)
        self._batches[run.lane] = run, timing
        if len(self._batches) > MOST_LANES:
            del self._batches[next(iter(self._batches))]

    def ended(self, reply: Reply, now: float) -> None:
        """Hear of requests that have ended."""
        for request in reply.requests:
            span = self._spans.pop(request.id, None)
            if span is None:
                continue
            if span.is_recording():
                self._describe(span, request, reply, now)
            span.end(_nanoseconds(now))

    def _begin(self, request: Request, context: Context | None) -> None:
        self._spans[request.id] = self._tracer.start_span(
            f"infer {request.model}",
            context,
            kind=self._trace.SpanKind.SERVER,
            attributes={"cotenant.model": request.model, "cotenant.rows": request.size},
            start_time=_nanoseconds(request.arrived),
        )

    def _describe(self, span: Span, request: Request, reply: Reply, now: float) -> None:
        span.set_attribute("cotenant.outcome", reply.outcome.value)
        span.set_attribute("cotenant.within_target", reply.outcome is Outcome.SERVED and now <= request.deadline)
        if reply.outcome is not Outcome.SERVED:
            span.set_status(self._trace.StatusCode.ERROR, reply.reason)
        if not reply.lane:
            if reply.outcome in (Outcome.EXPIRED, Outcome.CANCELLED):
                self._child(span, "queue", request.arrived, now)
            return
        self._child(span, "queue", request.arrived, reply.started)
        run, timing = self._batches.get(reply.lane, (None, None))
        attributes: dict[str, str | int] = {"cotenant.lane": str(reply.lane), "cotenant.batch": reply.batch}
        if run is None or timing is None or run.batch != reply.batch:
            self._child(span, "batch", reply.started, now, attributes)
            return
        attributes["cotenant.requests"] = len(run.requests)
        attributes["cotenant.rows"] = sum(each.size for each in run.requests)
        batch = self._child(span, "batch", reply.started, now, attributes)
        began = timing.started + timing.gather
        self._child(batch, "run", began, began + timing.infer)

    def _child(
        self, parent: Span, name: str, start: float, end: float, attributes: Mapping[str, str | int] | None = None
    ) -> Span:
        context = self._trace.set_span_in_context(parent)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=_nanoseconds(start))
        span.end(_nanoseconds(end))
        return span


@asynccontextmanager
async def tracing(endpoint: str | None) -> AsyncIterator[RequestTracer | None]:
    """Export spans to an OTLP endpoint over HTTP within the block, from a thread; what is left is sent at its end. The
    variables of OpenTelemetry's SDK set the rest, such as OTEL_TRACES_SAMPLER and OTEL_SERVICE_NAME. None: no traces.

    Raises ConfigError where the extra is missing.
    """
    if endpoint is None:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError("otlp_endpoint: traces need the extra 'otel'; pip install 'cotenant[otel]'") from None
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/").removesuffix(PATH) + PATH, timeout=TIMEOUT)
    named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "cotenant"), "service.version": __version__}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield RequestTracer(provider)
    finally:
        await asyncio.to_thread(provider.shutdown)


def _nanoseconds(time: float) -> int:
    return round((time + EPOCH) * 1e9)
