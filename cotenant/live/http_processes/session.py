"""Serve one HTTP process: put its requests to the core, and send it the answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from cotenant.core.tensor import ModelInfo, Tensor
from cotenant.errors import FailedError, RequestError
from cotenant.live.elements import check_size
from cotenant.live.http.request_cycle import RequestCycle
from cotenant.live.http.request_handler import RequestHandler
from cotenant.live.http_processes.board import Board
from cotenant.live.http_processes.event_loop import EventLoop
from cotenant.live.http_processes.link import Outbox
from cotenant.live.http_processes.loans import Borrower, Lender
from cotenant.live.http_processes.messages import (
    Answer,
    Cancel,
    Drain,
    Event,
    Forward,
    Infer,
    LookUp,
    Model,
    Response,
    Returned,
    Setup,
    Unread,
    failure,
)
from cotenant.live.http_processes.publisher import AdmissionPublisher
from cotenant.live.oip import UNEXPECTED, Core, InferRequest, InferResponse, check_request
from cotenant.worker.arena import Block

logger = logging.getLogger(__name__)

_NOT_YET = 0  # the handle of a request whose `Core.infer` has not returned


class SharedCore(Core, Protocol):
    """What the server's process needs of the core besides."""

    def room(self, model: str) -> tuple[int, float]: ...

    def watch_models(self, changed: Callable[[], None]) -> None: ...


