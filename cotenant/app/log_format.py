"""The format of the log on standard error."""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime

import msgspec

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """Return text on one line, with control characters spelled out: what a caller or a model says is not for the
    terminal to obey, and cannot look like a line of the log."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class LogFormatter(logging.Formatter):
    """Format a record as one line, and its traceback, if it has one, as one line for each of its own. timed: each line
    begins with its time, in UTC."""

    def __init__(self, *, timed: bool = False) -> None:
        super().__init__("%(asctime)s %(levelname)s: %(message)s" if timed else "%(levelname)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return timestamp(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return escaped(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802
        return "\n".join(map(escaped, super().formatException(ei).split("\n")))  # type: ignore[arg-type]


class JsonLogFormatter(logging.Formatter):
    """Format a record as one line of JSON: time, level, logger, message, what its `fields` are, and its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def timestamp(time: float) -> str:
    """Return a time, in seconds since 1970, as ISO 8601 has it: in UTC, with milliseconds."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
