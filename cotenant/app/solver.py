"""Ask a solver process without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cotenant.control.adaptation import Solve, Solved
from cotenant.planners import Problem
from cotenant.planning.solver_process import SolverProcess


class BackgroundSolver:
    """The solver of a server that adapts: one process, which starts at once.

    planner: returns its name, which a reload may change.
    """

    def __init__(self, planner: Callable[[], str]) -> None:
        self._planner = planner
        self._process = SolverProcess(planner())
        # Not the loop's threads: a process ends with the thread that has started it.
        self._thread = ThreadPoolExecutor(1, "cotenant-solver")
        self._thread.submit(self._process.start)

    async def __call__(self, problem: Problem, solve: Solve) -> Solved:
        self._process.planner = self._planner()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._process, problem, solve)

    async def close(self) -> None:
        self._process.close()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._process.wait)
        self._thread.shutdown()
