"""Tie the life of a worker to its server and to nothing else."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(server: int) -> None:
    """End this process when its parent `server` dies; exit at once if it is dead already."""
    # A supervisor or terminal signals the whole group; workers wait until the server lets them go.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        # End of stream tells it too, but a worker in the middle of a long batch would not notice.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        sys.exit(1)  # the server died before prctl
