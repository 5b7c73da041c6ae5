"""Write the event log; serving goes on without one that cannot be written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import BinaryIO

logger = logging.getLogger(__name__)


class EventLog:
    """Write lines in the order of events, until one cannot be written. failed: told why, in words."""

    def __init__(self, file: BinaryIO, failed: Callable[[str], None] = lambda why: None) -> None:
        self._file: BinaryIO | None = file
        self._failed = failed

    def write(self, line: bytes) -> None:
        if self._file is None or self._file.closed:  # as when a timer fires once the server has stopped
            return
        try:
            self._file.write(line)
        except OSError as error:
            self._file = None
            logger.error("the event log ends here, and cannot be replayed further: %s", error.strerror)
            self._failed(f"the event log has ended, since it could not be written: {error.strerror}")
