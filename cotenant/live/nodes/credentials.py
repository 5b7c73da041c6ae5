"""Prove on both ends of a link that the token is known, without sending it.

Each end gives a random number, and gets a code (HMAC-SHA256) over both numbers and who gives it. So whoever listens
learns neither the token nor anything that works a second time. The contents of a connection are secret with TLS alone.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Sequence
from typing import Literal

from cotenant.errors import ConfigError

NONCE = 32  # bytes

End = Literal["front end", "node"]


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE)


def prove(token: str, end: End, front_end: bytes, node: bytes) -> bytes:
    """Return the code of one end. front_end, node: the random numbers that they gave."""
    return hmac.digest(token.encode(), b"cotenant %s\0%s\0%s" % (end.encode(), front_end, node), "sha256")


def known_token(tokens: Sequence[str], code: bytes, end: End, front_end: bytes, node: bytes) -> str | None:
    """Return the token that a code proves; None where it proves none. All are compared, in constant time."""
    known = None
    for token in tokens:
        if hmac.compare_digest(prove(token, end, front_end, node), code):
            known = token
    return known


def split_address(address: str, place: str = "address") -> tuple[str, int]:
    """Return host and port of ``10.0.0.2:8010`` or ``[::1]:8010``. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) <= 65535:
        raise ConfigError(f"{place}: {address!r} is not an address of a node; write HOST:PORT, such as 10.0.0.2:8010")
    return host, int(port)


def check_guarded(host: str, place: str, *, guarded: bool) -> None:
    """Raise ConfigError for an address beyond this machine without a token or certificates. guarded: there are."""
    if not guarded and not is_loopback(host):
        raise ConfigError(
            f"{place}: {host} can be reached from other machines, and whoever reaches a node runs programs on it; set"
            " cluster.token, or certificates of both ends (cluster.certificate, key and authority)"
        )


def is_loopback(host: str) -> bool:
    """Return whether an address is one of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
