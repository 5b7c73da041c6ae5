"""Do what a request asks: find its route, unpack its body, and run the handler."""

from __future__ import annotations

import asyncio
import inspect
import zlib
from typing import Any

from cotenant.errors import CotenantError
from cotenant.live.http.encoding import inflate
from cotenant.live.http.request_cycle import RequestCycle
from cotenant.live.http.routes import Route, Services, find_route, metrics

_ROUTES = 4096  # URLs whose routes are remembered


class RequestHandler:
    """Handle the requests of all connections. only_metrics: every other path is unknown. max_body: bytes of a body,
    unpacked."""

    def __init__(self, services: Services, *, only_metrics: bool, max_body: int) -> None:
        self.core = services.core
        self._services = services
        self._only_metrics = only_metrics
        self._max_body = max_body
        self._routes: dict[bytes, Route | None] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, request: RequestCycle) -> None:
        """Handle a request: its response is complete at once, or later."""
        try:
            self._start(request)
        except CotenantError as error:
            request.fail(error)
        except Exception as error:  # noqa: BLE001  # it is logged
            request.fail_unexpectedly(error)

    def _start(self, request: RequestCycle) -> None:
        if b"content-encoding" in request.headers:
            self._inflate(request)
            return
        route = self.route(request.url)
        if route is None:
            request.reject(404, "Not Found")
            return
        method = b"GET" if request.method == b"HEAD" else request.method
        if method not in route.handlers:
            request.reject(405, "Method Not Allowed", b"Allow: %s\r\n" % b", ".join(route.handlers))
        elif (handler := route.handlers[method]) is None:
            request.infer(self.core, route.model, route.version)
        else:
            payload = handler(self._services, route, request)
            if inspect.iscoroutine(payload):
                task = asyncio.get_running_loop().create_task(payload)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(request.awaited)
            else:
                request.reply(payload)

    def route(self, url: bytes) -> Route | None:
        """Return the route of a URL, None for an unknown path."""
        try:
            return self._routes[url]
        except KeyError:
            if len(self._routes) >= _ROUTES:
                self._routes.clear()
            route = find_route(url)
            if self._only_metrics and route is not None and metrics not in route.handlers.values():
                route = None
            self._routes[url] = route
            return route

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
            request.reject(415, f"content encoding {encoding!r} is not known here; there are gzip and deflate")
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
                request.reject(413, f"a body of more than {self._max_body} bytes, unpacked, which are the most")
            elif request.channel.transport is not None:
                request.body = body
                self.start(request)

        work = asyncio.get_running_loop().run_in_executor(None, inflate, request.body, self._max_body)
        work.add_done_callback(unpacked)
