"""Ask a Prometheus by its HTTP API: instant queries, and no more.

Whatever goes wrong is a PrometheusError. That there is no series is no error: the answer is empty, and what is asked
for is not known. The time of a query is left to the server, whose clock its samples have.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import msgspec

from cotenant.errors import ConfigError, PrometheusError
from cotenant.k8s.scaling.bearer import read_bearer

if TYPE_CHECKING:
    import httpx2

TIMEOUT = 10.0  # seconds for an answer
MAX_ANSWER = 1 << 24  # bytes
UNREACHABLE = 0
INFORMATION = "PromQL info:"  # begins a note on the query among the warnings of servers without the field `infos`


class Sample(msgspec.Struct, frozen=True):
    """The value of one series: finite."""

    labels: dict[str, str]
    value: float


class _Series(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct, rename="camel"):
    result_type: str
    result: msgspec.Raw


class _Answer(msgspec.Struct, rename="camel"):
    status: Literal["success", "error"]
    data: _Data | None = None
    error_type: str = ""
    error: str = ""
    warnings: tuple[str, ...] = ()


class PrometheusClient:
    """Query one Prometheus. place: how messages call it. token_file: holds a token that each request bears; it is read
    each time, for such tokens change. timeout: seconds for an answer."""

    def __init__(
        self, http: httpx2.AsyncClient, place: str, token_file: Path | None = None, timeout: float = TIMEOUT
    ) -> None:
        self._http = http
        self._place = place
        self._token_file = token_file
        self._seconds = timeout

    async def query(self, query: str) -> tuple[Sample, ...]:
        """Return the samples of an instant vector. Series whose value is no finite number are left out: nothing is
        known of them. Raises PrometheusError."""
        headers = {"Accept": "application/json"}
        if self._token_file is not None:
            try:
                headers["Authorization"] = read_bearer(self._token_file)
            except ConfigError as error:
                raise PrometheusError(str(error), UNREACHABLE) from None
        params = {"query": query, "timeout": f"{self._seconds:g}s"}
        try:
            async with asyncio.timeout(self._seconds):  # of all: a head or a body may trickle in without end
                with self._reported():
                    async with self._http.stream("GET", "api/v1/query", params=params, headers=headers) as response:
                        content = await self._content(response)
        except TimeoutError:
            raise PrometheusError(f"{self._place} takes more than {self._seconds:g} s to answer", UNREACHABLE) from None
        return self._samples(query, response.status_code, content)

    async def _content(self, response: httpx2.Response) -> bytes:
        """Read the body of a response, which may not be huge."""
        content = bytearray()
        async for piece in response.aiter_bytes():
            content += piece
            if len(content) > MAX_ANSWER:
                raise PrometheusError(
                    f"{self._place} answers with more than {MAX_ANSWER >> 20} MiB; ask for fewer series, such as sum by"
                    " (model) of them",
                    response.status_code,
                )
        return bytes(content)

    def _samples(self, query: str, status: int, content: bytes) -> tuple[Sample, ...]:
        try:
            answer = msgspec.json.decode(content, type=_Answer)
            if answer.status == "success" and status == 200 and answer.data is not None:
                missing = [each for each in answer.warnings if not each.startswith(INFORMATION)]
                if missing:  # of a store that did not answer: sums are too low
                    raise PrometheusError(f"{self._place} knows {query} only in part: {missing[0]}", status)
                if answer.data.result_type != "vector":
                    raise PrometheusError(
                        f"{query} is a {answer.data.result_type} and no instant vector; leave out the range, or wrap it"
                        " in rate() or vector()",
                        status,
                    )
                return tuple(_finite(msgspec.json.decode(answer.data.result, type=tuple[_Series, ...])))
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            said = content[:200].decode(errors="replace").strip()
            what = f"({status}): {said or 'nothing'}" if status != 200 else f"what is not an answer of its API: {error}"
            raise PrometheusError(f"{self._place} answers {what}", status) from None
        why = f"{answer.error_type}: {answer.error}" if answer.error else "no reason is given"
        raise PrometheusError(f"{self._place} does not answer {query} ({status}): {why}", status)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        import httpx2

        try:
            yield
        except (httpx2.HTTPError, OSError) as error:
            what = str(error) or type(error).__name__
            raise PrometheusError(f"{self._place} does not answer: {what}", UNREACHABLE) from None


@asynccontextmanager
async def prometheus(
    url: str, *, ca_file: Path | None = None, token_file: Path | None = None, timeout: float = TIMEOUT
) -> AsyncIterator[PrometheusClient]:
    """Query, within the block, the Prometheus of a URL; it may have a path, and a user with a password, unless there
    is a token. ca_file: the certificate (PEM) that the server's is signed by. Raises ConfigError; the server is not
    asked yet."""
    try:
        import httpx2
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Prometheus needs the package {error.name}, which is not installed; run `pip install 'cotenant[k8s]'`"
        ) from None
    place = _checked(url)
    if token_file is not None and httpx2.URL(url).userinfo:  # which would be sent in the token's place
        raise ConfigError(f"{place}: authenticates by a user in its URL or by a token; leave out one of the two")
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells of every call
    trust = _trust(ca_file)
    async with httpx2.AsyncClient(base_url=url, verify=trust, timeout=None, follow_redirects=False) as client:
        yield PrometheusClient(client, place, token_file, timeout)


def _checked(url: str) -> str:
    """Return how to call a Prometheus: its URL, without a password. Raises ConfigError."""
    import httpx2

    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        httpx2.URL(url)
    except (ValueError, httpx2.InvalidURL):
        host, port = None, None
    if not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        named = "the URL" if "@" in url else repr(url)  # where its password ends is not known
        raise ConfigError(
            f"{named} is not a Prometheus server; write its URL, such as http://prometheus:9090; percent-encode / # ? @"
            " in a password"
        )
    where = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{where}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}"


def _trust(ca_file: Path | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # also one that is no certificate
        raise ConfigError(f"{ca_file}: cannot be used as a certificate (PEM): {error.strerror or error}") from None


def _finite(series: tuple[_Series, ...]) -> Iterator[Sample]:
    for each in series:
        value = float(each.value[1])
        if math.isfinite(value):
            yield Sample(each.metric, value)
