"""Make a running server read its settings again: `cotenant reload`."""

from __future__ import annotations

from cotenant.cli.options import LOCAL, CaFile, ServerAddress, TokenFile
from cotenant.cli.output import aside


def reload(address: ServerAddress = LOCAL, token_file: TokenFile = None, ca_file: CaFile = None) -> None:
    """Make a server reload its configuration and roll out the new plan. Waits until that is done."""
    from cotenant.cli.client import endpoint, post

    post(endpoint(address, token_file, ca_file), "/cotenant/reload", timeout=None)
    aside.print("configuration reloaded", highlight=False)
