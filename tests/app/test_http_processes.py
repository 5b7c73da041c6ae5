"""A server whose HTTP is accepted by two processes: with TLS and tokens, through a kill, and to its end."""

from __future__ import annotations

import json
import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
import trustme

import cotenant
from cotenant.config import read_settings
from cotenant.errors import ConfigError
from tests.cli.program import PATIENCE, alive, until

TOKEN, CONTROL = "a-token-of-sixteen", "another-of-sixteen"
ROW = [0.5] * 16
SETTINGS = """
http_processes = 2
[tokens]
infer = "tokens"
control = "control"
[tls]
certificate = "certificate.pem"
key = "key.pem"
"""


def http_processes() -> set[int]:
    """The processes of this one that accept."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"cotenant.app.http_process" in (path.parent / "cmdline").read_bytes():
                found.add(int(path.parent.name))
    return {pid for pid in found if alive(pid)}


class Caller:
    """One connection, over TLS."""

    def __init__(self, address: str, authority: Path) -> None:
        context = ssl.create_default_context(cafile=str(authority))
        self.connection = HTTPSConnection(address, timeout=PATIENCE, context=context)

    def close(self) -> None:
        self.connection.close()

    def ask(self, method: str, path: str, body: Any = None, token: str = TOKEN) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        answer = self.connection.getresponse()
        return answer.status, answer.read()

    def infers(self) -> bool:
        given = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": ROW}
        status, answer = self.ask("POST", "/v2/models/identity/infer", {"inputs": [given]})
        return status == 200 and json.loads(answer)["outputs"][0]["data"] == ROW


@pytest.fixture
def guarded(folder: Path) -> Iterator[Path]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    (folder / "certificate.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    (folder / "tokens").write_text(f"{TOKEN}\n")
    (folder / "control").write_text(f"{CONTROL}\n")
    path = folder / "serve.toml"
    general, models = path.read_text().replace('"2s"', '"30s"').split("[[models]]", 1)
    path.write_text(f"{general}{SETTINGS}[[models]]{models}")
    yield folder
    until(lambda: not http_processes())


def test_two_processes_serve_one_port_until_the_end(guarded: Path) -> None:
    with cotenant.serve("serve.toml") as server, ExitStack() as stack:

        def caller() -> Caller:
            return stack.enter_context(closing(Caller(server.addresses.http, guarded / "ca.pem")))

        callers = [caller() for _ in range(24)]
        assert all(each.infers() for each in callers)
        assert callers[0].ask("GET", "/v2/models/identity")[0] == 200
        assert callers[0].ask("GET", "/v2/models/identity", token="")[0] == 401
        assert callers[0].ask("POST", "/v2/repository/models/lookup/unload")[0] == 403
        assert callers[0].ask("POST", "/v2/logging", {}, token=CONTROL)[0] == 200

        one, other = http_processes()
        os.kill(one, signal.SIGKILL)
        answered = 0
        for each in callers:
            with suppress(OSError, HTTPException):
                answered += each.infers()
        assert 0 < answered < len(callers)  # those of the other process
        assert all(caller().infers() for _ in range(12))  # those that come meanwhile wait for its successor
        until(lambda: len(http_processes()) == 2)
        assert other in http_processes() and one not in http_processes()
        assert server.status().statistics["identity"].outcomes["served"] == 24 + answered + 12
    assert not http_processes()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ("http_processes = 0", "http_processes: 0 processes; write 1 to 64"),
        ("http_processes = 65", "write 1 to 64"),
        ("http_processes = 2\nallow_client_shm = true", "regions of their own; set http_processes = 1"),
        ('http_processes = 8\nmax_memory = "512MiB"', "none would have room for a body of max_body = '64MiB'"),
    ],
)
def test_settings_that_several_processes_cannot_have_are_refused(tmp_path: Path, settings: str, why: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(settings)
    with pytest.raises(ConfigError) as refused:
        read_settings(path)
    assert why in str(refused.value)
