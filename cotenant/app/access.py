"""Read tokens, certificates and keys as the settings name them."""

from __future__ import annotations

import ssl
from pathlib import Path

from cotenant.config.settings import AccessSettings
from cotenant.errors import ConfigError
from cotenant.live.access import Access, Role

MIN_TOKEN = 16  # characters: what cannot be guessed


def read_access(settings: AccessSettings) -> Access:
    """Read the tokens of a server. Raises ConfigError, which names the file and the line but no token."""
    return Access({Role(role): read_tokens(path) for role, path in settings.tokens.items()}, control=settings.control)


def read_tokens(path: Path, *, shortest: int = MIN_TOKEN) -> list[str]:
    """Read a file of tokens, one a line; empty lines and those that begin with ``#`` are none. shortest: characters of
    one, 1 where others made it. Raises ConfigError, which names the file and the line but no token."""
    lines = _read(path).decode("utf-8", "replace").splitlines()
    tokens = []
    for number, line in enumerate(lines, 1):
        token = line.strip()
        if not token or token.startswith("#"):
            continue
        if len(token) < shortest or not token.isascii() or not token.isprintable() or " " in token:
            ours = shortest > 1
            characters = f"at least {shortest} ASCII characters" if ours else "ASCII characters"
            example = ", such as `openssl rand -hex 32` prints" if ours else ""
            raise ConfigError(f"{path}: line {number} is not a token: {characters} without spaces{example}")
        tokens.append(token)
    if not tokens:
        raise ConfigError(f"{path}: no token; write one per line")
    return tokens


def http_tls(settings: AccessSettings) -> ssl.SSLContext | None:
    """Return what HTTP is encrypted with; None for a server without TLS. Raises ConfigError."""
    return _tls(settings, "http/1.1")


def _tls(settings: AccessSettings, protocol: str) -> ssl.SSLContext | None:
    if settings.certificate is None or settings.key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    _read(settings.certificate), _read(settings.key)
    try:
        context.load_cert_chain(settings.certificate, settings.key, password="")
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{settings.certificate}: no certificate in PEM, with the key {settings.key} that fits it and has no "
            f"password: {getattr(error, 'reason', None) or error}"
        ) from None
    return context


def grpc_tls(settings: AccessSettings) -> ssl.SSLContext | None:
    """Return what gRPC is encrypted with; None for a server without TLS. Raises ConfigError."""
    return _tls(settings, "h2")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that this user may read") from None
