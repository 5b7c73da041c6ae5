"""Read the token that a request bears; each time, for tokens of Kubernetes change."""

from __future__ import annotations

from pathlib import Path

from cotenant.errors import ConfigError


def read_bearer(file: Path) -> str:
    """Return the value of the header ``Authorization``, with the first token of a file, as a server reads it: one a
    line; empty lines and those that begin with ``#`` are none. Raises ConfigError for a file without one."""
    try:
        lines = map(str.strip, file.read_text().splitlines())
    except OSError as error:
        raise ConfigError(f"cannot authenticate: {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot authenticate: {file}: is no text") from None
    token = next((line for line in lines if line and not line.startswith("#")), "")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"cannot authenticate: {file}: holds no token, or one with other than ASCII or with a space")
    return f"Bearer {token}"
