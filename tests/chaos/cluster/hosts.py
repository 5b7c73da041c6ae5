"""Machines in one event loop: each runs what was begun in its context, and can die, freeze and wake up.

Whatever a machine's code leaves with the loop (tasks, timers, readers) carries its context. So the loop knows whose a
callback is: that of a dead machine never runs, and that of a frozen one waits until it wakes.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.chaos.clock import VirtualLoop

_Result = TypeVar("_Result")

HERE: contextvars.ContextVar[Host | None] = contextvars.ContextVar("the machine", default=None)


class Host:
    """A machine, from its start to its death. front_end, protocol: what its program says of itself."""

    def __init__(self, loop: HostLoop, name: str, *, front_end: str = "", protocol: int = 0) -> None:
        self.loop = loop
        self.name = name
        self.front_end = front_end
        self.protocol = protocol
        self.dead = False
        self.frozen = False
        self.held: list[asyncio.Handle] = []
        self.slept = 0.0  # seconds
        self.left: list[object] = []  # what is not to be collected before the run is over
        self._since = self._until = 0.0
        self.context = contextvars.copy_context()
        self.context.run(HERE.set, self)

    def do(self, call: Callable[[], _Result]) -> _Result:
        """Call something as this machine does, from outside of it."""
        before = self.loop.entered
        self.loop.enter(self)
        try:
            return self.context.copy().run(call)
        finally:
            self.loop.enter(before)

    def begin(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        return self.loop.create_task(work, context=self.context.copy())

    def die(self) -> None:
        self.wake()
        self.dead = True
        self.left.append(asyncio.all_tasks(self.loop))
        self.loop.forget(self)

    def freeze(self, seconds: float) -> None:
        """Sleep for so long, or for as long as it sleeps already."""
        self._until = max(self._until, self.loop.now + seconds)
        self.loop.call_at(self._until, self._wake_in_time)
        if not self.frozen:
            self.frozen, self._since = True, self.loop.now
            self.loop.asleep += 1

    def _wake_in_time(self) -> None:
        if self.loop.now >= self._until:
            self.wake()

    def wake(self) -> None:
        if self.frozen:
            self.frozen = False
            self.loop.asleep -= 1
            self.slept += self.loop.now - self._since
            held, self.held = self.held, []
            self.loop.resume(held)


class _Ready(deque[asyncio.Handle]):
    """The callbacks that are due: those of machines that sleep wait."""

    def __init__(self, loop: HostLoop) -> None:
        super().__init__()
        self._loop = loop
        self._nothing = asyncio.Handle(lambda: None, (), loop)
        self._nothing.cancel()

    def popleft(self) -> asyncio.Handle:
        handle = super().popleft()
        host = _host_of(handle)
        if host is not None:
            if host.dead:
                return self._nothing
            if host.frozen:
                host.held.append(handle)
                return self._nothing
        self._loop.enter(host)
        return handle


class HostLoop(VirtualLoop):
    """enter: called whenever another machine's code is about to run; None: nobody's."""

    _selector: Any  # asyncio's own

    def __init__(self) -> None:
        super().__init__()
        self.entered: Host | None = None
        self.asleep = 0  # machines
        self.on_entered: Callable[[Host], None] = lambda host: None
        self._ready = _Ready(self)
        self._own_select: Callable[[float | None], list[tuple[selectors.SelectorKey, int]]] = self._selector.select
        self._selector.select = self._select

    def enter(self, host: Host | None) -> None:
        if host is not self.entered:
            self.entered = host
            if host is not None:
                self.on_entered(host)

    def resume(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def forget(self, host: Host) -> None:
        """Watch nothing any more that a dead machine watched."""
        for key in [*self._selector.get_map().values()]:
            if any(handle is not None and _host_of(handle) is host for handle in key.data):
                self._selector.unregister(key.fileobj)

    def _select(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Leave alone what a sleeping machine would read: it would be ready for ever, and the clock would stand."""
        if not self.asleep:
            return self._own_select(timeout)
        asleep = [
            (key, key.events)
            for key in self._selector.get_map().values()
            if any(handle is not None and (host := _host_of(handle)) is not None and host.frozen for handle in key.data)
        ]
        for key, _ in asleep:
            self._selector.unregister(key.fileobj)
        try:
            return self._own_select(timeout)
        finally:
            for key, events in asleep:
                self._selector.register(key.fileobj, events, key.data)


def _host_of(handle: asyncio.Handle) -> Host | None:
    context: contextvars.Context = handle._context  # type: ignore[attr-defined]
    return context.get(HERE)
