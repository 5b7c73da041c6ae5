"""Start a worker ahead of need: `worker.main` with its libraries already imported.

The arguments are the modules to import, separated by commas, then those of `worker.main`, and `background` for a
process that stays in the background for all its life. Any other was started at the lowest priority, where it may have
its own again, and has it from when it is ready. It then writes one byte to its standard input, the socket to the
server, and behaves as any worker.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from cotenant.worker.background import lower_own_priority, restore_priority
from cotenant.worker.parent_death import die_with_parent


def main() -> None:
    modules = sys.argv.pop(1).split(",")
    die_with_parent(int(sys.argv[2]))
    # An unprivileged thread cannot raise its priority again; on Linux niceness is per thread, so another one imports.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_import_modules, ["cotenant.worker.main", *filter(None, modules)]).result()
    from cotenant.worker.main import work

    if "background" not in sys.argv[3:]:
        restore_priority(int(sys.argv[2]))
    os.write(sys.stdin.fileno(), b"\0")
    work()


def _import_modules(modules: Sequence[str]) -> None:
    """Import modules at the lowest CPU priority."""
    lower_own_priority()
    for module in modules:
        importlib.import_module(module)


if __name__ == "__main__":
    main()
