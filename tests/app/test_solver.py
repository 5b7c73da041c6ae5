"""The solver of a server that adapts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cotenant.app import lifecycle
from cotenant.app.lifecycle import running
from cotenant.app.solver import BackgroundSolver
from cotenant.backends.cpu import Cpu
from cotenant.control.adaptation import Solve
from tests.app.test_server_state import settings_of


def test_server_that_adapts_plans_by_the_planner_that_a_reload_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solvers: list[BackgroundSolver] = []

    class Known(BackgroundSolver):
        def __init__(self, planner: Callable[[], str]) -> None:
            super().__init__(planner)
            solvers.append(self)

    monkeypatch.setattr(lifecycle, "BackgroundSolver", Known)
    settings = settings_of(tmp_path)

    async def main() -> None:
        async with running(settings, Cpu()) as server:
            await server.reload(msgspec.structs.replace(settings, planner="elastic-plus"))
            now = server.deployment
            devices = tuple(device.id for device in now.plan.devices)
            asked = Solve(number=1, rates={"identity": 400.0, "lookup": 10.0}, current=now.plan, devices=devices)
            solved = await solvers[0](now.problem, asked)
            assert solved.plan is not None, solved.error
            assert now.plan.planner == solved.plan.planner == "elastic-plus"

    asyncio.run(main())
