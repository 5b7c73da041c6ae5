"""The addresses that HTTP has: what each stands for, and what it answers. Those of the protocol are Triton's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import httptools
import msgspec

from cotenant.errors import InvalidError, MalformedError, NotFoundError, UnsupportedError
from cotenant.live.http.request_cycle import HTML, PROMETHEUS, TextResponse
from cotenant.live.oip import Data, model_metadata, server_metadata

if TYPE_CHECKING:
    from cotenant.live.http.server import HttpServer

# From the server, the address and the body of the request to what is answered, or to a coroutine that returns it.
# Raises RequestError's children. None is inference, which answers by itself.
Handler = Callable[["HttpServer", "Route", Data], Any] | None


class Route(msgspec.Struct, frozen=True):
    """What an address stands for. handlers: by method."""

    handlers: dict[bytes, Handler]
    model: str = ""
    version: str = ""

    @property
    def infers(self) -> bool:
        return None in self.handlers.values()


def find_route(url: bytes) -> Route | None:
    """None for an address that stands for nothing."""
    try:
        path = (httptools.parse_url(url).path or b"").decode("ascii")
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
        return None
    for pattern, handlers in _PATTERNS:
        if match := pattern.fullmatch(path):
            groups = match.groupdict("")
            try:
                model = unquote_to_bytes(groups.get("model", "")).decode()
            except UnicodeDecodeError:
                return None
            return Route(handlers, model, groups.get("version", ""))
    return None


def _page(server: HttpServer, route: Route, body: Data) -> Any:
    if server.page is None:
        raise NotFoundError("Not Found")
    return TextResponse(server.page(), HTML)


def _status(server: HttpServer, route: Route, body: Data) -> Any:
    if server.status is None:
        raise NotFoundError("Not Found")
    return server.status()


def metrics(server: HttpServer, route: Route, body: Data) -> Any:
    return TextResponse(server.core.metrics(), PROMETHEUS)


def _server_metadata(server: HttpServer, route: Route, body: Data) -> Any:
    return server_metadata()


def _live(server: HttpServer, route: Route, body: Data) -> Any:
    if not server.core.live():
        raise InvalidError("the server is not live")
    return {"live": True}


def _ready(server: HttpServer, route: Route, body: Data) -> Any:
    if not server.core.ready():
        raise InvalidError("the server is not ready")
    return {"ready": True}


def _model_ready(server: HttpServer, route: Route, body: Data) -> Any:
    if not server.core.model_ready(route.model, route.version):
        raise InvalidError(f"model {route.model!r} is not ready")
    return {"name": route.model, "ready": True}


def _models(server: HttpServer, route: Route, body: Data) -> Any:
    return {"models": [entry.name for entry in server.core.index(ready=True)]}


def _model_metadata(server: HttpServer, route: Route, body: Data) -> Any:
    return model_metadata(server.core.model(route.model, route.version))


def _config(server: HttpServer, route: Route, body: Data) -> Any:
    return server.core.config(route.model, route.version)


def _statistics(server: HttpServer, route: Route, body: Data) -> Any:
    return {"model_stats": server.core.statistics(route.model, route.version)}


def _index(server: HttpServer, route: Route, body: Data) -> Any:
    entries = server.core.index(ready=_object(body).get("ready") is True)
    return [{key: value for key, value in msgspec.structs.asdict(entry).items() if value} for entry in entries]


async def _load(server: HttpServer, route: Route, body: Data) -> Any:
    await server.core.load(route.model, _parameters(body))
    return TextResponse("")


async def _unload(server: HttpServer, route: Route, body: Data) -> Any:
    await server.core.unload(route.model, _parameters(body))
    return TextResponse("")


def _trace_setting(server: HttpServer, route: Route, body: Data) -> Any:
    return server.core.trace_setting(route.model)


def _set_trace(server: HttpServer, route: Route, body: Data) -> Any:
    return server.core.trace_setting(route.model, _object(body))


def _log_settings(server: HttpServer, route: Route, body: Data) -> Any:
    return server.core.log_settings()


def _set_log(server: HttpServer, route: Route, body: Data) -> Any:
    return server.core.log_settings(_object(body))


def _no_regions(server: HttpServer, route: Route, body: Data) -> Any:
    return []


def _nothing(server: HttpServer, route: Route, body: Data) -> Any:
    return TextResponse("")


def _no_registration(server: HttpServer, route: Route, body: Data) -> Any:
    raise UnsupportedError("no shared memory is registered here; send tensors in binary, which is as fast on one host")


def _no_generate(server: HttpServer, route: Route, body: Data) -> Any:
    raise UnsupportedError("generate is not offered here; use infer")


def _no_repository(server: HttpServer, route: Route, body: Data) -> Any:
    raise UnsupportedError("there is one model repository, and it is not named in the address")


_MODEL = r"/v2/models/(?P<model>[^/]+)"
_VERSION = rf"{_MODEL}(?:/versions/(?P<version>[0-9]+))?"
_REGION = r"/v2/(?:system|cuda)sharedmemory(?:/region/[^/]+)?"

_ADDRESSES: list[tuple[str, dict[bytes, Handler]]] = [
    (rf"{_VERSION}/infer", {b"POST": None}),
    (r"/", {b"GET": _page}),
    (r"/cotenant/status", {b"GET": _status}),
    (r"/metrics", {b"GET": metrics}),
    (r"/v2", {b"GET": _server_metadata}),
    (r"/v2/health/live", {b"GET": _live}),
    (r"/v2/health/ready", {b"GET": _ready}),
    (r"/v2/models", {b"GET": _models}),
    (r"/v2/models/stats", {b"GET": _statistics}),
    (rf"{_VERSION}", {b"GET": _model_metadata}),
    (rf"{_VERSION}/ready", {b"GET": _model_ready}),
    (rf"{_VERSION}/config", {b"GET": _config}),
    (rf"{_VERSION}/stats", {b"GET": _statistics}),
    (rf"{_VERSION}/generate(?:_stream)?", {b"POST": _no_generate}),
    (rf"(?:/v2|{_MODEL})/trace/setting", {b"GET": _trace_setting, b"POST": _set_trace}),
    (r"/v2/logging", {b"GET": _log_settings, b"POST": _set_log}),
    (r"/v2/repository/index", {b"POST": _index}),
    (r"/v2/repository/models/(?P<model>[^/]+)/load", {b"POST": _load}),
    (r"/v2/repository/models/(?P<model>[^/]+)/unload", {b"POST": _unload}),
    (r"/v2/repository/[^/]+/(?:index|models/[^/]+/(?:un)?load)", {b"POST": _no_repository}),
    (rf"{_REGION}/status", {b"GET": _no_regions}),
    (rf"{_REGION}/register", {b"POST": _no_registration}),
    (rf"{_REGION}/unregister", {b"POST": _nothing}),
]
_PATTERNS = [(re.compile(address), handlers) for address, handlers in _ADDRESSES]


def _object(body: Data) -> dict[str, Any]:
    if not body:
        return {}
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"the body is no JSON object: {error}") from None
    except RecursionError:
        raise MalformedError("the body is no JSON object: it is nested too deeply") from None


def _parameters(body: Data) -> dict[str, Any]:
    parameters = _object(body).get("parameters", {})
    if not isinstance(parameters, dict):
        raise MalformedError("'parameters' is no JSON object")
    return parameters
