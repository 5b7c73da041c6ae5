"""Hold the files of the page, which hold no data of the server: all that a browser loads comes from here."""

from __future__ import annotations

from pathlib import Path

from cotenant.errors import NotFoundError

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_FILES = {
    path.name: (path.read_bytes(), _TYPES[path.suffix])
    for path in sorted((Path(__file__).parent / "static").iterdir())
    if path.suffix in _TYPES
}
INDEX = "index.html"
# Nothing from elsewhere, no script or style within the page, no frame around it.
SECURITY = (
    b"Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    b" connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    b"X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nCache-Control: no-cache\r\n"
)


def asset(name: str) -> tuple[bytes, str]:
    """Return a file and its content type. Raises NotFoundError."""
    try:
        return _FILES[name]
    except KeyError:
        raise NotFoundError("Not Found") from None
