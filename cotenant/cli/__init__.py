"""Run the command line: each command is one operation of the library, with progress, `--json` and clear errors."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys

from cotenant.errors import CotenantError


def main() -> None:
    """Run the program `cotenant`. Exits with 1 after an error, which is printed; with 130 after SIGINT or SIGTERM,
    leaving no process behind. `serve` exits with 0 on SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers have handlers of their own
    try:
        _run()
    except KeyboardInterrupt:  # at any moment, as while modules are being imported
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # the next one ends the process at once
        sys.exit(130)


def _run() -> None:
    from cotenant.app.log_format import LogFormatter
    from cotenant.cli.commands import app
    from cotenant.cli.interrupt import Interrupted

    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # what the locale cannot encode is printed as a question mark, without a traceback
            stream.reconfigure(errors="replace")
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime sends telemetry unless disabled
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
    except OSError as error:  # such as a full disk under the output; buffered output is discarded
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        place = error.filename or "standard output"
        sys.stderr.write(f"error: {place}: {error.strerror or error}\n")
        sys.exit(1)
