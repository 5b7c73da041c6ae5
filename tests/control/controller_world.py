"""A controller with a plan, and the time: what its tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cotenant.control.adaptation import (
    Adopted,
    BatchLatency,
    ControllerCommand,
    ControllerEvent,
    Observed,
    Roll,
    RollEnded,
    Solve,
    Solved,
    SolveStep,
)
from cotenant.control.controller import Controller
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.provider import DeviceOffer
from cotenant.control.revision import RolloutOutcome
from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement, Plan

GPU = tuple(DeviceId("gpu", index) for index in range(6))
PERIOD = 0.5


def plan_of(devices: int, rate: float = 100.0, *, price: float | None = None, first: int = 0) -> Plan:
    """A model on so many devices."""
    held = Partition(
        share=1000, placements=(Placement(model="a", batch=8, rate=rate / devices, duty=0.1, latency=0.1),)
    )
    return Plan(
        planner="hand",
        devices=tuple(Device(id=GPU[index], partitions=(held,)) for index in range(first, first + devices)),
        cost_per_hour=None if price is None else price * devices,
    )


class World:
    """A controller with a plan for 100 requests/s, and the time."""

    def __init__(
        self, plan: Plan | None = None, devices: int = 1, offers: Sequence[DeviceOffer] = (), **options: Any
    ) -> None:
        self.controller = Controller(GPU[:devices], {"a": 0.99}, ControllerOptions(**options), offers)
        self.now = 0.0
        self.tell(Adopted(plan=plan or plan_of(devices), rates={"a": 100.0}))

    def tell(self, event: ControllerEvent) -> list[ControllerCommand]:
        commands = self.controller.handle(event, self.now)
        self.controller.invariants()
        return commands

    def observe(
        self,
        rate: float,
        seconds: float,
        *,
        slower: float = 1.0,
        runs: bool = True,
        within: float = 1.0,
        foreign: float | None = None,
        interrupted: tuple[str, ...] = (),
    ) -> list[ControllerCommand]:
        """Observe for that long, or until something is commanded."""
        for _ in range(round(seconds / PERIOD)):
            self.now += PERIOD
            count = round(rate * PERIOD)
            commands = self.tell(
                Observed(
                    seconds=PERIOD,
                    offered={"a": count},
                    stayed={"a": count},
                    within_target={"a": round(count * within)},
                    latencies={"a": BatchLatency(10, 0.1, 0.1 * slower)} if runs else {},
                    foreign_load=foreign,
                    interrupted=interrupted,
                )
            )
            if commands:
                return commands
        return []

    def solve(self, rate: float, seconds: float = 60.0, **seen: Any) -> Solve:
        """Observe until a plan is asked for."""
        (command,) = self.observe(rate, seconds, **seen)
        assert isinstance(command, Solve)
        return command

    def answer(
        self, solve: Solve, plan: Plan | None, step: SolveStep = SolveStep.REPLAN, **more: object
    ) -> list[ControllerCommand]:
        sustained = {name: rate * 1.1 for name, rate in solve.rates.items()}
        solved = Solved(number=solve.number, step=step, plan=plan, rates=solve.rates, sustained=sustained)
        return self.tell(msgspec.structs.replace(solved, **more))

    def rolled(
        self, roll: ControllerCommand, outcome: RolloutOutcome = RolloutOutcome.COMPLETED
    ) -> list[ControllerCommand]:
        assert isinstance(roll, Roll)
        return self.tell(RollEnded(number=roll.number, outcome=outcome, seconds=0.5, reason="because"))
