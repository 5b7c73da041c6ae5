"""The HTTP front end: an asyncio protocol of our own on httptools.

Not an ASGI server, for three things that ASGI cannot give: a request costs no task; a caller that leaves is known at
once, and its request is cancelled; and a large body is received straight into memory that workers share, so that no
byte of it is copied in this process.

A `Connection` makes an `Exchange` of each request and writes their answers in order; the `HttpServer` finds out in
`addresses` what a request asks for.
"""

from __future__ import annotations

from cotenant.live.http.server import HttpServer, Limits

__all__ = ["HttpServer", "Limits"]
