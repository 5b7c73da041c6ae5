"""What does the demo do beside programs that use a processor each all the while, and how soon does it serve?

`python -m benchmarks.demo_beside [--programs 0 1 2] [--runs 2] [--duration 10s] [--model-repository DIR]`

Runs `cotenant demo` and prints what it says of the machine, when it began to serve and had its first answers, and its
report. The programs run before it starts until after it has ended; they are no children of the demo, which counts its
descendants as its own. The first run of all may build and profile the models. With nothing else running, figures
are those of a user; beside other load they mean nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.adaptive import foreign_programs

MOMENTS = {"serving HTTP at": "serves", "real input, real outputs": "first answers", "live, ": "report"}
WIDTH = "120"  # columns


def lines_of(command: list[str]) -> Iterator[tuple[float, str]]:
    """Run a program, and yield the lines of its standard output with the seconds since its start. Raises
    CalledProcessError where it fails."""
    begun = time.monotonic()
    environment = {**os.environ, "COLUMNS": WIDTH, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield time.monotonic() - begun, line.rstrip()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def run_demo(arguments: list[str]) -> None:
    moments: dict[str, float] = {}
    begins = False  # whether the report has begun
    seconds = 0.0
    for seconds, line in lines_of([sys.executable, "-m", "cotenant", "demo", *arguments]):
        for text, what in MOMENTS.items():
            if line.startswith(text):
                moments.setdefault(what, seconds)
        begins = begins or "report" in moments
        if begins or line.startswith(("busy machine:", "cannot be kept:", "asking for", "rates:")):
            print(f"  {line}")
    print(
        "  " + ", ".join(f"{what} after {at:.1f} s" for what, at in moments.items()) + f", ends after {seconds:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the demo beside programs that use a processor each.")
    parser.add_argument("--programs", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--duration", default="10s")
    parser.add_argument("--model-repository", type=Path, default=Path("models"))
    options = parser.parse_args()
    for count in options.programs:
        for run in range(options.runs):
            print(f"beside {count} programs, run {run + 1}", flush=True)
            with foreign_programs(count):
                run_demo(["--duration", options.duration, "--model-repository", str(options.model_repository)])


if __name__ == "__main__":
    main()
