"""HTTP client of a running server: its status, its models, and inference."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from cotenant.app.access import read_tokens
from cotenant.core.identity import decode_identity
from cotenant.core.model import Model
from cotenant.core.tensor import ModelInfo, Tensor, TensorSpec
from cotenant.errors import ConfigError, FailedError
from cotenant.live.access import is_local
from cotenant.live.load_generator import RequestBody
from cotenant.live.status import Status
from cotenant.worker.repository import Config, Entry, sample_inputs

TIMEOUT = 10.0  # seconds without a byte
LENGTH = "Inference-Header-Content-Length"


class ServerEndpoint(msgspec.Struct, frozen=True):
    """Say where a server is, and what it asks of its callers. token: "" where it asks for none. ca_file: the authority
    that signed its certificate; None: one that the system knows."""

    address: str
    token: str = ""
    ca_file: Path | None = None

    @classmethod
    def of(cls, address: Address) -> ServerEndpoint:
        return cls(address) if isinstance(address, str) else address

    @property
    def encrypted(self) -> bool:
        return self.address.startswith("https://")

    def headers(self) -> dict[str, str]:
        """Return the headers that each request needs. Raises ConfigError for a token that others could read."""
        if not self.token:
            return {}
        if not self.encrypted and not is_local(self.address):
            raise ConfigError(f"{self.address!r}: a token is not sent unencrypted over a network; write https://…")
        return {"Authorization": f"Bearer {self.token}"}

    def tls(self) -> ssl.SSLContext | None:
        """Return what the connection is encrypted with; None for one in the clear. Raises ConfigError."""
        if not self.encrypted:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{self.ca_file}: no certificates in PEM: {error}") from None

    def connection(self, timeout: float | None) -> http.client.HTTPConnection:
        host = self.address.removeprefix("https://").removeprefix("http://").rstrip("/")
        context = self.tls()
        if context is None:
            return http.client.HTTPConnection(host, timeout=timeout)
        return http.client.HTTPSConnection(host, timeout=timeout, context=context)

    def __str__(self) -> str:
        return self.address


Address = str | ServerEndpoint


class HttpResponse(msgspec.Struct, frozen=True):
    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


def endpoint(address: str, token_file: Path | None = None, ca_file: Path | None = None) -> ServerEndpoint:
    """Return the server that a command's options name. Raises ConfigError."""
    if token_file is None:
        return ServerEndpoint(address, "", ca_file)
    tokens = read_tokens(token_file, shortest=1)
    if len(tokens) > 1:
        raise ConfigError(f"{token_file}: a token file of a command has one token, on a line of its own")
    return ServerEndpoint(address, tokens[0], ca_file)


def send(
    address: Address,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    timeout: float | None = TIMEOUT,
) -> HttpResponse:
    """Send one request and return the response, whatever its status. timeout: seconds; None waits without limit.

    Raises ConfigError where no server answers.
    """
    server = ServerEndpoint.of(address)
    try:
        with closing(server.connection(timeout)) as connection:
            connection.request(method, path, body, {**(headers or {}), **server.headers()})
            response = connection.getresponse()
            return HttpResponse(response.status, response.reason, dict(response.headers), response.read())
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"{server.address!r} has a certificate that is not trusted here: {error.verify_message}; name who "
            "signed it with --ca-file"
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ConfigError(
            f"no server answers at {server.address!r}: {getattr(error, 'strerror', None) or error}; start one with "
            f"`cotenant serve`, or name another with --address{'' if server.encrypted else ' (TLS: https://HOST:PORT)'}"
        ) from None


def fetch(address: Address, path: str) -> bytes:
    """Return the body of a GET. Raises ConfigError where nothing answers, or not as a server of this version does."""
    response = send(address, "GET", path)
    if response.status in (401, 403):
        raise FailedError(f"{error_message(response)}; give one with --token-file")
    if response.status != 200:
        raise ConfigError(
            f"{address}{path} answers {response.status} {response.reason}; is it a server of this version?"
        )
    return response.body


def post(address: Address, path: str, body: bytes = b"", timeout: float | None = TIMEOUT) -> bytes:
    """Return the body of a POST. Raises FailedError with the server's own message where it rejects the request."""
    response = send(address, "POST", path, body, {"Content-Type": "application/json"}, timeout)
    if response.status != 200:
        raise FailedError(error_message(response))
    return response.body


def error_message(response: HttpResponse) -> str:
    """Return the message of an error response. A body that is not the JSON of such a server, such as a page of another
    program, is left out."""
    try:
        return str(msgspec.json.decode(response.body, type=dict[str, Any])["error"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        return f"the answer is {response.status} {response.reason}; is --address that of a Cotenant server?"


def fetch_status(address: Address) -> Status:
    try:
        return msgspec.json.decode(fetch(address, "/cotenant/status"), type=Status, dec_hook=decode_identity)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{address} returns something other than a status: {error}") from None


def model_path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}"


def body_of(inputs: Sequence[Tensor]) -> RequestBody:
    """Encode an infer request in the protocol's binary form, which asks for binary outputs."""
    described = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in inputs
    ]
    head = msgspec.json.encode({"inputs": described, "parameters": {"binary_data_output": True}})
    content = b"".join([head, *(tensor.data for tensor in inputs)])
    return RequestBody(content=content, headers={LENGTH: str(len(head))})


def infer(address: Address, model: str, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Send one infer request and return its outputs. Raises FailedError with the server's message on an error."""
    body = body_of(inputs)
    response = send(address, "POST", f"{model_path(model)}/infer", body.content, body.headers)
    if response.status != 200:
        raise FailedError(error_message(response))
    position = int(response.headers[LENGTH])
    outputs = []
    for output in msgspec.json.decode(response.body[:position])["outputs"]:
        end = position + output["parameters"]["binary_data_size"]
        outputs.append(Tensor(output["name"], output["datatype"], tuple(output["shape"]), response.body[position:end]))
        position = end
    return tuple(outputs)


def fetch_model(address: Address, model: str) -> tuple[ModelInfo, dict[str, Any]]:
    """Return a model's metadata and its configuration. Raises FailedError for a model that is not served."""
    path = model_path(model)
    metadata: dict[str, Any] = msgspec.json.decode(_get(address, path))
    config: dict[str, Any] = msgspec.json.decode(_get(address, f"{path}/config"))
    info = ModelInfo(
        name=model,
        version=metadata["versions"][-1],
        platform=metadata["platform"],
        inputs=tuple(TensorSpec(spec["name"], spec["datatype"], tuple(spec["shape"])) for spec in metadata["inputs"]),
        outputs=(),
        max_batch_size=config["max_batch_size"],
    )
    return info, config


def _get(address: Address, path: str) -> bytes:
    response = send(address, "GET", path)
    if response.status != 200:
        raise FailedError(error_message(response))
    return response.body


async def bodies_for(address: Address, models: Iterable[Model], seed: int) -> dict[str, RequestBody]:
    """Return a random request for each model, by name."""
    rng = np.random.default_rng(seed)
    return {model.name: body_of(await asyncio.to_thread(random_inputs, address, model.name, rng)) for model in models}


def random_inputs(address: Address, model: str, rng: np.random.Generator) -> tuple[Tensor, ...]:
    """Return random inputs of one row, in the shapes that the server reports."""
    info, config = fetch_model(address, model)
    warm_up = msgspec.convert({"model_warmup": config.get("model_warmup", [])}, Config)
    entry = Entry(name=model, folder=Path(model), path=Path(model), config=warm_up)
    return sample_inputs(entry, info, 1, rng)
