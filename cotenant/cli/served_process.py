"""Run `cotenant serve` for a command that measures it: in a process of its own, as in production."""

from __future__ import annotations

import asyncio
import json as jsonlib
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cotenant.core.plan import Plan
from cotenant.errors import ConfigError

STOP_TIMEOUT = 10.0  # seconds
ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


@asynccontextmanager
async def served_process(flags: Sequence[str], *, adapt: bool = False) -> AsyncIterator[tuple[Plan, str, Path]]:
    """Run `cotenant serve` in its own process; yield its plan, its HTTP address and its event log. It knows nothing of
    earlier runs, and leaves nothing behind."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "events.jsonl")
        learning = ("--adapt", "--state", str(Path(folder, "state.sqlite"))) if adapt else ("--no-adapt",)
        async with _process([*flags, *learning, "--event-log", str(log)]) as up:
            yield Plan.from_json(jsonlib.dumps(up["plan"])), up["addresses"]["http"], log


@asynccontextmanager
async def _process(flags: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
    """Run `cotenant serve` and yield what it prints once it is up."""
    command = [sys.executable, "-m", "cotenant", "serve", *flags, *ANY_PORTS, "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, limit=1 << 26)
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise ConfigError(f"the server did not start; see why with `cotenant serve {' '.join(flags)}`")
        yield jsonlib.loads(line)
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT)
        except TimeoutError:
            process.kill()


def complete_lines(log: Path, start: int) -> list[bytes]:
    """Return the complete lines since the log had `start` bytes: the server is still writing."""
    with log.open("rb") as file:
        file.seek(max(start - 1, 0))
        lines = file.read().split(b"\n")
    return lines[min(start, 1) : -1]
