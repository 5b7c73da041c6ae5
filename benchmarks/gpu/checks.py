"""Stage 1: what this machine has, and the tests that need a GPU: `devices.json`, `checks.txt`, `figures.jsonl`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from benchmarks.gpu.session import Session

END = 10.0  # seconds that tests have to end what they started
LAST = 2.0  # and that are left then
WIDTH = 240  # characters of a line: pytest cuts the reasons of failures there
SHOWN = 200  # of a figure
LONG = (" FAILURES ", " ERRORS ", " warnings summary ")  # pytest's titles of what is for checks.txt alone


def run(session: Session) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "cotenant", "devices", "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    if shown.returncode:
        session.lacks(f"devices: {shown.stderr.strip()}")
    else:
        session.write("devices.json", shown.stdout)
    begun = time.monotonic()
    (session.out / "figures.jsonl").unlink(missing_ok=True)
    variables = {
        "COTENANT_CHECK_BACKENDS": " ".join(session.backends),
        "COTENANT_FIGURES": str((session.out / "figures.jsonl").absolute()),
    }
    # Of a library's warnings on another version than the one that is tested with nothing follows here.
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-W", "default", "-rsfE", "--tb=short", "-v"]
    lines: list[str] = []
    with (session.out / "checks.txt").open("w") as file:
        ended = _followed(session, command, variables, lines, file)
    last = lines[-1].strip(" =\n") if lines else "nothing"
    _show_figures(session.out / "figures.jsonl")
    if ended is None:
        session.lacks("tests: the time is up")
    elif ended:
        session.lacks(f"tests: some failed or did not run; see checks.txt: {last}")
    session.say(f"tests: {last}, after {time.monotonic() - begun:.0f} s")


def _show_figures(path: Path) -> None:
    """The beginning of each: only the end of what is printed may reach whoever asked for this."""
    for line in path.read_text().splitlines() if path.exists() else ():
        print(line[:SHOWN], flush=True)


def _followed(
    session: Session, command: list[str], variables: dict[str, str], lines: list[str], file: TextIO
) -> int | None:
    """The status of the tests; None where they had to be stopped. They may hang in a driver, and what they started may
    have their output open.

    Their lines are written down as they come, and shown but for what pytest says of each failure at length.
    """
    tests = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "COLUMNS": str(WIDTH), **variables},
        process_group=0,
    )
    assert tests.stdout is not None
    output = tests.stdout

    def follow() -> None:
        shown = True
        with output:
            for line in output:
                lines.append(line)
                file.write(line)
                file.flush()
                if line.startswith("==="):
                    shown = not any(title in line for title in LONG)
                if shown:
                    print(line, end="", flush=True)

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    try:
        return tests.wait(max(0.0, session.left - END - LAST))
    except subprocess.TimeoutExpired:
        tests.send_signal(signal.SIGINT)  # so that they end what they started
        with suppress(subprocess.TimeoutExpired):
            tests.wait(END)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(tests.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            tests.wait(LAST)
        reader.join(LAST)
