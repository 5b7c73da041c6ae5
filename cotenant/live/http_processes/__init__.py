"""Several processes that accept HTTP on one port (`SO_REUSEPORT`), before one dispatcher.

Each process runs the HTTP front end unchanged, before a core (`remote_core`) that passes requests on to the server's
process, in which a session (`session`) puts them to the real core. Requests and answers travel in batches over a Unix
socket (`link`, `messages`), large tensors through the arena, of which each process has a part (`loans`). What admission
knows is published in shared memory (`board`), so that a request which would be rejected goes no further than the
process that read it. `supervisor` starts the processes, and again where one dies.
"""

from __future__ import annotations

from cotenant.live.http_processes.supervisor import HttpProcesses

__all__ = ["HttpProcesses"]
