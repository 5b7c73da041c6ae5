"""Read the token that a request bears; each time, for tokens of Kubernetes change."""

from __future__ import annotations

from pathlib import Path

from cotenant.errors import ConfigError


def read_bearer(file: Path) -> str:
    """Return the value of the header ``Authorization``. Raises ConfigError for a file that holds no token, or more."""
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot authenticate: {file}: {error}") from None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"cannot authenticate: {file}: holds no token, or more than one")
    return f"Bearer {token}"
