"""Plans to draw, and what a terminal shows of them."""

from __future__ import annotations

import io
import re

from rich.console import Console, RenderableType

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement, Plan

PLAN = Plan(
    planner="elastic",
    devices=(
        Device(
            id=DeviceId("cpu", 0),
            partitions=(
                Partition(
                    share=600,
                    placements=(
                        Placement(model="resnet50", batch=4, rate=12.0, duty=0.1, latency=0.08),
                        Placement(model="digits", batch=8, rate=60.0, duty=0.1, latency=0.02),
                    ),
                ),
                Partition(share=250, placements=(Placement(model="bert", batch=1, rate=1.0, duty=0.3, latency=0.3),)),
            ),
        ),
    ),
    unserved={"ssd": 3.0},
    cost_per_hour=2.5,
)


def shown(what: RenderableType, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(what: RenderableType) -> list[list[str]]:
    """Of each line, those that are empty at its beginning left out."""
    return [re.split(" {2,}", line.strip()) for line in shown(what).splitlines()]


def fleet(count: int, *, kinds: int = 1) -> Plan:
    """So many devices, every `kinds`-th alike."""

    def device(i: int) -> Device:
        placement = Placement(model=f"m{i % kinds}", batch=4, rate=12.0, duty=0.1, latency=0.1)
        return Device(id=DeviceId("v100", i), partitions=(Partition(share=1000, placements=(placement,)),))

    return Plan(planner="geometry", devices=tuple(device(i) for i in range(count)))
