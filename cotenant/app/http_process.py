"""Run an HTTP process: `live.http_processes` starts it.

Standard input is the socket to the server's process; the arguments are the descriptor of the arena, the number of HTTP
processes, the id of the server's process, and its version.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import time
from pathlib import Path
from typing import cast

import uvloop

from cotenant import __version__
from cotenant.app.access import http_tls
from cotenant.app.log_format import JsonLogFormatter, LogFormatter
from cotenant.config.settings import AccessSettings
from cotenant.live.access import Access
from cotenant.live.http import HttpServer
from cotenant.live.http_processes.board import SIZE, Board
from cotenant.live.http_processes.link import Link
from cotenant.live.http_processes.messages import Drain, Setup, ToHttpProcess
from cotenant.live.http_processes.remote_core import RemoteCore, RemoteShedder
from cotenant.live.oip import Core
from cotenant.worker.arena import KEPT, Block, Region, map_memory
from cotenant.worker.parent_death import die_with_parent

SWITCH_INTERVAL = 0.001  # seconds for which another thread may block the event loop


def main() -> None:
    die_with_parent(int(sys.argv[3]))
    if sys.argv[4] != __version__:
        sys.exit(
            f"this is Cotenant {__version__}, and the server runs {sys.argv[4]}: it was upgraded meanwhile; restart "
            "the server"
        )
    sys.setswitchinterval(SWITCH_INTERVAL)
    uvloop.run(_serve(socket.socket(fileno=sys.stdin.fileno()), int(sys.argv[1]), int(sys.argv[2])))


async def _serve(connection: socket.socket, arena: int, count: int) -> None:
    """Serve until the server's process says that this one is to end, or ends itself."""
    loop = asyncio.get_running_loop()
    messages: asyncio.Queue[ToHttpProcess] = asyncio.Queue()
    core: RemoteCore | None = None

    def take(message: ToHttpProcess) -> None:
        if core is None or isinstance(message, Drain):
            messages.put_nowait(message)
        else:
            core.take(message)

    def lost(reason: str) -> None:
        messages.put_nowait(Drain(0.0))

    link: Link[ToHttpProcess] = Link(
        connection, ToHttpProcess, take, taken=lambda: None if core is None else core.taken(), lost=lost
    )
    setup = await messages.get()
    if not isinstance(setup, Setup):
        return
    _set_up_log(setup)
    memory = map_memory(arena, setup.arena)
    start, size = setup.part
    everything = Block(0, setup.arena, memoryview(memory))
    board = Board(everything.view[setup.board : setup.board + SIZE], count)
    core = RemoteCore(
        setup.number,
        board,
        Region(memory, start, start + size, kept=min(KEPT // count, size)),
        everything,
        link.write,
        loop,
        max_json=setup.limits.json,
    )
    core.receive = link.receive
    server = HttpServer(
        cast(Core, core),  # of which it needs what infers: `forward` does the rest
        limits=setup.limits,
        access=Access.from_digests(setup.tokens, control=setup.control),
        tls=None if setup.tls is None else http_tls(_tls_settings(setup)),
        log_access=setup.access_log,
        forward=core.forward,
        shedder=RemoteShedder(core, time.monotonic),
    )
    server.adopt([socket.socket(fileno=each) for each in setup.listening])
    core.beat()
    gc.collect()
    gc.freeze()
    drain = await messages.get()
    await server.stop(drain.grace if isinstance(drain, Drain) else 0.0)


def _tls_settings(setup: Setup) -> AccessSettings:
    assert setup.tls is not None
    return AccessSettings(certificate=Path(setup.tls.certificate), key=Path(setup.tls.key))


def _set_up_log(setup: Setup) -> None:
    """Log as the server does, to the same standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLogFormatter() if setup.log_format == "json" else LogFormatter(timed=True))
    logging.basicConfig(level=setup.log_level.upper(), handlers=[handler])
    logging.getLogger("cotenant.access").setLevel(logging.INFO if setup.access_log else logging.NOTSET)


if __name__ == "__main__":
    main()
