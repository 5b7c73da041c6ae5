"""A worker's life is tied to its server's, and to nobody else's."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(server: int) -> None:
    """Ends with that process, our parent; and does not return where that is gone already."""
    # A supervisor, or a terminal, tells all processes to stop; workers wait for the server to let them go.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        # The end of the stream says as much, but not to a worker in the middle of a long batch.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        sys.exit(1)  # it was gone before
