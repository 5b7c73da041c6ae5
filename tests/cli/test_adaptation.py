"""A server in a process of its own follows its load, says so, and remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.program import INTERRUPT, Program, serving, until


def test_server_follows_its_load_and_starts_again_where_it_was(program: Program, folder: Path) -> None:
    def adaptation(address: str) -> Any:
        return json.loads(program("status", "--address", address, "--json").out)["adaptation"]

    with serving(folder, "--event-log", "events.jsonl") as server:
        assert adaptation(server.address)["models"]["identity"]["planned"] == 20
        load = ("loadtest", "--address", server.address, "--duration", "6", "--rate", "identity=200", "--json")
        (report,) = json.loads(program(*load).out)["models"]
        assert report["outcomes"]["failed"] == 0
        until(lambda: adaptation(server.address)["models"]["identity"]["planned"] >= 40)
        assert "identity is offered" in " ".join(it["reason"] for it in adaptation(server.address)["decisions"])
        assert "last decisions" in program("status", "--address", server.address).out
        assert server.end(INTERRUPT).code == 130
    replayed = json.loads(program("replay", "events.jsonl", "--json").out)
    assert replayed["identical"] and replayed["solves"] >= 1
    with serving(folder) as again:
        assert again.works() and adaptation(again.address)["models"]["identity"]["planned"] >= 40
        again.end(INTERRUPT)
    with serving(folder, "--no-adapt") as fixed:
        assert fixed.plan.rate("identity") == 20 and adaptation(fixed.address) is None
        fixed.end(INTERRUPT)
