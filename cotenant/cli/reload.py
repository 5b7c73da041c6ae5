"""Make a running server read its settings again: `cotenant reload`."""

from __future__ import annotations

from cotenant.cli.options import LOCAL, CaFile, Json, ServerAddress, TokenFile
from cotenant.cli.output import aside, show_json


def reload(
    address: ServerAddress = LOCAL, json: Json = False, token_file: TokenFile = None, ca_file: CaFile = None
) -> None:
    """Make a server reload its configuration and roll out the new plan. Waits until that is done."""
    from cotenant.cli.client import endpoint, fetch_status, post
    from cotenant.core.plan import Plan
    from cotenant.render.plan_table import unserved_lines

    server = endpoint(address, token_file, ca_file)
    post(server, "/cotenant/reload", timeout=None)
    status = fetch_status(server)
    if json:
        show_json(status.rollout)
    else:
        kept = [f"{each.name}: {each.reason}" for each in status.models if each.state == "READY" and each.reason]
        lines = [*unserved_lines(Plan.from_json(status.plan)), *kept]
        aside.print("configuration reloaded", *lines, sep="\n", highlight=False, markup=False)
