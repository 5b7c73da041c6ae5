"""Decide which requests for inference are rejected unread while the event loop lags behind its callers.

To read a request, decode it and ask the dispatcher costs several times what it costs to turn it down by its head. A
server that reads more than it has time for answers everybody late, so what is not worth reading is not read:

- while the loop lags, a request that the dispatcher would reject anyway, in what the lag leaves of its target;
- while the lag stands, as a queue that does not drain rather than a burst that does (CoDel tells them apart so,
  RFC 8289): what a round of the loop has no time for.

What counts as lag is a tenth of the shortest target, so that a crowd whose targets leave time is read and answered.

Rejections have a part of each round, too: as much as reading took, so that they keep up with what is read, within a
bound on the whole round. Callers who ask again as soon as they are rejected wait for theirs, rather than take the time
of those who are served. What is served goes on meanwhile: workers are polled between rejections.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)

MIN_LAG, MAX_LAG = 0.005, 0.05  # seconds that a request may wait in its socket, and that a round may be read in full
LAG_SHARE = 0.1  # part of the shortest target of a model, which both are within these bounds
INTERVAL = 0.1  # seconds: lag that lasts so long stands, and shedding ends when there was none for so long
REJECTING = 0.002  # seconds of a round in which rejections are written at least
ROUND = 2.0  # times that time which a round is to take at most, what is read and the rejections together
WRITING = 1.5  # seconds in which rejections are written for each in which requests are read: a write takes longer
AGAIN = 0.00025  # seconds for which a model that had no room has none: workers are polled as often
BETWEEN = 16  # rejections between two polls of the workers
REST = 0.002  # seconds between two rounds from which on the loop has waited for its sockets: uvloop counts milliseconds


class Loop(Protocol):
    """What is needed of an event loop. time: now (of uvloop), or when it last looked for sockets that are ready."""

    def time(self) -> float: ...

    def call_soon(self, callback: Callable[[], object], /) -> Any: ...


class Admission(Protocol):
    """What the server knows of the requests that it would take. shortest_target: seconds, of all models."""

    @property
    def shortest_target(self) -> float: ...

    def would_reject(self, model: str, version: str, lost: float) -> bool: ...

    def poll(self) -> None: ...


class LoadShedder:
    """Follow the rounds of the event loop, and decide by the lag of what is read in them.

    What was ready when a round began is read in that round. So what is read has waited since the round began at most,
    or, where the loop went from one round straight to the next, since the one before began.

    lag: the seconds that what was read last may have waited. active: the loop lags.
    """

    def __init__(self, admission: Admission, clock: Callable[[], float]) -> None:
        self._admission = admission
        self._clock = clock
        self._loop: Loop | None = None
        self._in_round = False  # something has been read in this round
        self._ending = False  # its end will be told
        self._since = self._started = -math.inf  # what is read may have waited since then; the round began
        self._ended = -math.inf  # the round before
        self._worst = 0.0  # lag in this round
        self._now = -math.inf  # when something was last read
        self._full: dict[tuple[str, str], float] = {}  # until when a model and version have no room, in this round
        self._lagged = -math.inf  # when the loop last lagged
        self._onset = math.inf  # since when it lags in every round
        self._standing = False
        self._most = MIN_LAG  # seconds of lag that do no harm
        self._rejections: deque[Callable[[], None]] = deque()
        self.active = False
        self.lag = 0.0

    def attach(self, loop: Loop) -> None:
        """Follow this loop. Before, nothing is shed."""
        self._loop = loop

    def read(self) -> bool:
        """Take note that a socket has been read; return whether the loop lags."""
        loop = self._loop
        if loop is None:
            return False
        self._now = now = self._clock()
        if not self._in_round:
            self._begin(loop, now)
        self.lag = lag = now - self._since
        if lag >= self._most:
            self._lagged = now
            self.active = True
        elif self.active:
            self._settle(now)
        if lag > self._worst:
            self._worst = lag
        return self.active

    def settle(self) -> None:
        """Take note of the time, where nothing may have been read for a while: then nothing lags either."""
        if self.active:
            self._settle(self._clock())

    def _settle(self, now: float) -> None:
        if now - self._lagged > INTERVAL:
            self.active = self._standing = False

    def sheds(self, model: str, version: str, *, hurried: bool = True) -> bool:
        """Return whether a request that was just read, for this model, is to be rejected without reading more of it.
        hurried: it has no timeout of its own, which may be longer than the model's target."""
        if not self.active:
            return False
        if self._standing and self._clock() - self._started > self._most:
            return True
        if not hurried:
            return False
        key = model, version
        if self._now < self._full.get(key, -math.inf):
            return True
        if not self._admission.would_reject(model, version, self.lag):
            return False
        self._full[key] = self._now + AGAIN
        return True

    @property
    def lost(self) -> float:
        """The seconds of a request's target that have passed before it was read, as far as the lag matters."""
        return self.lag if self.active or self.lag >= MIN_LAG else 0.0

    def reject(self, send: Callable[[], None]) -> None:
        """Have a rejection sent at the end of this round, or of a later one."""
        self._rejections.append(send)

    def _begin(self, loop: Loop, now: float) -> None:
        self._in_round = True
        started = min(loop.time(), now)
        self._since = started if started - self._ended > REST else self._started
        self._started = started
        self._worst = 0.0
        self._full.clear()
        self._see_to_end(loop)

    def _see_to_end(self, loop: Loop) -> None:
        if not self._ending:
            self._ending = True
            loop.call_soon(self._end)

    def _end(self) -> None:
        """End the round: the loop has called back all whose sockets were ready, and looks for others."""
        has_read, self._in_round, self._ending = self._in_round, False, False
        if self._worst >= MIN_LAG:
            self._most = min(max(MIN_LAG, LAG_SHARE * self._admission.shortest_target), MAX_LAG)
        if self._rejections:
            now = self._clock()
            reading = now - self._started if has_read else 0.0
            self._send(now + max(REJECTING, min(WRITING * reading, ROUND * self._most - reading)))
        self._ended = now = self._clock()
        if not has_read:
            return
        if self._worst < self._most:
            self._onset = math.inf
        elif self._onset == math.inf:
            self._onset = now
        elif now - self._onset > INTERVAL:
            self._standing = True

    def _send(self, until: float) -> None:
        """Send rejections for as long as a round has for them, and see to it that there is another round."""
        sent = 0
        while self._rejections and self._clock() < until:
            try:
                self._rejections.popleft()()
            except Exception:
                # One that cannot be sent must not cost others theirs.
                logger.exception("a rejection was lost")
            sent += 1
            if sent % BETWEEN == 0:
                self._admission.poll()
        if self._rejections and self._loop is not None:
            self._see_to_end(self._loop)
