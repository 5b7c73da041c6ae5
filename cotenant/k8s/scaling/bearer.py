"""Read the token that a request bears; each time, for tokens of Kubernetes change."""

from __future__ import annotations

from pathlib import Path

from cotenant.app.access import read_tokens
from cotenant.errors import ConfigError


def read_bearer(file: Path) -> str:
    """Return the value of the header ``Authorization``, with the first token of a file. Raises ConfigError for a file
    without one."""
    try:
        return f"Bearer {read_tokens(file, shortest=1)[0]}"
    except ConfigError as error:
        raise ConfigError(f"cannot authenticate: {error}") from None
