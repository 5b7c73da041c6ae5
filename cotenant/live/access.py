"""Decide who may do what: permissions of requests, roles of tokens, and whose word is control.

A server without tokens answers everybody, but is controlled from its own machine alone. With tokens, every request but
those for health needs one. The front ends ask here, with what they know of a caller.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Literal

import msgspec

from cotenant.errors import ForbiddenError, UnauthenticatedError

ControlPolicy = Literal["loopback", "any"]


class Permission(StrEnum):
    """Name what a request needs.

    public: nothing (health). metadata: what whoever asks or watches needs to know of models. infer: answers. observe:
    statistics, status, metrics, settings. share: to register shared memory and have it read and written. control: to
    change what is served.
    """

    PUBLIC = "public"
    METADATA = "metadata"
    INFER = "infer"
    OBSERVE = "observe"
    SHARE = "share"
    CONTROL = "control"


class Role(StrEnum):
    """Name what a token is for."""

    INFER = "infer"
    OBSERVE = "observe"
    CONTROL = "control"


GRANTS: Mapping[Role, frozenset[Permission]] = {
    Role.INFER: frozenset((Permission.METADATA, Permission.INFER, Permission.SHARE)),
    Role.OBSERVE: frozenset((Permission.METADATA, Permission.OBSERVE)),
    Role.CONTROL: frozenset(Permission),
}


# What only programs of the server's own machine may do where there are no tokens.
FOR_THIS_MACHINE = frozenset((Permission.CONTROL, Permission.SHARE))


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Describe who asks.

    peer: the address of the other end, "" where it has none. host, origin: as a browser sets them; host is None where
    the protocol is no browser's. proxied: a proxy says that it asks for somebody else. authorization: HTTP's header.
    """

    peer: str
    host: str | None = None
    origin: str = ""
    proxied: bool = False
    authorization: str = ""


class Access:
    """Hold the tokens of a server, as digests, and its policy for control without any. Tokens are compared in constant
    time, and are in no message."""

    def __init__(
        self, tokens: Mapping[Role, Collection[str]] | None = None, *, control: ControlPolicy = "loopback"
    ) -> None:
        self._digests = [(_digest(token), role) for role, held in (tokens or {}).items() for token in held]
        self.control = control
        self.authenticates = bool(self._digests)

    @property
    def digests(self) -> tuple[tuple[bytes, str], ...]:
        """The digests of the tokens, each with its role: for another process of this server."""
        return tuple((digest, str(role)) for digest, role in self._digests)

    @classmethod
    def from_digests(cls, digests: Iterable[tuple[bytes, str]], *, control: ControlPolicy) -> Access:
        """Return what decides as the `Access` with these digests and this policy does."""
        access = cls(control=control)
        access._digests = [(digest, Role(role)) for digest, role in digests]
        access.authenticates = bool(access._digests)
        return access

    def is_free(self, permission: Permission) -> bool:
        """Return whether anybody has a permission, so that a caller need not be looked at."""
        if permission is Permission.PUBLIC:
            return True
        if permission is Permission.SHARE or self._digests:
            return False
        return permission not in FOR_THIS_MACHINE or self.control == "any"

    def check(self, permission: Permission, caller: Caller) -> None:
        """Raise UnauthenticatedError or ForbiddenError, with the way out, where a caller lacks a permission."""
        if self.is_free(permission):
            return
        if self._digests:
            self._check_token(permission, caller)
        elif permission is not Permission.SHARE:
            _check_is_here(caller, "control it", 'set tokens, or control = "any", to allow it')
        if permission is Permission.SHARE:  # it is this machine's memory, whatever the token
            _check_is_here(caller, "share memory with it", "send the tensors instead")

    def _check_token(self, permission: Permission, caller: Caller) -> None:
        scheme, _, token = caller.authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise UnauthenticatedError("this server asks for a token; send it as `Authorization: Bearer TOKEN`")
        given = _digest(token.strip())
        roles = [role for digest, role in self._digests if hmac.compare_digest(digest, given)]  # always all of them
        if not roles:
            raise UnauthenticatedError("this server does not know the token")
        if not any(permission in GRANTS[role] for role in roles):
            needed = [role for role in Role if permission in GRANTS[role]]
            raise ForbiddenError(f"the token is for {roles[0]}; this needs one for {' or '.join(needed)}")


def _check_is_here(caller: Caller, what: str, way_out: str) -> None:
    """Raise ForbiddenError where a caller is not a program of this machine: it is elsewhere, behind a proxy, or a web
    page, of another site (CSRF) or under a name that leads here (DNS rebinding). what: only those may do."""
    if not _is_loopback(caller.peer) or caller.proxied:
        raise ForbiddenError(f"only callers on the server's own machine {what}; {way_out}")
    if caller.host is not None and not _is_local_name(caller.host):
        raise ForbiddenError(f"the Host is not the server's own machine, such as localhost or 127.0.0.1; {way_out}")
    if caller.origin and (caller.host is None or caller.origin.partition("://")[2] != caller.host):
        raise ForbiddenError(f"a web page of another site asks for it; {way_out}")


def is_local(address: str) -> bool:
    """Return whether an address, with or without a scheme and a port, is one of this machine."""
    return _is_local_name(address.partition("://")[2] or address)


def _is_local_name(host: str) -> bool:
    name, bracket, port = host.rpartition("]")
    if bracket:
        name, port = name.removeprefix("["), port.removeprefix(":")
    else:
        name, _, port = host.partition(":")
    return (not port or port.isdigit()) and (name.lower() == "localhost" or _is_loopback(name))


def _is_loopback(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
