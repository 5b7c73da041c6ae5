"""Say what a server tells every caller first: how many calls it takes at once, and how much of each."""

from __future__ import annotations

from cotenant.live.grpc import frames
from cotenant.live.grpc.call import STREAM_WINDOW
from cotenant.live.grpc.headers import MAX_HEADERS

WINDOW = 1 << 22  # bytes that may come on a connection before they are acknowledged
MAX_CALLS = 1 << 12  # of one connection at once

GREETING = frames.settings_frame(
    {
        frames.MAX_CONCURRENT_STREAMS: MAX_CALLS,
        frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
        frames.MAX_HEADER_LIST_SIZE: MAX_HEADERS,
    }
) + frames.window_update(0, WINDOW - frames.DEFAULT_WINDOW)
