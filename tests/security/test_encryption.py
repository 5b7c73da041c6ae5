"""A server with TLS and tokens, asked by the stock clients and by our own commands."""

from __future__ import annotations

import json
import os
import queue
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import trustme
from tritonclient.utils import InferenceServerException

from cotenant.app.access import http_tls
from cotenant.config.settings import AccessSettings
from cotenant.errors import ConfigError
from tests.cli.program import Program
from tests.security.server import Served, served

ROLES = ("infer", "observe", "control")


class Guarded:
    """A server with TLS and a token for each role. folder: with its certificates and tokens."""

    def __init__(self, server: Served, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.ca = str(folder / "ca.pem")

    def token(self, role: str) -> str:
        return (self.folder / f"{role}.token").read_text().splitlines()[-1]

    def headers(self, role: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token(role)}"}

    def run(self, program: Program, *arguments: str, role: str = "", ca: bool = True) -> tuple[int, str]:
        """Run one of our commands, and return its exit code and all that it says."""
        options = [*arguments, "--address", f"https://{self.server.http}"]
        options += ["--token-file", str(self.folder / f"{role}.token")] if role else []
        options += ["--ca-file", self.ca] if ca else []
        ran = program(*options)
        return ran.code, " ".join((ran.out + ran.err).split())


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(capsys, monkeypatch)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    (folder / "certificate.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    for role in ROLES:
        (folder / f"{role}.token").write_text(f"# of {role}\n{os.urandom(16).hex()}\n")
    tokens = "".join(f'{role} = "{role}.token"\n' for role in ROLES)
    tls = 'certificate = "certificate.pem"\nkey = "key.pem"\n'
    with served(folder, f'log_level = "debug"\n[tokens]\n{tokens}[tls]\n{tls}') as server:
        yield Guarded(server, folder)


def clients(guarded: Guarded) -> list[tuple[Any, Any]]:
    http = triton_http.InferenceServerClient(
        guarded.server.http,
        ssl=True,
        ssl_options={"ca_certs": guarded.ca},
    )
    rpc = triton_grpc.InferenceServerClient(guarded.server.grpc, ssl=True, root_certificates=guarded.ca)
    return [(triton_http, http), (triton_grpc, rpc)]


def test_stock_clients_do_what_their_tokens_are_for(guarded: Guarded) -> None:
    values = np.arange(16, dtype=np.float32).reshape(1, 16)
    for module, client in clients(guarded):
        given = module.InferInput("x", values.shape, "FP32")
        given.set_data_from_numpy(values)
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException, match="asks for a token"):
            client.infer("identity", [given])
        result = client.infer("identity", [given], headers=guarded.headers("infer"))
        assert result.as_numpy("y").tolist() == values.tolist()
        assert client.is_model_ready("identity", headers=guarded.headers("infer"))
        with pytest.raises(InferenceServerException, match="the token is for infer; this needs one for control"):
            client.unload_model("strings", headers=guarded.headers("infer"))
        with pytest.raises(InferenceServerException, match="the token is for observe; this needs one for infer"):
            client.infer("identity", [given], headers=guarded.headers("observe"))
        assert client.get_inference_statistics("identity", headers=guarded.headers("observe"))
        client.unload_model("strings", headers=guarded.headers("control"))
        assert not client.is_model_ready("strings", headers=guarded.headers("observe"))
        client.load_model("strings", headers=guarded.headers("control"))
        client.close()


def test_streams_of_grpc_need_a_token(guarded: Guarded) -> None:
    client = triton_grpc.InferenceServerClient(guarded.server.grpc, ssl=True, root_certificates=guarded.ca)
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error))
    given = triton_grpc.InferInput("x", [1, 16], "FP32")
    given.set_data_from_numpy(np.zeros((1, 16), np.float32))
    with suppress(InferenceServerException):  # the stream has ended already
        client.async_stream_infer("identity", [given])
    assert "asks for a token" in str(answers.get(timeout=60))
    client.stop_stream()
    client.close()


@pytest.mark.parametrize(
    ("arguments", "role"),
    [
        (["infer", "identity", "--random"], "infer"),
        (["status"], "observe"),
        (["models", "list"], "infer"),
        (["models", "load", "strings"], "control"),
        (["loadtest", "--rate", "identity=20", "--duration", "0.3", "--json"], "control"),
        (["reload"], "control"),
    ],
)
def test_command_sends_its_token_over_tls(
    arguments: Sequence[str], role: str, guarded: Guarded, program: Program
) -> None:
    code, said = guarded.run(program, *arguments, role=role)
    assert code == 0, said
    assert guarded.token(role) not in said
    if arguments[0] == "loadtest":
        (row,) = json.loads(said)["models"]
        assert row["outcomes"]["served"] > 0 and not row["outcomes"].get("failed")
    code, said = guarded.run(program, *arguments)
    assert code == 1 and "error: this server asks for a token" in said
    assert "Traceback" not in said


def test_command_does_not_trust_another_authority(guarded: Guarded, program: Program) -> None:
    code, said = guarded.run(program, "status", role="observe", ca=False)
    assert code == 1 and "has a certificate that is not trusted here" in said and "--ca-file" in said


def test_command_sends_no_token_over_a_network_in_the_clear(guarded: Guarded, program: Program) -> None:
    arguments = ["status", "--address", "http://192.0.2.1:8000", "--token-file", f"{guarded.folder}/observe.token"]
    ran = program(*arguments)
    assert ran.code == 1 and "a token is not sent unencrypted over a network" in " ".join(ran.err.split())


def test_metrics_need_a_token_too(guarded: Guarded) -> None:
    context = ssl.create_default_context(cafile=guarded.ca)
    url = f"https://{guarded.server.metrics}/metrics"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, context=context)
    asked = urllib.request.Request(url, headers=guarded.headers("observe"))
    with urllib.request.urlopen(asked, context=context) as response:  # noqa: S310
        assert b"nv_inference_request_success" in response.read()


def test_caller_in_the_clear_gets_nothing_and_stops_nothing(guarded: Guarded, program: Program) -> None:
    host, port = guarded.server.http.split(":")
    for data in (b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 100):
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            sock.sendall(data)
            assert b"HTTP" not in sock.recv(100)
    assert guarded.run(program, "status", role="observe")[0] == 0


def test_no_token_is_in_the_log(guarded: Guarded) -> None:
    log = guarded.server.log.read_text()
    assert not any(guarded.token(role) in log for role in ROLES)


def test_key_that_does_not_fit_is_an_error_that_names_the_files(tmp_path: Path) -> None:
    certificates = [trustme.CA().issue_cert("localhost") for _ in range(2)]
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificates[0].cert_chain_pems[0].write_to_path(str(certificate))
    certificates[1].private_key_pem.write_to_path(str(key))
    with pytest.raises(ConfigError, match=f"^{certificate}: no certificate in PEM, with the key {key} that fits it"):
        http_tls(AccessSettings(certificate=certificate, key=key))
    key.write_text("no key")
    with pytest.raises(ConfigError, match="no certificate in PEM"):
        http_tls(AccessSettings(certificate=certificate, key=key))
    with pytest.raises(ConfigError, match="No such file or directory"):
        http_tls(AccessSettings(certificate=certificate, key=tmp_path / "absent"))
