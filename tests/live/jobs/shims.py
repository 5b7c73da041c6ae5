"""Run jobs under real shims, and wait for what becomes of them."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import textwrap
from collections.abc import Callable, Coroutine
from pathlib import Path

from cotenant.live.jobs.job_process import JobProcess
from cotenant.worker.jobs.messages import Attempt, Ended, Report
from cotenant.worker.jobs.process_tree import descendants

LIMIT = 60.0  # seconds for anything that happens at once on a machine with nothing else to do


class Watched:
    """A job under a shim, and what was heard of it. program: of Python, run with the folder as its working directory,
    and `say(text)` to write a file there."""

    def __init__(
        self,
        folder: Path,
        program: str = "",
        *,
        argv: tuple[str, ...] = (),
        memory: int | None = None,
        directory: Path | None = None,
        background: bool = False,
        tells_end: bool = False,
    ) -> None:
        self.folder = folder
        self.output = folder / "output.txt"
        self.reports: list[Report] = []
        self.end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        attempt = Attempt(
            argv=argv or (sys.executable, "-c", SAY + textwrap.dedent(program)),
            directory=str(directory or folder),
            output=str(self.output),
            memory=memory,
            background=background,  # where other tests run it might hardly get a processor
            tells_end=tells_end,
        )
        self.process = JobProcess(attempt, os.environ, reported=self.reports.append, ended=self.end.set_result)

    async def ended(self) -> Ended:
        """Wait for the end; check that it is of everything."""
        end = await asyncio.wait_for(self.end, LIMIT)
        assert not descendants(self.process.pid)
        return end

    async def said(self, name: str) -> str:
        """Wait until the job has written a file; return its text."""
        await until((self.folder / name).exists)
        return (self.folder / name).read_text()


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""

    async def look() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), LIMIT)


def in_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


SAY = """
import os, pathlib, signal, subprocess, sys, time
def say(name, text=''):
    pathlib.Path(name + '.new').write_text(str(text))
    os.replace(name + '.new', name)
"""


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def state_of(pid: int) -> str:
    """Return the letter that Linux gives for the state of a process, such as T for one that is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
