"""What both ends of a connection, between an HTTP process and the server's, need of an event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class EventLoop(Protocol):
    """Call back: when the round ends, after so many seconds, and from any thread."""

    def call_soon(self, callback: Callable[..., object], /, *args: Any) -> object: ...

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> object: ...

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: Any) -> object: ...
