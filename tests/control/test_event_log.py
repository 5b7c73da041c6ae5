from __future__ import annotations

import pytest

from cotenant.control.adaptation import (
    Adopted,
    BatchLatency,
    ControllerEvent,
    DevicesGone,
    Observed,
    RollEnded,
    Solve,
    Solved,
)
from cotenant.control.controller_built import ControllerBuilt
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.event_log import controller_line, header_line, replay
from cotenant.control.revision import RolloutOutcome
from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.errors import ConfigError
from tests.runtime.test_log import recorded

CPU = DeviceId("cpu")
BUILT = ControllerBuilt(devices=(CPU,), targets={"m": 0.95}, options=ControllerOptions(settle=0.1 + 0.2))


def plan(rate: float) -> Plan:
    placement = Placement(model="m", batch=4, rate=rate, duty=0.1, latency=0.04)
    return Plan(planner="hand", devices=(Device(id=CPU, partitions=(Partition(share=500, placements=(placement,)),)),))


def decided() -> list[bytes]:
    """A rate that rises, a plan for it, its rollout, a device that is lost."""
    controller = BUILT.controller()
    lines = [header_line(BUILT)]
    now, waits = 0.0, list[ControllerEvent]()

    def feed(event: ControllerEvent) -> None:
        commands = controller.handle(event, now)
        lines.append(controller_line(now, event, commands))
        for command in commands:
            if isinstance(command, Solve):
                made = plan(command.rates["m"])
                waits.append(Solved(number=command.number, plan=made, sustained=made.rates(), seconds=1 / 3))
                waits.append(RollEnded(number=command.number, outcome=RolloutOutcome.COMPLETED, seconds=0.1))

    feed(Adopted(plan=plan(10.0), rates={"m": 10.0}))
    for number in range(40):
        now += 0.5 + 1e-3 / 3
        offered = 5 if number < 10 else 25
        latencies = {"m": BatchLatency(offered, 0.04 * offered, 0.041 * offered)}
        feed(Observed(seconds=0.5 + 1e-3 / 3, offered={"m": offered}, stayed={"m": offered}, latencies=latencies))
        if waits:
            feed(waits.pop(0))
    feed(DevicesGone((CPU,), "it fell off the bus"))
    return lines


def test_replay_of_a_controller_gives_the_same_decisions() -> None:
    replayed = replay(decided())
    assert replayed.difference == ""
    assert replayed.solves >= 2 and replayed.rolls >= 1 and replayed.controller_events > 40
    assert replayed.events == 0


def test_replay_takes_the_lines_of_dispatcher_and_controller_in_one_log() -> None:
    controller = decided()
    replayed = replay([*controller[:1], *recorded()[:1], *controller[1:2], *recorded()[1:]])
    assert (replayed.difference, replayed.events, replayed.controller_events) == ("", 5, 1)
    assert replayed.outcomes == {("m", "served"): 1}


def test_replay_of_another_decision_names_the_line_and_shows_both() -> None:
    lines = decided()
    number, line = next((n, line) for n, line in enumerate(lines, 1) if b'"type":"Solve"' in line)
    lines[number - 1] = line.replace(b'"cause":"rate"', b'"cause":"slo"')
    replayed = replay(lines, "x")
    assert replayed.difference.startswith(f"x:{number}: logged [Solve(") and " but now [Solve(" in replayed.difference


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b"{}\n"], r"^x:1: not a line of an event log: Object missing required field `type`$"),
        (decided()[1:], r"^x:1: a controller's event, before the line that says how it was built$"),
        ([*decided()[:3], *decided()[1:2]], r"^x:4: time goes backwards, from 0\.5.* to 0\.0$"),
        ([header_line(BUILT)], r"^x: the log is empty; "),
        ([header_line(BUILT).replace(b"cpu-0", b"cpu")], r"^x:1: not a line of an event log: "),
    ],
)
def test_replay_of_a_cut_or_foreign_log_names_the_line(lines: list[bytes], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(lines, "x")
