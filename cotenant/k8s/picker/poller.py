"""Follow the admission state of servers: find their addresses, and ask each, over a connection that is kept."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import httptools
import msgspec

from cotenant.core.identity import decode_identity
from cotenant.errors import CotenantError
from cotenant.k8s.picker.picker import EndpointPicker
from cotenant.runtime.admission_state import AdmissionState

logger = logging.getLogger(__name__)

PATH = "/cotenant/admission"
INTERVAL = 0.1  # seconds between two looks at a replica
TIMEOUT = 1.0  # seconds for an answer
RESOLVE_INTERVAL = 1.0  # seconds between two looks for addresses
MAX_STATE = 1 << 26  # bytes

_decoder = msgspec.json.Decoder(AdmissionState, dec_hook=decode_identity)


class PollError(Exception):
    """A replica did not tell its state."""


class ReplicaPoller:
    """Keep a picker informed of all servers behind some names.

    names: ``host:port``; a name that stands for several addresses, such as that of a headless Service, stands for a
    replica at each. headers: of each request. tls: None to ask in the clear. destination_port: that requests are sent
    to; None: the same. interval: seconds between two looks.
    """

    def __init__(
        self,
        picker: EndpointPicker,
        names: Sequence[tuple[str, int]],
        *,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float],
        destination_port: int | None = None,
        interval: float = INTERVAL,
    ) -> None:
        self._picker = picker
        self._names = names
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._tls = tls
        self._clock = clock
        self._destination_port = destination_port
        self._interval = interval
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._places: dict[str, tuple[str, str, int]] = {}
        self._unresolved: set[str] = set()

    async def run(self) -> None:
        """Follow the servers until cancelled."""
        try:
            while True:
                self._follow(await self._resolve())
                await asyncio.sleep(RESOLVE_INTERVAL)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._tasks.clear()

    async def _resolve(self) -> dict[str, tuple[str, str, int]]:
        """Return address → name, host and port, of all replicas."""
        found: dict[str, tuple[str, str, int]] = {}
        for name, port in self._names:
            try:
                infos = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:  # UnicodeError: what cannot be a name
                if name not in self._unresolved:
                    logger.warning("no address of %s: %s", name, error)
                self._unresolved.add(name)
                # What was there is asked on: it may be the name server that is away.
                found |= {address: known for address, known in self._places.items() if known[0] == name}
                continue
            self._unresolved.discard(name)
            for _, _, _, _, where in infos:
                host, destination = str(where[0]), self._destination_port or port
                found[f"[{host}]:{destination}" if ":" in host else f"{host}:{destination}"] = (name, host, port)
        return found

    def _follow(self, found: dict[str, tuple[str, str, int]]) -> None:
        self._places = found
        for address in self._tasks.keys() - found.keys():
            self._tasks.pop(address).cancel()
            self._picker.lose(address)
        for address, (name, host, port) in found.items():
            if address not in self._tasks:
                self._tasks[address] = asyncio.create_task(self._poll(address, name, host, port))

    async def _poll(self, address: str, name: str, host: str, port: int) -> None:
        """Ask one server again and again."""
        request = f"GET {PATH} HTTP/1.1\r\nHost: {name}:{port}\r\n{self._headers}\r\n".encode()
        reachable = True
        while True:
            writer: asyncio.StreamWriter | None = None
            try:
                async with asyncio.timeout(TIMEOUT):
                    server_name = name if self._tls is not None else None
                    reader, writer = await asyncio.open_connection(
                        host, port, ssl=self._tls, server_hostname=server_name
                    )
                while True:
                    asked = self._clock()
                    async with asyncio.timeout(TIMEOUT):
                        writer.write(request)
                        state = await _read_state(reader)
                    self._picker.observe(address, state, asked, self._clock())
                    if not reachable:
                        logger.info("replica %s answers", address)
                    reachable = True
                    await asyncio.sleep(self._interval)
            except (OSError, TimeoutError, PollError, asyncio.IncompleteReadError) as error:
                self._picker.lose(address)
                if reachable:
                    logger.warning("replica %s takes no requests: %s", address, error or type(error).__name__)
                reachable = False
            finally:
                if writer is not None:
                    writer.close()
            await asyncio.sleep(self._interval)


class _Response:
    """Collect a response of HTTP, as httptools parses it."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > MAX_STATE:
            raise PollError(f"its admission state has more than {MAX_STATE} bytes")

    def on_message_complete(self) -> None:
        self.complete = True


async def _read_state(reader: asyncio.StreamReader) -> AdmissionState:
    """Read a response. Raises PollError for one that is no admission state."""
    response = _Response()
    parser = httptools.HttpResponseParser(response)
    try:
        while not response.complete:
            data = await reader.read(1 << 18)
            if not data:
                raise PollError("it closed the connection")
            parser.feed_data(data)
    except httptools.HttpParserError as error:
        raise PollError(f"it answers no HTTP: {error.__context__ or error}") from None
    status = parser.get_status_code()
    if status != 200:
        with suppress(msgspec.DecodeError):
            told = msgspec.json.decode(response.body)
            if isinstance(told, dict) and "error" in told:
                raise PollError(f"GET {PATH} is answered with {status}: {told['error']}")
        raise PollError(f"GET {PATH} is answered with {status}")
    try:
        return _decoder.decode(response.body)
    except (msgspec.DecodeError, CotenantError) as error:
        raise PollError(f"its admission state cannot be read: {error}") from None
