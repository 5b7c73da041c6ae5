"""Do what a request asks: find its route, unpack its body, and run the handler."""

from __future__ import annotations

import asyncio
import inspect
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from cotenant.errors import CotenantError, RequestError, UnavailableError
from cotenant.live.access import Access, Caller, Permission
from cotenant.live.http.encoding import inflate, inflated_limit
from cotenant.live.http.heads import HeadCache
from cotenant.live.http.load_shedding import LoadShedder
from cotenant.live.http.request_cycle import RequestCycle, authorization_of
from cotenant.live.http.routes import Route, Services, find_route
from cotenant.live.limits import Limits, MemoryBudget
from cotenant.live.oip import rejection
from cotenant.live.threads import run_in_thread

_ROUTES = 1024  # URLs whose routes are remembered
_MAX_URL = 512  # bytes of such a URL

_TIMEOUT = b'"timeout"'  # in the body of a request that brings its own

TOO_MUCH = "the bodies of all requests take too much memory now; try again"


class RequestHandler:
    """Handle the requests of all connections. only_metrics: every other path is unknown. memory: what their bodies and
    responses take. access: who may do what. shedder: decides what is rejected unread under overload. log_access:
    whether each request is a line of the access log. forward: answers what is not inference; None: handlers do."""

    def __init__(
        self,
        services: Services,
        *,
        only_metrics: bool,
        limits: Limits,
        memory: MemoryBudget | None,
        access: Access,
        shedder: LoadShedder,
        log_access: bool = False,
        forward: Callable[[RequestCycle], None] | None = None,
    ) -> None:
        self.access = access
        self._free = frozenset(permission for permission in Permission if access.is_free(permission))
        self.core = services.core
        self.memory = MemoryBudget(limits.memory) if memory is None else memory
        self.shedder = shedder
        self.heads = HeadCache(self.route, self._may_infer, max_body=min(limits.body, limits.json))
        self.rejects_unread = not log_access  # what has to be logged is read
        self._services = services
        self._forward = forward
        self._only_metrics = only_metrics
        self._log_access = log_access
        self._limits = limits
        self._routes: dict[bytes, Route] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, request: RequestCycle) -> None:
        """Handle a request: its response is complete at once, or later."""
        if self._log_access:
            request.began = time.monotonic()
        try:
            self._start(request)
        except CotenantError as error:
            request.fail(error)
        except Exception as error:  # noqa: BLE001  # it is logged
            request.fail_unexpectedly(error)

    def _start(self, request: RequestCycle) -> None:
        route = self.route(request.url)
        if route is None:
            request.reject(404, "Not Found")
            return
        method = b"GET" if request.method == b"HEAD" else request.method
        endpoint = route.endpoints.get(method)
        if endpoint is None:
            request.reject(405, "Method Not Allowed", b"Allow: %s\r\n" % b", ".join(route.endpoints))
            return
        if endpoint.permission not in self._free:
            self.access.check(endpoint.permission, request.caller())
        # A large body has been asked about before it was received.
        if endpoint.handler is None and not isinstance(request.body, memoryview) and self.sheds(route, request.body):
            self.shedder.reject(partial(request.fail, UnavailableError(rejection(route.model))))
        elif b"content-encoding" in request.headers:
            self._inflate(request)
        elif len(request.body) > self._limits.json and request.json_size() > self._limits.json:
            request.reject(
                413, f"JSON of more than {self._limits.json} bytes, which are the most; send tensors in binary"
            )
        elif self.memory.exceeded:
            request.reject(503, TOO_MUCH, b"Retry-After: 1\r\n")
        elif (handler := endpoint.handler) is None:
            request.infer(self.core, route.model, route.version, self.shedder.lost, self.access)
        elif self._forward is not None:
            self._forward(request)
        else:
            payload = handler(self._services, route, request)
            if inspect.iscoroutine(payload):
                task = asyncio.get_running_loop().create_task(payload)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(request.awaited)
            else:
                request.reply(payload)

    def start_known(self, request: RequestCycle, route: Route) -> None:
        """Handle a request for inference whose caller may infer, and whose body is small and used as it was sent."""
        if self._log_access:
            request.began = time.monotonic()
        try:
            if self.memory.exceeded:
                request.reject(503, TOO_MUCH, b"Retry-After: 1\r\n")
            else:
                request.infer(self.core, route.model, route.version, self.shedder.lost, self.access)
        except Exception as error:  # noqa: BLE001  # it is logged
            request.fail_unexpectedly(error)

    def sheds(self, route: Route, body: bytes | bytearray) -> bool:
        """Return whether an inference request is to be rejected for the server's overload; it is counted then. body:
        as much as there is of it, perhaps with its head."""
        if not self.shedder.sheds(route.model, route.version, hurried=_TIMEOUT not in body):
            return False
        self.core.reject_unread(route.model, self.shedder.lag)
        return True

    def route(self, url: bytes) -> Route | None:
        """Return the route of a URL, None for an unknown path."""
        try:
            return self._routes[url]
        except KeyError:
            route = find_route(url)
            if route is None or (self._only_metrics and not route.has_metrics):
                return None
            if len(url) <= _MAX_URL:
                if len(self._routes) >= _ROUTES:
                    self._routes.clear()
                self._routes[url] = route
            return route

    def admits(self, method: bytes, url: bytes, request: RequestCycle) -> None:
        """Raise RequestError where the caller of a request lacks the permission, before its body is read."""
        route = self.route(url)
        endpoint = None if route is None else route.endpoints.get(method)
        if endpoint is not None and endpoint.permission not in self._free:
            self.access.check(endpoint.permission, request.caller())

    def _may_infer(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether whoever sends these headers may infer, from wherever: tokens alone decide on that, and stay as
        they are while the server runs."""
        if Permission.INFER in self._free:
            return True
        try:
            self.access.check(Permission.INFER, Caller(peer="", authorization=authorization_of(headers)))
        except RequestError:
            return False
        return True

    async def stop(self) -> None:
        """Cancel the handlers that are at work, and wait for their end."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _inflate(self, request: RequestCycle) -> None:
        """Unpack the body of a request in a thread, since a small one may hold a large one; then handle it."""
        encoding = request.headers.pop(b"content-encoding").lower()
        if encoding == b"identity":
            self.start(request)
            return
        if encoding not in (b"gzip", b"deflate"):
            request.reject(415, f"unsupported content encoding {encoding!r}; use gzip or deflate")
            return

        most = inflated_limit(len(request.body), self._limits.body)
        request.channel.hold(request, most)
        if self.memory.exceeded:
            request.reject(503, TOO_MUCH, b"Retry-After: 1\r\n")
            return

        def unpacked(work: asyncio.Future[bytes | None]) -> None:
            error = work.exception()
            if isinstance(error, zlib.error):
                request.reject(400, f"the body is no {encoding.decode()}: {error}")
                return
            if error is not None:
                request.fail_unexpectedly(error)
                return
            body = work.result()
            if body is None:
                request.reject(413, f"a body of more than {most} bytes, unpacked, which are the most for this one")
            elif request.channel.transport is not None:
                request.channel.hold(request, len(body) - most)
                request.body = body
                self.start(request)

        run_in_thread(unpacked, inflate, request.body, most)
