"""Stage 1: what this machine has, and the tests that need a GPU: `devices.json`, `checks.txt`, `figures.jsonl`."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.gpu.session import Session


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
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **variables}
    ) as tests:
        ended = _ended(session, tests, lines)
    session.write("checks.txt", "".join(lines))
    if not ended:
        session.lacks("tests: the time is up")
    elif tests.returncode:
        session.lacks(f"tests: some failed or did not run; see checks.txt: {lines[-1].strip() if lines else ''}")
    session.say(f"tests: {lines[-1].strip() if lines else 'nothing'}, after {time.monotonic() - begun:.0f} s")


def _ended(session: Session, tests: subprocess.Popen[str], lines: list[str]) -> bool:
    """Follow the tests as they go; False where they had to be stopped."""
    assert tests.stdout is not None
    os.set_blocking(tests.stdout.fileno(), False)
    while tests.poll() is None:
        if session.left < 5:
            tests.terminate()
            return False
        time.sleep(0.1)
        _take(tests, lines)
    _take(tests, lines)
    return True


def _take(tests: subprocess.Popen[str], lines: list[str]) -> None:
    assert tests.stdout is not None
    for line in tests.stdout.readlines():
        lines.append(line)
        print(line, end="", flush=True)
