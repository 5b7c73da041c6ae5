"""Map URLs to handlers; those of the protocol are Triton's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote_to_bytes

import httptools
import msgspec

from cotenant.core.tensor import total_bytes
from cotenant.errors import (
    FailedError,
    InvalidError,
    MalformedError,
    NotFoundError,
    RequestError,
    UnavailableError,
    UnsupportedError,
)
from cotenant.live.access import Permission
from cotenant.live.generate import EVENTS, decode_generate, encode_generate, error_event, event
from cotenant.live.http.openapi import Registration, openapi_document
from cotenant.live.http.request_cycle import JSON_THREAD, RequestCycle
from cotenant.live.http.response import EventStream, TextResponse
from cotenant.live.job_proof import HEADER
from cotenant.live.job_service import JobService
from cotenant.live.limits import MAX_AT_ONCE
from cotenant.live.metrics import render
from cotenant.live.oip import Core, Data, InferResponse, model_metadata, server_metadata
from cotenant.live.page import PageFeed
from cotenant.live.page.assets import INDEX, SECURITY, asset


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """What handlers answer from. page: feeds the page at ``/``; status: what ``/cotenant/status`` shows, as JSON;
    admission: what ``/cotenant/admission`` tells routers; startup: says how far the start of the server is, empty once
    it has started; reload: has the settings read again; jobs: answers about best-effort jobs."""

    core: Core
    page: PageFeed | None = None
    status: Callable[[], Awaitable[Any]] | None = None
    admission: Callable[[], Any] | None = None
    startup: Callable[[], str] = lambda: ""
    reload: Callable[[], Awaitable[None]] | None = None
    jobs: JobService | None = None


class Route(msgspec.Struct, frozen=True):
    """What a path stands for. endpoints: by method."""

    endpoints: dict[bytes, Endpoint]
    model: str = ""
    version: str = ""
    file: str = ""
    region: str = ""
    job: str = ""

    @property
    def infers(self) -> bool:
        return any(endpoint.handler is None for endpoint in self.endpoints.values())

    @property
    def has_metrics(self) -> bool:
        return any(endpoint.handler is metrics for endpoint in self.endpoints.values())


# From the services, the route and the request to the payload of the response, or to a coroutine that returns it.
# Raises RequestError's children. None is inference, which answers by itself.
Handler = Callable[[Services, Route, RequestCycle], Any] | None


class Endpoint(NamedTuple):
    """What a method of a path does, and what a caller needs for it. summary, takes, gives: for the OpenAPI document, as
    `openapi.Described` has them."""

    handler: Handler
    permission: Permission
    summary: str
    takes: str = ""
    gives: str = ""


def find_route(url: bytes) -> Route | None:
    """Return the route of a URL, None for an unknown path."""
    try:
        path = (httptools.parse_url(url).path or b"").decode("ascii")
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
        return None
    for pattern, endpoints in _PATTERNS:
        if match := pattern.fullmatch(path):
            groups = match.groupdict("")
            try:
                model, region, job = (unquote_to_bytes(groups.get(n, "")).decode() for n in ("model", "region", "job"))
            except UnicodeDecodeError:
                return None
            return Route(endpoints, model, groups.get("version", ""), groups.get("file", ""), region, job)
    return None


def _page(services: Services, route: Route, request: RequestCycle) -> Any:
    if services.page is None:
        raise NotFoundError("Not Found")
    return TextResponse(*asset(route.file or INDEX), SECURITY)


def _events(services: Services, route: Route, request: RequestCycle) -> Any:
    if services.page is None:
        raise NotFoundError("Not Found")
    services.page.admit()
    return EventStream(services.page.subscribe)


async def _status(services: Services, route: Route, request: RequestCycle) -> Any:
    if services.status is None:
        raise NotFoundError("Not Found")
    return await services.status()


def _admission(services: Services, route: Route, request: RequestCycle) -> Any:
    if services.admission is None:
        raise NotFoundError("Not Found")
    return services.admission()


async def _reload(services: Services, route: Route, request: RequestCycle) -> Any:
    if services.reload is None:
        raise NotFoundError("Not Found")
    await services.reload()
    return TextResponse(b"")


def _jobs_of(services: Services) -> JobService:
    if services.jobs is None:
        raise NotFoundError("Not Found")
    return services.jobs


def _list_jobs(services: Services, route: Route, request: RequestCycle) -> Any:
    return _jobs_of(services).jobs()


def _job_key(services: Services, route: Route, request: RequestCycle) -> Any:
    return _jobs_of(services).key_file()


async def _submit_job(services: Services, route: Route, request: RequestCycle) -> Any:
    proof = request.headers.get(PROOF, b"").decode("latin-1")
    return await _jobs_of(services).submit_for_caller(bytes(request.body), JOBS, proof)


def _job(services: Services, route: Route, request: RequestCycle) -> Any:
    return _jobs_of(services).status(route.job)


def _pause_job(services: Services, route: Route, request: RequestCycle) -> Any:
    return _jobs_of(services).pause(route.job)


def _resume_job(services: Services, route: Route, request: RequestCycle) -> Any:
    return _jobs_of(services).resume(route.job)


def _cancel_job(services: Services, route: Route, request: RequestCycle) -> Any:
    return _jobs_of(services).cancel(route.job)


async def _job_output(services: Services, route: Route, request: RequestCycle) -> Any:
    query = parse_qs((httptools.parse_url(request.url).query or b"").decode("latin-1"))
    start = query.get("from", ["0"])[-1]
    if not re.fullmatch("-?[0-9]{1,15}", start):
        raise InvalidError(
            f"from: {start[:100]!r} is not a number of bytes; write 0 for all, -1000 for the last thousand"
        )
    return await _jobs_of(services).output(route.job, int(start))


async def metrics(services: Services, route: Route, request: RequestCycle) -> Any:
    # In a thread: thousands of samples take tens of milliseconds, which no request should wait for.
    accept = request.headers.get(b"accept", b"").decode("latin-1")
    return TextResponse(*await asyncio.to_thread(render, services.core.metrics(), accept))


def _server_metadata(services: Services, route: Route, request: RequestCycle) -> Any:
    return server_metadata(services.core)


def _live(services: Services, route: Route, request: RequestCycle) -> Any:
    if not services.core.live():
        raise InvalidError("the server is not live")
    return {"live": True}


def _ready(services: Services, route: Route, request: RequestCycle) -> Any:
    if not services.core.ready():
        how_far = services.startup()
        raise InvalidError(f"the server is not ready: {how_far}" if how_far else "the server is not ready")
    return {"ready": True}


def _model_ready(services: Services, route: Route, request: RequestCycle) -> Any:
    if not services.core.model_ready(route.model, route.version):
        raise InvalidError(f"model {route.model!r} is not ready")
    return {"name": route.model, "ready": True}


def _models(services: Services, route: Route, request: RequestCycle) -> Any:
    return {"models": [entry.name for entry in services.core.index(ready=True)]}


def _model_metadata(services: Services, route: Route, request: RequestCycle) -> Any:
    return model_metadata(services.core.model(route.model, route.version))


def _config(services: Services, route: Route, request: RequestCycle) -> Any:
    return services.core.config(route.model, route.version)


def _statistics(services: Services, route: Route, request: RequestCycle) -> Any:
    return {"model_stats": services.core.statistics(route.model, route.version)}


def _index(services: Services, route: Route, request: RequestCycle) -> Any:
    entries = services.core.index(ready=_object(request.body).get("ready") is True)
    return [{key: value for key, value in msgspec.structs.asdict(entry).items() if value} for entry in entries]


async def _load(services: Services, route: Route, request: RequestCycle) -> Any:
    await services.core.load(route.model, _parameters(request.body))
    return TextResponse(b"")


async def _unload(services: Services, route: Route, request: RequestCycle) -> Any:
    await services.core.unload(route.model, _parameters(request.body))
    return TextResponse(b"")


def _trace_setting(services: Services, route: Route, request: RequestCycle) -> Any:
    return services.core.trace_setting(route.model)


def _set_trace(services: Services, route: Route, request: RequestCycle) -> Any:
    return services.core.trace_setting(route.model, _object(request.body))


def _log_settings(services: Services, route: Route, request: RequestCycle) -> Any:
    return services.core.log_settings()


def _set_log(services: Services, route: Route, request: RequestCycle) -> Any:
    return services.core.log_settings(_object(request.body))


def _shared_memory_status(services: Services, route: Route, request: RequestCycle) -> Any:
    return services.core.shared_memory.status(route.region)


def _register(services: Services, route: Route, request: RequestCycle) -> Any:
    wanted = Registration("", 0)
    if services.core.shared_memory.enabled:  # else that is what is said, whatever is sent
        try:
            wanted = msgspec.convert(_object(request.body), Registration)
        except msgspec.ValidationError as error:
            raise InvalidError(f"no registration of shared memory: {error}; give key and byte_size") from None
    services.core.shared_memory.register(route.region, wanted.key, wanted.offset, wanted.byte_size)
    return TextResponse(b"")


def _unregister(services: Services, route: Route, request: RequestCycle) -> Any:
    services.core.shared_memory.unregister(route.region)
    return TextResponse(b"")


def _cuda_status(services: Services, route: Route, request: RequestCycle) -> Any:
    return []


def _cuda_unregister(services: Services, route: Route, request: RequestCycle) -> Any:
    return TextResponse(b"")


def _reject_cuda(services: Services, route: Route, request: RequestCycle) -> Any:
    raise UnsupportedError("memory of a GPU is not registered here; send tensors in binary")


async def _generate(services: Services, route: Route, request: RequestCycle) -> Any:
    return TextResponse(await _generated(services.core, route, request))


async def _generate_stream(services: Services, route: Route, request: RequestCycle) -> Any:
    """Answer in one event: a batch is answered at once. Errors of the model are events, too, as Triton has them."""
    try:
        body = event(await _generated(services.core, route, request))
    except (FailedError, UnavailableError) as error:
        body = error_event(error)
    return TextResponse(body, EVENTS, b"Cache-Control: no-store\r\n")


async def _generated(core: Core, route: Route, request: RequestCycle) -> bytes:
    info = core.model(route.model, route.version)
    wanted = decode_generate(request.body, info)
    request.body = b""
    answer: asyncio.Future[InferResponse | RequestError] = asyncio.get_running_loop().create_future()

    def done(result: InferResponse | RequestError) -> None:
        if not answer.done():  # else the server has stopped waiting
            answer.set_result(result)

    request.handle = core.infer(wanted, done)
    result = await answer
    if isinstance(result, RequestError):
        raise result
    if total_bytes(result.outputs) <= MAX_AT_ONCE:
        return encode_generate(wanted, result)
    request.channel.hold(request, total_bytes(result.outputs))  # they may wait for the thread
    return await asyncio.get_running_loop().run_in_executor(JSON_THREAD, encode_generate, wanted, result)


def _reject_named_repository(services: Services, route: Route, request: RequestCycle) -> Any:
    raise UnsupportedError("there is one model repository, and it is not named in the address")


def _openapi(services: Services, route: Route, request: RequestCycle) -> Any:
    return _DOCUMENT


_TRACE = {
    b"GET": Endpoint(_trace_setting, Permission.OBSERVE, "Settings of traces", gives="object"),
    b"POST": Endpoint(_set_trace, Permission.CONTROL, "The same; a change is refused", "object", "object"),
}
_NAMED_REPOSITORY = {b"POST": Endpoint(_reject_named_repository, Permission.CONTROL, "Not supported: 501")}
_MODEL = "/v2/models/{model}"
_VERSION = f"{_MODEL}[/versions/{{version}}]"
_REPOSITORY = "/v2/repository/{repository}"
JOBS = "/cotenant/jobs"
PROOF = HEADER.lower().encode()
_REGION = "/v2/systemsharedmemory[/region/{region}]"
_CUDA_REGION = "/v2/cudasharedmemory[/region/{region}]"

# By template: `{name}` is a part of the path, and what stands in brackets may be left out.
ROUTES: list[tuple[str, dict[bytes, Endpoint]]] = [
    (f"{_VERSION}/infer", {b"POST": Endpoint(None, Permission.INFER, "Infer", "InferBody", "InferAnswer")}),
    ("/", {b"GET": Endpoint(_page, Permission.PUBLIC, "The web page", gives="text/html")}),
    ("/cotenant/page/{file}", {b"GET": Endpoint(_page, Permission.PUBLIC, "A file of the page", gives="*/*")}),
    (
        "/cotenant/events",
        {b"GET": Endpoint(_events, Permission.OBSERVE, "What the page shows, as events", gives="text/event-stream")},
    ),
    ("/cotenant/status", {b"GET": Endpoint(_status, Permission.OBSERVE, "Models, plan and workers", gives="object")}),
    (
        "/cotenant/admission",
        {b"GET": Endpoint(_admission, Permission.OBSERVE, "Queues and latencies, for routers", gives="object")},
    ),
    ("/cotenant/reload", {b"POST": Endpoint(_reload, Permission.CONTROL, "Reload the configuration")}),
    (
        JOBS,
        {
            b"GET": Endpoint(_list_jobs, Permission.OBSERVE, "Best-effort jobs", gives="JobList"),
            b"POST": Endpoint(_submit_job, Permission.CONTROL, "Submit a best-effort job", "JobRequest", "JobStatus"),
        },
    ),
    (
        f"{JOBS}-key",
        {b"GET": Endpoint(_job_key, Permission.CONTROL, "Where the key lies that proves who submits", gives="KeyFile")},
    ),
    (
        f"{JOBS}/{{job}}",
        {
            b"GET": Endpoint(_job, Permission.OBSERVE, "Where a job stands", gives="JobStatus"),
            b"DELETE": Endpoint(_cancel_job, Permission.CONTROL, "Cancel a job", gives="JobStatus"),
        },
    ),
    (f"{JOBS}/{{job}}/pause", {b"POST": Endpoint(_pause_job, Permission.CONTROL, "Pause a job", gives="JobStatus")}),
    (f"{JOBS}/{{job}}/resume", {b"POST": Endpoint(_resume_job, Permission.CONTROL, "Resume it", gives="JobStatus")}),
    (
        f"{JOBS}/{{job}}/output",
        {b"GET": Endpoint(_job_output, Permission.CONTROL, "What it wrote, from byte `from` on", gives="JobOutput")},
    ),
    ("/metrics", {b"GET": Endpoint(metrics, Permission.OBSERVE, "Metrics for Prometheus", gives="text/plain")}),
    ("/openapi.json", {b"GET": Endpoint(_openapi, Permission.METADATA, "This document", gives="object")}),
    ("/v2", {b"GET": Endpoint(_server_metadata, Permission.METADATA, "The server", gives="ServerMetadata")}),
    ("/v2/health/live", {b"GET": Endpoint(_live, Permission.PUBLIC, "Whether the server is live", gives="object")}),
    ("/v2/health/ready", {b"GET": Endpoint(_ready, Permission.PUBLIC, "Whether it serves", gives="object")}),
    ("/v2/models", {b"GET": Endpoint(_models, Permission.METADATA, "Names of the ready models", gives="object")}),
    ("/v2/models/stats", {b"GET": Endpoint(_statistics, Permission.OBSERVE, "Statistics of all", gives="object")}),
    (_VERSION, {b"GET": Endpoint(_model_metadata, Permission.METADATA, "Inputs and outputs", gives="ModelMetadata")}),
    (f"{_VERSION}/ready", {b"GET": Endpoint(_model_ready, Permission.METADATA, "Whether it serves", gives="object")}),
    (f"{_VERSION}/config", {b"GET": Endpoint(_config, Permission.METADATA, "Triton's ModelConfig", gives="object")}),
    (f"{_VERSION}/stats", {b"GET": Endpoint(_statistics, Permission.OBSERVE, "Statistics", gives="object")}),
    (
        f"{_VERSION}/generate",
        {b"POST": Endpoint(_generate, Permission.INFER, "Infer with plain values", "object", "object")},
    ),
    (
        f"{_VERSION}/generate_stream",
        {b"POST": Endpoint(_generate_stream, Permission.INFER, "The same, as an event", "object", "text/event-stream")},
    ),
    ("/v2/trace/setting", _TRACE),
    (f"{_MODEL}/trace/setting", _TRACE),
    (
        "/v2/logging",
        {
            b"GET": Endpoint(_log_settings, Permission.OBSERVE, "Settings of the log", gives="object"),
            b"POST": Endpoint(_set_log, Permission.CONTROL, "The same; a change is refused", "object", "object"),
        },
    ),
    (
        "/v2/repository/index",
        {b"POST": Endpoint(_index, Permission.METADATA, "Models and their states", "object", "Index")},
    ),
    (
        "/v2/repository/models/{model}/load",
        {b"POST": Endpoint(_load, Permission.CONTROL, "Load a model, or load it again", "object")},
    ),
    ("/v2/repository/models/{model}/unload", {b"POST": Endpoint(_unload, Permission.CONTROL, "Unload it", "object")}),
    (f"{_REPOSITORY}/index", _NAMED_REPOSITORY),
    (f"{_REPOSITORY}/models/{{model}}/load", _NAMED_REPOSITORY),
    (f"{_REPOSITORY}/models/{{model}}/unload", _NAMED_REPOSITORY),
    (
        f"{_REGION}/status",
        {b"GET": Endpoint(_shared_memory_status, Permission.METADATA, "Registered regions", gives="Regions")},
    ),
    (
        f"{_REGION}/register",
        {b"POST": Endpoint(_register, Permission.SHARE, "Register shared memory", "Registration")},
    ),
    (f"{_REGION}/unregister", {b"POST": Endpoint(_unregister, Permission.SHARE, "Forget regions")}),
    (f"{_CUDA_REGION}/status", {b"GET": Endpoint(_cuda_status, Permission.METADATA, "None", gives="Regions")}),
    (f"{_CUDA_REGION}/register", {b"POST": Endpoint(_reject_cuda, Permission.INFER, "Not supported: 501")}),
    (f"{_CUDA_REGION}/unregister", {b"POST": Endpoint(_cuda_unregister, Permission.INFER, "Forget none")}),
]


def _pattern(template: str) -> re.Pattern[str]:
    """Return what matches a template. No part is tried shorter: a long URL would cost each route much."""
    escaped = re.escape(template).replace(r"\[", "(?:").replace(r"\]", ")?")
    escaped = escaped.replace(r"\{version\}", "(?P<version>[0-9]++)")
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]++)", escaped))


_PATTERNS = [(_pattern(template), endpoints) for template, endpoints in ROUTES]
_DOCUMENT = openapi_document(ROUTES)


def _object(body: Data) -> dict[str, Any]:
    if not body:
        return {}
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"the body is not a JSON object: {error}") from None
    except RecursionError:
        raise MalformedError("the body is not a JSON object: it is nested too deeply") from None


def _parameters(body: Data) -> dict[str, Any]:
    parameters = _object(body).get("parameters", {})
    if not isinstance(parameters, dict):
        raise MalformedError("'parameters' is not a JSON object")
    return parameters
