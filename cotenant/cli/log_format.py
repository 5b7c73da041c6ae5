"""The format of the log on standard error."""

from __future__ import annotations

import logging
import re

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """Return text on one line, with control characters spelled out: what a caller or a model says is not for the
    terminal to obey, and cannot look like a line of the log."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class LogFormatter(logging.Formatter):
    """Format a record as one line, and its traceback, if it has one, as one line for each of its own."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return escaped(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802
        return "\n".join(map(escaped, super().formatException(ei).split("\n")))  # type: ignore[arg-type]
