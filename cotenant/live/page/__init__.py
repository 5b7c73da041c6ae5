"""The web page at ``/``: files that a browser loads once, and a stream of events that keeps it up to date.

`totals` reads what a server has counted, `history` keeps it for ten minutes and says what the last one was like,
`snapshot` describes the server for the browser, `feed` sends that to all that listen, `assets` has the files.
"""

from __future__ import annotations

from cotenant.live.page.feed import PageFeed

__all__ = ["PageFeed"]