class HttpProcessSession:
    """Serve one HTTP process, until `cancel`. number: its place on the board. part: its memory. handler: answers what
    is not inference. The others are as in `RemoteCore`."""

    def __init__(
        self,
        number: int,
        core: Core,
        handler: RequestHandler,
        board: Board,
        publisher: AdmissionPublisher,
        part: Block,
        write: Callable[[bytearray], None],
        loop: EventLoop,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._number = number
        self._core = core
        self._handler = handler
        self._board = board
        self._publisher = publisher
        self._clock = clock
        self._loop = loop
        self._outbox = Outbox(loop, write, self._not_sent)
        self._lender = Lender(core.allocate)
        self._borrower = Borrower(part, loop, self._give_back)
        self._open: dict[int, int] = {}  # handles of requests for inference, by number
        self._forwarded: dict[int, _ForwardedRequest] = {}
        self._closed = False

    def send(self, message: Setup | Drain) -> None:
        """Send the HTTP process a message of whoever started it."""
        self._outbox.send(message)

    def take(self, message: object) -> None:
        """Take a message of the HTTP process. Raises WorkerError for one that is not the protocol."""
        match message:
            case Infer():
                self._infer(message)
            case Cancel(number):
                self._cancel(number)
            case Returned(numbers):
                self._lender.returned(numbers)
            case LookUp(number, model, version):
                self._look_up(number, model, version)
            case Forward():
                self._start(message)
            case Unread(model, waited):
                for seconds in waited:
                    self._core.reject_unread(model, seconds)
                self._publisher.rejected(model)

    def taken(self) -> None:
        """Take note that a frame was taken."""
        self._board.take_frame(self._number)

    def cancel(self) -> None:
        """End what the HTTP process has begun: its callers have left with it."""
        self._closed = True
        for number in [*self._open, *self._forwarded]:
            self._cancel(number)

    def close(self) -> None:
        """Take back the memory of an HTTP process that has ended: until then it may read what it was lent, and
        write to its part."""
        self.cancel()
        self._lender = Lender(self._core.allocate)
        del self._borrower  # which holds its part of the arena, and is in a cycle with this
        self._publisher.forget(self._number)

    # Inference

    def _infer(self, message: Infer) -> None:
        number = message.number
        if message.slot >= 0:
            self._publisher.heard(self._number, message.slot, message.rows)
        inputs = self._borrower.tensors(number, message.inputs)

        def done(result: InferResponse | RequestError) -> None:
            self._open.pop(number, None)
            if message.slot >= 0:
                self._publisher.changed(message.slot)
            if not self._closed:
                self._answer(number, result)

        try:
            info = self._core.model(message.model, message.version)
            if message.known != self._board.models:
                _check_again(info, inputs)
            request = InferRequest(
                model=message.model,
                version=message.version,
                inputs=inputs,
                timeout=message.timeout,
                patience=message.patience,
                priority=message.priority,
                traceparent=message.trace,
            )
            self._open[number] = _NOT_YET
            handle = self._core.infer(request, done, lost=self._clock() - message.began)
            if number in self._open:
                self._open[number] = handle
        except RequestError as error:
            done(error)
        except Exception:
            logger.exception("a request for model '%s' ended in an error of the server", message.model)
            done(FailedError(UNEXPECTED))

    def _answer(self, number: int, result: InferResponse | RequestError) -> None:
        if isinstance(result, RequestError):
            self._outbox.send(failure(number, result))
            return
        try:
            outputs = self._lender.parts(number, result.outputs)
        except RequestError as error:
            self._outbox.send(failure(number, error))
        else:
            self._outbox.send(Answer(number, result.version, outputs))

    def _look_up(self, number: int, name: str, version: str) -> None:
        known = self._board.models
        try:
            info = self._core.model(name, version)
        except RequestError as error:
            self._outbox.send(failure(number, error))
        else:
            self._outbox.send(Model(number, info, known, self._publisher.slot(info.name)))

    # Everything else

    def _start(self, message: Forward) -> None:
        forwarded = _ForwardedRequest(self, message)
        self._forwarded[message.number] = forwarded
        self._handler.start(forwarded.cycle)

    def respond(self, forwarded: _ForwardedRequest) -> None:
        """Send the response to a request that was passed on."""
        number, cycle = forwarded.number, forwarded.cycle
        assert cycle.response is not None
        stream = cycle.stream
        if stream is None:
            self._forwarded.pop(number, None)
        self._outbox.send(Response(number, b"".join(cycle.response), stream is not None, cycle.closes))
        if stream is not None:
            stream.open(lambda data: self._outbox.send(Event(number, data)))

    def hold(self, size: int) -> None:
        """Count the memory of a response, until it is sent to the HTTP process."""
        self._handler.memory.used += size

    # Both

    def _cancel(self, number: int) -> None:
        forwarded = self._forwarded.pop(number, None)
        if forwarded is not None:
            forwarded.leave(self._core)
        handle = self._open.get(number, _NOT_YET)
        if handle != _NOT_YET:
            self._core.cancel(handle)

    def _not_sent(self, message: object, error: Exception) -> None:
        """Tell of a message that cannot be sent, so that nobody waits for it."""
        logger.error("a message cannot be sent: %s", type(message).__name__, exc_info=error)
        if isinstance(message, Answer | Model | Response):
            self._cancel(message.number)
            self._lender.returned([message.number])
            self._outbox.send(failure(message.number, FailedError(UNEXPECTED)))

    def _give_back(self, number: int) -> None:
        if not self._closed:
            self._outbox.send(Returned([number]))


class _Caller:
    """Stand in for the connection of a caller of another process."""

    def __init__(self, peer: str) -> None:
        self._peer = (peer, 0) if peer else None

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return self._peer if name == "peername" else None


class _ForwardedRequest:
    """Hold a request that was passed on; a `Channel` of its cycle. transport: None once the caller has left."""

    def __init__(self, session: HttpProcessSession, message: Forward) -> None:
        self.number = message.number
        self.transport: Any = _Caller(message.peer)
        self._session = session
        self.cycle = RequestCycle(self, message.method, message.url, message.headers)
        self.cycle.body = message.body
        self.cycle.http_1_0 = message.http_1_0
        self.cycle.closes = message.closes

    def closes_after(self, cycle: RequestCycle) -> bool:
        return False  # the HTTP process knows

    def hold(self, cycle: RequestCycle, size: int) -> None:
        if self.transport is not None:
            cycle.held += size
            self._session.hold(size)

    def flush(self) -> None:
        """Send the response, if the caller still waits for it."""
        if self.transport is not None and self.cycle.response is not None:
            self._session.respond(self)
        self._release()

    def leave(self, core: Core) -> None:
        """Cancel what the caller no longer waits for."""
        self.transport = None
        self._release()
        if self.cycle.stream is not None:
            self.cycle.stream.close()
        elif self.cycle.handle is not None and self.cycle.response is None:
            core.cancel(self.cycle.handle)

    def _release(self) -> None:
        self._session.hold(-self.cycle.held)
        self.cycle.held = 0


def _check_again(info: ModelInfo, inputs: tuple[Tensor, ...]) -> None:
    """Check inputs against a model that may have changed since they were checked. Raises InvalidError."""
    check_request(info, inputs, ())
    for tensor in inputs:
        check_size(tensor)
