"""The HTTP front end: an asyncio protocol on httptools.

Not an ASGI server, for three things that ASGI cannot give: a request costs no task; a caller that leaves is known at
once, and its request is cancelled; and a large body is received straight into memory that workers share, so that no
byte of it is copied in this process.

Imports go one way: `response`, `encoding` and `load_shedding` (what is rejected unread), then `request_cycle` (one
request and its response), `routes` (the URL table), `heads` (requests by their heads), `request_handler` (from a
request to its handler), `connection_table`, `connection` (parsing, flow control, time-outs), `listener`, `server`.
"""

from __future__ import annotations

from cotenant.live.http.server import HttpServer
from cotenant.live.limits import Limits

__all__ = ["HttpServer", "Limits"]
