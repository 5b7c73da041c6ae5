"""Make a running server read its settings again: `cotenant reload`."""

from __future__ import annotations

from cotenant.cli.options import LOCAL, CaFile, Json, ServerAddress, TokenFile
from cotenant.cli.output import aside, show_json


def reload(
    address: ServerAddress = LOCAL, json: Json = False, token_file: TokenFile = None, ca_file: CaFile = None
) -> None:
    """Make a server reload its configuration and roll out the new plan. Waits until that is done."""
    from cotenant.cli.client import endpoint, fetch_status, post

    server = endpoint(address, token_file, ca_file)
    post(server, "/cotenant/reload", timeout=None)
    if json:
        show_json(fetch_status(server).rollout)
    else:
        aside.print("configuration reloaded", highlight=False)
