"""Raise the number of files that this process may have open."""

from __future__ import annotations

import resource

FILES = 1 << 16  # open files that a server may need, where the system allows it; the usual default is 1,024


def raise_file_limit() -> None:
    """Let this process open as many files as a server may need, up to the system's hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
