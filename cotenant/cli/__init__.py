"""The command line: each command is one operation of the library, with progress, `--json`, and errors in words."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys

from cotenant.errors import CotenantError


def main() -> None:
    """The program `cotenant`. Exits with 1 where something cannot be done, having said why; with 130 where it was
    stopped by SIGINT or SIGTERM, leaving no process behind. `serve` exits with 0 on SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers have handlers of their own
    try:
        _run()
    except KeyboardInterrupt:  # at any moment, as while modules are being imported
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # the next ends it without a word, wherever it waits
        sys.exit(130)


def _run() -> None:
    from cotenant.cli.commands import app
    from cotenant.cli.interrupt import Interrupted
    from cotenant.cli.log_format import LogFormatter

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the locale cannot write is a question mark, and no traceback
            stream.reconfigure(errors="replace")
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime tells its makers what it runs, unless it is told
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        app(prog_name="cotenant")
    except CotenantError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except Interrupted:
        sys.exit(130)
    except OSError as error:  # such as a full disk under the output; what is left of that goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        place = error.filename or "standard output"
        sys.stderr.write(f"error: {place}: {error.strerror or error}\n")
        sys.exit(1)
