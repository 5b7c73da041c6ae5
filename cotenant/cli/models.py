"""List, load and unload the models of a running server: `cotenant models`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
import typer
from rich.markup import escape

from cotenant.cli.options import LOCAL, CaFile, Json, ServerAddress, TokenFile
from cotenant.cli.output import aside, console, show_json
from cotenant.errors import NotFoundError
from cotenant.render.table import table

if TYPE_CHECKING:
    from cotenant.cli.client import ServerEndpoint

app = typer.Typer(help="List, load and unload the models of a running server.", no_args_is_help=True)

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model: its folder in the repository.")]


@app.command("list")
def list_models(
    address: ServerAddress = LOCAL, json: Json = False, token_file: TokenFile = None, ca_file: CaFile = None
) -> None:
    """List the models of the repository with their versions and states."""
    from cotenant.cli.client import endpoint

    entries = _index(endpoint(address, token_file, ca_file))
    if json:
        show_json(entries)
        return
    rows = table("models", "model", "version", "state", "reason")
    for entry in entries:
        rows.add_row(*(escape(entry.get(key, "")) for key in ("name", "version", "state", "reason")))
    console.print(rows)


@app.command()
def load(
    model: ModelName,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Configuration (JSON of Triton's ModelConfig) in place of config.pbtxt."),
    ] = None,
    address: ServerAddress = LOCAL,
    json: Json = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Load a model, or load it again from its files. Profiles it first where needed; waits until it is served."""
    from cotenant.cli.client import endpoint
    from cotenant.config.toml import read_text

    parameters = {} if config is None else {"config": read_text(config)}
    server = endpoint(address, token_file, ca_file)
    _control(server, model, "load", parameters)
    _report(server, model, "loaded", json)


@app.command()
def unload(
    model: ModelName,
    address: ServerAddress = LOCAL,
    json: Json = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Unload a model: requests in flight are answered, new ones rejected. Waits until it is done."""
    from cotenant.cli.client import endpoint

    server = endpoint(address, token_file, ca_file)
    names = [entry["name"] for entry in _index(server)]
    if model not in names:  # the protocol, as Triton's, takes any name; a person has mistyped it
        raise NotFoundError(f"no model {model!r} at {server}; it has {', '.join(sorted(names)) or 'none'}")
    _control(server, model, "unload", {})
    _report(server, model, "unloaded", json)


def _index(address: ServerEndpoint) -> list[dict[str, Any]]:
    """Return an entry for each model of the server's repository: name, version, state and reason."""
    from cotenant.cli.client import post

    entries: list[dict[str, Any]] = msgspec.json.decode(post(address, "/v2/repository/index", b"{}"))
    return entries


def _report(address: ServerEndpoint, model: str, done: str, json: bool) -> None:
    """Say that it is done; as JSON, by what the repository index has of the model now."""
    if json:
        show_json(next((entry for entry in _index(address) if entry["name"] == model), {"name": model}))
    else:
        aside.print(f"{done} {model}", highlight=False, markup=False)


def _control(address: ServerEndpoint, model: str, verb: str, parameters: Mapping[str, str]) -> None:
    from cotenant.cli.client import post

    body = msgspec.json.encode({"parameters": parameters})
    post(address, f"/v2/repository/models/{quote(model, safe='')}/{verb}", body, timeout=None)
