"""Stage 1: inventory of this machine, and tests that need a GPU: `devices.json`, `checks.txt`, `figures.jsonl`."""

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

END = 10.0  # seconds for tests to clean up
LAST = 2.0  # seconds after that
WIDTH = 240  # characters of a line, where pytest truncates reasons of failures
SHOWN = 200  # of a figure
LONG = (" FAILURES ", " ERRORS ", " warnings summary ")  # titles of pytest's sections that go to checks.txt only


def run(session: Session) -> None:
    """Write the inventory and run the tests."""
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
    # Warnings of library versions other than the tested one do not matter here.
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-W", "default", "-rsfE", "--tb=short", "-v"]
    lines: list[str] = []
    with (session.out / "checks.txt").open("w") as file:
        ended = _followed(session, command, variables, lines, file)
    last = lines[-1].strip(" =\n") if lines else "nothing"
    _show_figures(session.out / "figures.jsonl")
    if ended is None:
        session.lacks("tests: out of time")
    elif ended:
        session.lacks(f"tests: some failed or did not run; see checks.txt: {last}")
    session.say(f"tests: {last}, after {time.monotonic() - begun:.0f} s")


def _show_figures(path: Path) -> None:
    """Print the beginning of each figure: only the end of the output may reach the user."""
    for line in path.read_text().splitlines() if path.exists() else ():
        print(line[:SHOWN], flush=True)


def _followed(
    session: Session, command: list[str], variables: dict[str, str], lines: list[str], file: TextIO
) -> int | None:
    """Run the tests; return their exit status, None if they had to be stopped.

    They may hang in a driver, and their children may keep their output open. Lines are written as they come, and
    printed except for pytest's long sections.
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
        tests.send_signal(signal.SIGINT)  # lets them clean up
        with suppress(subprocess.TimeoutExpired):
            tests.wait(END)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(tests.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            tests.wait(LAST)
        reader.join(LAST)
