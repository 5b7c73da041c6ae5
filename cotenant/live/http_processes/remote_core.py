"""Stand in for the server's core in an HTTP process."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from cotenant.core.tensor import ModelInfo
from cotenant.errors import FailedError, RequestError
from cotenant.live.http.load_shedding import LoadShedder, Loop
from cotenant.live.http.request_cycle import RequestCycle
from cotenant.live.http.response import EventStream
from cotenant.live.http_processes.board import Board
from cotenant.live.http_processes.event_loop import EventLoop
from cotenant.live.http_processes.link import Outbox
from cotenant.live.http_processes.loans import Borrower, Lender
from cotenant.live.http_processes.messages import (
    Answer,
    Cancel,
    Event,
    Failure,
    Forward,
    Infer,
    LookUp,
    Model,
    Response,
    Returned,
    Unread,
    error_of,
)
from cotenant.live.oip import UNEXPECTED, Done, InferRequest, InferResponse, LookingUpError
from cotenant.live.shared_memory import SharedMemory
from cotenant.worker.arena import Block, Region

logger = logging.getLogger(__name__)

WINDOW = 4  # frames on their way; what comes meanwhile goes with the next, so that a slow server gets fewer and larger
RETRY = 0.001  # seconds after which a frame that had to wait is tried again
COUNTING = 0.005  # seconds for which rejections are collected before the server is told, which then looks at the model
EARLY = 64  # events that a stream may have before it can be written
BEAT = 0.25  # seconds between two signs of life

Known = Callable[[RequestError | None], None]


class _Model(NamedTuple):
    info: ModelInfo
    known: int
    slot: int


class RemoteCore:
    """Pass requests for inference on to the server's process, and everything else that is not theirs.

    It is as much of `oip.Core` as `HttpServer` needs with `forward`. number: of this HTTP process on the board. region:
    the memory that it may allocate; arena: all of it, where answers lie. write: sends a frame.
    """

    def __init__(
        self,
        number: int,
        board: Board,
        region: Region,
        arena: Block,
        write: Callable[[bytearray], None],
        loop: EventLoop,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_json: int = 1 << 24,
    ) -> None:
        self.shared_memory = SharedMemory()
        self.receive: Callable[[], None] = lambda: None  # takes what the server has sent; set by who has the socket
        self._number = number
        self._board = board
        self._region = region
        self._clock = clock
        self._loop = loop
        self._max_json = max_json
        self._outbox = Outbox(loop, self._send_frame, self._not_sent, self._may_send)
        self._write = write
        self._sent: deque[float] = deque()  # when the frames were sent that the server has not taken
        self._taken = 0
        self._retrying = False
        self._lender = Lender(region.allocate)
        self._borrower = Borrower(arena, loop, self._give_back)
        self._numbers = 0
        self._models: dict[tuple[str, str], _Model] = {}
        self._asked: dict[tuple[str, str], list[Known]] = {}
        self._lookups: dict[int, tuple[str, str]] = {}
        self._open: dict[int, tuple[InferRequest, Done]] = {}
        self._forwarded: dict[int, RequestCycle] = {}
        self._streams: dict[int, Callable[[bytes], None]] = {}
        self._early: dict[int, list[bytes]] = {}  # events of streams whose turn on their connection is yet to come
        self._unread: defaultdict[str, list[float]] = defaultdict(list)

    # What the HTTP process asks

    def model(self, name: str, version: str = "") -> ModelInfo:
        """Return the metadata of a model. Raises LookingUpError where the server has to be asked."""
        found = self._models.get((name, version))
        if found is None or found.known != self._board.models:
            raise LookingUpError(lambda known: self._look_up(name, version, known))
        return found.info

    def allocate(self, size: int) -> Block | None:
        return self._region.allocate(size)

    def infer(self, request: InferRequest, done: Done, *, lost: float = 0.0) -> int:
        model = self._models[request.model, request.version]
        number = self._next()
        inputs = self._lender.parts(number, request.inputs)
        self._open[number] = request, done
        rows = request.inputs[0].shape[0] if model.info.max_batch_size else 1
        if model.slot >= 0:
            self._board.send(self._number, model.slot, rows)
        self._outbox.send(
            Infer(
                number,
                request.model,
                request.version,
                inputs,
                model.known,
                self._clock() - lost,
                model.slot,
                rows,
                request.timeout,
                request.patience,
                request.priority,
                request.traceparent,
            )
        )
        return number

    def cancel(self, handle: int) -> None:
        if handle in self._open or handle in self._forwarded:
            self._forwarded.pop(handle, None)
            self._outbox.send(Cancel(handle))

    @property
    def shortest_target(self) -> float:
        """The shortest target in seconds of all models, as the board says."""
        return self._board.shortest_target

    def would_reject(self, model: str, version: str, lost: float) -> bool:
        """Return whether the board says so: no room is left for another request, or for one that has lost so much."""
        found = self._models.get((model, version))
        if found is None or found.slot < 0:
            return False
        room, slack = self._board.room(found.slot)
        return room == 0 or (room > 0 and lost > slack)

    def reject_unread(self, model: str, waited: float) -> None:
        if not self._unread:
            self._loop.call_later(COUNTING, self._count_unread)
        self._unread[model].append(waited)

    def poll(self) -> None:
        self.receive()

    @property
    def crowded(self) -> bool:
        """Whether a model has little room."""
        return self._board.crowded > 0

    @property
    def lag(self) -> float:
        """The seconds by which the server's process is behind: for so long it has not taken what was sent."""
        self._note_taken()
        return self._clock() - self._sent[0] if self._sent else 0.0

    def forward(self, request: RequestCycle) -> None:
        """Have a request answered there."""
        if len(request.body) > self._max_json:
            request.reject(413, f"a body of {len(request.body)} bytes; at most {self._max_json} are taken here")
            return
        request.handle = number = self._next()
        self._forwarded[number] = request
        self._outbox.send(
            Forward(
                number,
                request.method,
                request.url,
                request.headers,
                bytes(request.body),
                request.caller().peer,
                request.http_1_0,
                request.closes,
            )
        )

    # What the server sends

    def take(self, message: object) -> None:
        """Take a message of the server."""
        match message:
            case Answer():
                self._answered(message)
            case Failure(number):
                self._failed(number, error_of(message))
            case Returned(numbers):
                self._lender.returned(numbers)
            case Model():
                self._told(message)
            case Response():
                self._respond(message)
            case Event(number, data):
                if number in self._streams:
                    self._streams[number](data)
                elif number in self._early and len(self._early[number]) < EARLY:
                    self._early[number].append(data)

    def taken(self) -> None:
        """Go on once a frame was taken: the server may be ready for the next."""
        if self._outbox.waiting:
            self._outbox.flush()

    def beat(self) -> None:
        """Say that this process is alive, again and again, and give memory that is free back to the system."""
        self._board.beat(self._number, self._clock())
        self._region.reclaim()
        self._loop.call_later(BEAT, self.beat)

    # Our own

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def _answered(self, answer: Answer) -> None:
        outputs = self._borrower.tensors(answer.number, answer.outputs)
        opened = self._open.pop(answer.number, None)
        if opened is not None:
            request, done = opened
            done(InferResponse(model=request.model, version=answer.version, id=request.id, outputs=outputs))

    def _failed(self, number: int, error: RequestError) -> None:
        if number in self._lookups:
            self._ask_no_more(self._lookups.pop(number), error)
            return
        opened, forwarded = self._open.pop(number, None), self._forwarded.pop(number, None)
        if opened is not None:
            opened[1](error)
        elif forwarded is not None:
            forwarded.fail(error)

    def _look_up(self, name: str, version: str, known: Known) -> None:
        waiting = self._asked.get((name, version))
        if waiting is not None:
            waiting.append(known)
            return
        number = self._next()
        self._asked[name, version] = [known]
        self._lookups[number] = name, version
        self._outbox.send(LookUp(number, name, version))

    def _told(self, model: Model) -> None:
        asked = self._lookups.pop(model.number, None)
        if asked is None:
            return
        info = model.info
        # A request names its model as it is called here, with its version.
        self._models[asked] = self._models[info.name, info.version] = _Model(info, model.known, model.slot)
        self._ask_no_more(asked, None)

    def _ask_no_more(self, asked: tuple[str, str], error: RequestError | None) -> None:
        for known in self._asked.pop(asked, ()):
            known(error)

    def _respond(self, response: Response) -> None:
        number = response.number
        request = self._forwarded.pop(number, None)
        if request is None or request.channel.transport is None:
            if response.streams:
                self._outbox.send(Cancel(number))
            return
        if response.closes or request.channel.closes_after(request):
            request.closes = True
        if response.streams:
            self._early[number] = []
            request.stream = EventStream(lambda send: self._subscribe(number, send), partial(self._leave, number))
        request.response = (response.data,)
        request.channel.hold(request, len(response.data))
        request.channel.flush()

    def _subscribe(self, number: int, send: Callable[[bytes], None]) -> Callable[[], None]:
        for data in self._early.pop(number, ()):
            send(data)
        self._streams[number] = send
        return partial(self._leave, number)

    def _leave(self, number: int) -> None:
        self._early.pop(number, None)
        self._streams.pop(number, None)
        self._outbox.send(Cancel(number))

    def _give_back(self, number: int) -> None:
        self._outbox.send(Returned([number]))

    def _count_unread(self) -> None:
        unread, self._unread = self._unread, defaultdict(list)
        for model, waited in unread.items():
            self._outbox.send(Unread(model, waited))

    def _not_sent(self, message: object, error: Exception) -> None:
        """End a request that cannot be sent."""
        logger.error("a message cannot be sent: %s", type(message).__name__, exc_info=error)
        if isinstance(message, Infer) and message.slot >= 0:
            self._board.send(self._number, message.slot, -message.rows)
        if isinstance(message, Infer | LookUp | Forward):
            self._lender.returned([message.number])
            self._failed(message.number, FailedError(UNEXPECTED))

    def _send_frame(self, frame: bytearray) -> None:
        self._sent.append(self._clock())
        self._write(frame)

    def _note_taken(self) -> None:
        taken = self._board.frames_taken(self._number) - self._taken
        self._taken += taken
        for _ in range(min(taken, len(self._sent))):  # never more than were sent, whatever the board says
            self._sent.popleft()

    def _may_send(self) -> bool:
        """Return whether a frame may be sent now; else it is tried again soon."""
        self._note_taken()
        if len(self._sent) < WINDOW:
            return True
        if not self._retrying:
            self._retrying = True
            self._loop.call_later(RETRY, self._retry)
        return False

    def _retry(self) -> None:
        self._retrying = False
        self._outbox.flush()


class RemoteShedder(LoadShedder):
    """Reject, besides what an HTTP process cannot read in time, what the board says has no room.

    What is read has waited, and will wait, for as long as the server's process is behind.
    """

    def __init__(self, core: RemoteCore, clock: Callable[[], float]) -> None:
        super().__init__(core, clock)
        self._core = core
        self._behind = 0.0  # seconds by which the server's process was, when the round began

    def read(self) -> bool:
        return super().read() or self._core.crowded

    def sheds(self, model: str, version: str, *, hurried: bool = True) -> bool:
        if self.active:
            return super().sheds(model, version, hurried=hurried)
        return hurried and self._core.crowded and self._core.would_reject(model, version, self.lag)

    def _begin(self, loop: Loop, now: float) -> None:
        super()._begin(loop, now)
        self._behind = self._core.lag
        self._since -= self._behind

    @property
    def lost(self) -> float:
        """The seconds that have passed here: those on the way are counted when the request arrives."""
        return max(0.0, super().lost - self._behind)
