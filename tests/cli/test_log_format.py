from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from cotenant.app.log_format import JsonLogFormatter, LogFormatter
from cotenant.cli.output import set_up_log


def record(message: str, **given: object) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "cotenant.live", "levelno": 30, "levelname": "WARNING", "msg": message, **given}
    )
    made.created = 1_700_000_000.0125
    return made


def test_text_log_line_has_a_time_in_utc_and_no_control_characters() -> None:
    line = LogFormatter(timed=True).format(record("the worker died: a\nb\x1b[31m"))
    assert line == "2023-11-14T22:13:20.012Z WARNING: the worker died: a\\nb\\x1b[31m"
    assert LogFormatter().format(record("x")) == "WARNING: x"


def test_json_log_line_holds_fields_and_traceback_on_one_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        given = record("two\nlines", exc_info=sys.exc_info(), fields={"status": 200})
    line = JsonLogFormatter().format(given)
    assert "\n" not in line
    read = json.loads(line)
    assert (read["time"], read["level"], read["logger"]) == ("2023-11-14T22:13:20.012Z", "warning", "cotenant.live")
    assert (read["message"], read["status"]) == ("two\nlines", 200) and "ValueError" in read["traceback"]


@pytest.fixture
def handler() -> Iterator[logging.Handler]:
    logger, handler = logging.getLogger(), logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_access_log_is_written_whatever_the_level_and_only_where_asked_for(handler: logging.Handler) -> None:
    access = logging.getLogger("cotenant.access")
    set_up_log("error", "json", access=True)
    assert access.isEnabledFor(logging.INFO) and not logging.getLogger("cotenant.live").isEnabledFor(logging.WARNING)
    assert isinstance(handler.formatter, JsonLogFormatter)
    set_up_log("error", "text", access=False)
    assert isinstance(handler.formatter, LogFormatter)
    assert not access.isEnabledFor(logging.INFO)
