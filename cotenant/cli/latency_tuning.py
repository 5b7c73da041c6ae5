"""Tune the interpreter for a process that serves, or that measures latency."""

import gc
import sys

SWITCH_INTERVAL = 0.001  # seconds for which another thread may block the event loop: planning, rendering metrics


def tune_for_latency() -> None:
    """Keep the garbage collector and other threads from stopping the event loop, and all requests with it.

    Existing objects are frozen: they stay until the end of the process, and a collection of them takes 0.1 s or more.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()
