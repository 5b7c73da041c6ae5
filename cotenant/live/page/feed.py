"""Send the page what it shows: one stream of server-sent events, encoded once for all that listen.

An event `charts` has points of the last ten minutes (all at first, then one every five seconds), `plan` what changes
with the plan, and `tick`, every second, the rest. Nobody listens: then only totals are read, every five seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from cotenant.core.plan import Plan
from cotenant.errors import UnavailableError
from cotenant.live.limits import MAX_STREAMS
from cotenant.live.page.history import POINTS, STEP, History
from cotenant.live.page.totals import Totals
from cotenant.live.page.views import Moment, charts, plan_view, tick
from cotenant.live.partition_labels import RETIRED, PartitionLabel
from cotenant.live.process import private_memory
from cotenant.live.serving_observer import EPOCH
from cotenant.live.status import Snapshot

logger = logging.getLogger(__name__)

PERIOD = 1.0  # seconds between two ticks
RETRY = 5.0  # seconds after which a page that found too many may try again

Send = Callable[[bytes], None]


class Source(Protocol):
    """The server, as the page sees it."""

    def snapshot(self) -> Snapshot: ...

    def totals(self, now: float) -> Totals: ...

    def plan(self) -> Plan: ...


class PageFeed:
    """Feed all open pages. All methods belong to the event loop."""

    def __init__(self, source: Source, *, clock: Callable[[], float] = time.monotonic, period: float = PERIOD) -> None:
        """Read a source. clock: monotonic seconds. period: seconds between two ticks."""
        self._source = source
        self._period = period
        self._clock = clock
        self._history = History()
        self._points = 0
        self._next = 0.0  # when the next point is due
        self._listeners: dict[object, Send] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.Task[None] | None = None
        self._memory: dict[int, int] = {}
        self._processor = (0.0, 0.0)  # when the server's processor time was read, and what it was, in seconds
        self._server: float | None = None
        self._plan: tuple[object, bytes] = (None, b"")  # the last event of that name, and what it was made from
        self._state = "starting"

    def start(self) -> None:
        """Read totals from now on."""
        self._processor = self._clock(), time.process_time()
        self._tick()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._reading is not None:
            self._reading.cancel()

    def admit(self) -> None:
        """Raise UnavailableError where too many pages are open."""
        if len(self._listeners) >= MAX_STREAMS:
            raise UnavailableError(f"{MAX_STREAMS} pages are open, which are the most", retry_after=RETRY)

    def subscribe(self, send: Send) -> Callable[[], None]:
        """Send everything at once, and then what changes. Return what ends that."""
        listener = object()
        self._listeners[listener] = send
        seen = self._source.snapshot()
        send(_event("charts", charts(self._history, self._points, POINTS)))
        send(self._plan_event(seen)[0])
        send(self._tick_event(seen))
        return lambda: self._listeners.pop(listener, None) and None

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period, self._tick)
        try:
            self._advance()
        except Exception:  # what is shown must not cost what is served
            logger.exception("the page was not brought up to date")

    def _advance(self) -> None:
        now = self._clock()
        is_due = now >= self._next
        if not is_due and not self._listeners:
            return
        seen = self._source.snapshot()
        if is_due:
            self._next = now + STEP - self._period / 2
            labels = [label for label in seen.labels.values() if label != RETIRED]
            self._add_point(seen, labels, now)
        if not self._listeners:
            return
        events = [_event("charts", charts(self._history, self._points, 1))] if is_due else []
        plan, changed = self._plan_event(seen)
        if changed:
            events.append(plan)
        events.append(self._tick_event(seen))
        together = b"".join(events)
        for send in list(self._listeners.values()):
            send(together)
        if is_due and self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read_memory(seen))

    def _add_point(self, seen: Snapshot, labels: list[PartitionLabel], now: float) -> None:
        before = len(self._history.times)
        self._history.add(self._source.totals(now), now + EPOCH, seen.targets, labels)
        if before or self._history.times:
            self._points += 1
        since, spent = self._processor
        used = time.process_time()
        if now > since:
            self._server = (used - spent) / (now - since)
        self._processor = now, used

    def _tick_event(self, seen: Snapshot) -> bytes:
        now = self._clock()
        if seen.accepting:
            self._state = "serving"
        elif self._state == "serving":
            self._state = "stopping"
        moment = Moment(
            time=now + EPOCH,
            state=self._state,
            totals=self._source.totals(now),
            memory=self._memory,
            server=self._server,
        )
        return _event("tick", tick(seen, moment, self._history, self._points))

    def _plan_event(self, seen: Snapshot) -> tuple[bytes, bool]:
        """Return the event, and whether it is another than before."""
        plan, rollout, adaptation = self._source.plan(), seen.rollout, seen.adaptation
        key: object = (
            id(plan),
            rollout.sentence(),
            [past.revision for past in rollout.last],
            rollout.late,
            None
            if adaptation is None
            else (adaptation.activity, adaptation.reason, adaptation.refinement, adaptation.deciding),
            _newest(seen, self._clock()),
        )
        if key == self._plan[0]:
            return self._plan[1], False
        self._plan = key, _event("plan", plan_view(seen, plan, self._clock() + EPOCH))
        return self._plan[1], True

    async def _read_memory(self, seen: Snapshot) -> None:
        """Read /proc in a thread, which takes milliseconds."""
        pids = {worker.pid for worker in seen.workers if worker.pid is not None}
        try:
            self._memory = await asyncio.to_thread(lambda: {pid: private_memory(pid) for pid in pids})
        finally:
            self._reading = None


def _newest(seen: Snapshot, now: float) -> object:
    """Return what tells whether the controller has decided anything since."""
    decisions = () if seen.adaptation is None else seen.adaptation.decisions
    return [(round(now - each.seconds_ago, 1), each.action) for each in decisions[:1]]


def _event(name: str, value: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value, enc_hook=str))
