"""A worker that is started before there is anything for it to serve: `worker.main`, with its libraries imported.

Its arguments are the modules to import, with commas between them, and then those of `worker.main`. It says one byte on
its standard input when it is ready, and goes on as any worker.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from cotenant.worker.parent_death import die_with_parent

LEAST = 19  # niceness


def main() -> None:
    modules = sys.argv.pop(1).split(",")
    die_with_parent(int(sys.argv[2]))
    # Who has given priority up may not take it back. On Linux it belongs to a thread, so another one does the imports.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_load, ["cotenant.worker.main", *filter(None, modules)]).result()
    from cotenant.worker.main import work

    os.write(sys.stdin.fileno(), b"\0")
    work()


def _load(modules: Sequence[str]) -> None:
    """With processor time that nobody else wants."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, LEAST)
    for module in modules:
        importlib.import_module(module)


if __name__ == "__main__":
    main()
