"""Notice callers who cost the server more than themselves: floods of frames, and memory held without progress."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cotenant.live.grpc.frames import ConnectionFault, ErrorCode

if TYPE_CHECKING:
    from cotenant.live.grpc.call import Call

RAPID = 0.01  # seconds: a call that its caller resets sooner was hardly meant
MAX_RAPID = 1 << 10  # such resets within a second, from whoever may call
MAX_SETTINGS = 100  # frames within a second, each of which may go through all calls


class Misuse:
    """Count, second by second, what one connection does.

    moved: bytes of messages that came or went within this second. rapid: calls reset at once that it may have within
    one.
    """

    __slots__ = ("_rapid", "_resets", "_settings", "_stalled", "moved")

    def __init__(self, rapid: int = MAX_RAPID) -> None:
        self.moved = 0
        self._rapid = rapid
        self._resets = self._settings = self._stalled = 0

    def count_reset(self, age: float = 0.0) -> None:
        """Count a call that its caller breaks off, `age` seconds after its start, or by frames that are wrong. Raises
        ConnectionFault: calls that are reset take no room among those at once (CVE-2023-44487, CVE-2025-8671)."""
        if age < RAPID:
            self._resets += 1
            if self._resets > self._rapid:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "calls that are reset at once")

    def count_settings(self) -> None:
        """Count a frame of settings. Raises ConnectionFault (CVE-2019-9515)."""
        self._settings += 1
        if self._settings > MAX_SETTINGS:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "settings that change all the time")

    def second(self, calls: Iterable[Call], rate: int) -> int:
        """End a second. Return for how many the caller has let its calls hold memory, and moved less than `rate` bytes
        of messages in each; other frames are no progress."""
        slow = self.moved < rate and any(call.held and (call.pending or not call.ended) for call in calls)
        self._stalled = self._stalled + 1 if slow else 0
        self.moved = self._resets = self._settings = 0
        return self._stalled
