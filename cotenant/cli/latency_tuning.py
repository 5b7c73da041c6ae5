"""Settings of the interpreter for a process that serves, or that measures latency."""

import gc
import sys

SWITCH_INTERVAL = 0.001  # seconds for which another thread may keep the event loop waiting: planning, rendering metrics


def tune_for_latency() -> None:
    """Keep the garbage collector and other threads from stopping the event loop, and all requests with it.

    What there is now is frozen: it stays until the end of the process, and to traverse it takes 0.1 s or more.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()
