"""Measure which seeded faults the tests catch: apply one fault at a time to a copy of the tree and run its tests.

    python -m benchmarks.mutants [--only TEXT] [--time-limit 1800] [--seed 0] [--json]

Faults are in `faults.toml`; each replaces one line of one file. If that line no longer exists, the run stops before it
starts: rewrite the fault. Tests first run without any fault, so that a failing test catches nothing. Exits with 1 if a
fault survives. With a time limit, faults run in random order, and the remaining ones are not counted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.toml")
TEST_LIMIT = 180.0  # seconds of one run of tests, as a fault may make one hang
TESTS_FAILED = (1, 2)  # pytest's exit status; 2 if a test file cannot be imported

Result = Literal["caught", "survived", "hung"]


class FaultError(Exception):
    """Report a fault that cannot be applied, or tests that fail without any."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replace `line` of `file`, without indentation, by `new`. tests: those that should catch it."""

    file: str
    line: str
    new: str
    tests: tuple[str, ...] = ()

    def guards(self) -> tuple[str, ...]:
        """Return the tests given, or the test file that mirrors `file`, or the folder that mirrors its folder."""
        if self.tests:
            return self.tests
        path = Path("tests", *Path(self.file).parts[1:])
        mirror = path.with_name(f"test_{path.name}")
        return (str(mirror if (ROOT / mirror).exists() else path.parent),)

    def position(self, text: str) -> int:
        """Return the index of its line in the file. Raises FaultError unless it occurs exactly once."""
        places = [number for number, line in enumerate(text.splitlines()) if line.strip() == self.line]
        if len(places) != 1:
            raise FaultError(f"{self.file}: the line of a fault occurs {len(places)} times: {self.line}")
        return places[0]

    def applied(self, text: str) -> str:
        """Return the text with the fault. Raises FaultError if that is invalid Python."""
        lines = text.splitlines()
        place = self.position(text)
        lines[place] = lines[place].replace(self.line, self.new)
        mutated = "\n".join(lines) + "\n"
        try:
            compile(mutated, self.file, "exec")
        except SyntaxError as error:
            raise FaultError(f"{self.file}: {self.new}: {error}") from None
        return mutated


class Outcome(msgspec.Struct, frozen=True):
    file: str
    number: int  # of the line, from 1
    line: str
    new: str
    tests: tuple[str, ...]
    result: Result
    seconds: float


class Tree:
    """Copy the tracked files of the working tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamp = int(Path(__file__).stat().st_mtime)
        self._sound: set[tuple[str, ...]] = set()
        command = ["git", "ls-files", "-z"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)

    def write(self, file: str, text: str) -> None:
        """Write a file with a unique modification time, so that Python recompiles it."""
        self._stamp += 2
        path = self.folder / file
        path.write_text(text)
        os.utime(path, (self._stamp, self._stamp))

    def check(self, tests: tuple[str, ...]) -> None:
        """Raise FaultError if tests fail without a fault."""
        if tests not in self._sound:
            result, output = self.run(tests)
            if result != "survived":
                raise FaultError(f"{' '.join(tests)} {result} without a fault:\n{output}")
            self._sound.add(tests)

    def run(self, tests: Sequence[str]) -> tuple[Result, str]:
        """Run tests until the first failure. Raises FaultError if there are none."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", *tests]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TEST_LIMIT)
        except subprocess.TimeoutExpired:
            return "hung", ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode not in (0, *TESTS_FAILED):
            raise FaultError(f"{' '.join(tests)}: pytest ended with {process.returncode}:\n{output}")
        return "caught" if process.returncode else "survived", output


def read_faults() -> list[Fault]:
    return msgspec.toml.decode(FAULTS.read_bytes(), type=dict[str, list[Fault]])["faults"]


def run_faults(faults: Sequence[Fault], time_limit: float) -> Iterator[Outcome]:
    """Yield the outcome of each fault that starts within the time limit, in seconds. Raises FaultError."""
    sources = {fault.file: (ROOT / fault.file).read_text() for fault in faults}
    mutated = [fault.applied(sources[fault.file]) for fault in faults]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        for fault, text in zip(faults, mutated, strict=True):
            if time.monotonic() - begun > time_limit:
                return
            tests = fault.guards()
            tree.check(tests)
            since = time.monotonic()
            tree.write(fault.file, text)
            result, _ = tree.run(tests)
            tree.write(fault.file, sources[fault.file])
            yield Outcome(
                fault.file,
                fault.position(sources[fault.file]) + 1,
                fault.line,
                fault.new,
                tests,
                result,
                time.monotonic() - since,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="Only faults in files whose path contains this.")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0, help="Random seed of the order under a time limit.")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    faults = [fault for fault in read_faults() if given.only in fault.file]
    if given.time_limit < float("inf"):
        faults = [faults[n] for n in np.random.default_rng(given.seed).permutation(len(faults))]
    outcomes = []
    try:
        for outcome in run_faults(faults, given.time_limit):
            outcomes.append(outcome)
            if not given.json:
                print(f"{outcome.result:<8} {outcome.file}:{outcome.number}: {outcome.new}", flush=True)
    except FaultError as error:
        sys.exit(str(error))
    survived = [outcome for outcome in outcomes if outcome.result == "survived"]
    if given.json:
        print(msgspec.json.encode(outcomes).decode())
    else:
        caught, left = len(outcomes) - len(survived), len(faults) - len(outcomes)
        print(f"{caught} of {len(outcomes)} faults caught" + (f"; out of time for {left} more" if left else ""))
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    main()
