"""Make a running server read its settings again: `cotenant reload`."""

from __future__ import annotations

from cotenant.cli.options import LOCAL, ServerAddress
from cotenant.cli.output import aside


def reload(address: ServerAddress = LOCAL) -> None:
    """Make a server read its settings again, and roll out the new plan. Waits until that is done."""
    from cotenant.cli.client import post

    post(address, "/cotenant/reload", timeout=None)
    aside.print("configuration reloaded", highlight=False)
