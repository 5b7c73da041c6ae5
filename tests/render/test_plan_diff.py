from __future__ import annotations

import io
import re

from rich.console import Console

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.plan_diff import diff_plans
from cotenant.render.plan_diff import MAX_ROWS, plan_diff_table, summary


def device(number: int, *cuts: tuple[int, str], rate: float = 10.0, batch: int = 4) -> Device:
    return Device(
        id=DeviceId("k", number),
        partitions=tuple(
            Partition(
                share=share,
                placements=tuple(
                    Placement(model=model, batch=batch, rate=rate, duty=0.1, latency=0.1) for model in models.split()
                ),
            )
            for share, models in cuts
        ),
    )


def plan(*devices: Device) -> Plan:
    return Plan(planner="p", devices=devices)


def shown(before: Plan, after: Plan) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=120)
    console.print(plan_diff_table(diff_plans(before, after)))
    assert isinstance(console.file, io.StringIO)
    return [re.split(" {2,}", line.strip()) for line in console.file.getvalue().splitlines()]


def test_plan_diff_table_names_each_change() -> None:
    before = plan(device(0, (500, "a b"), (200, "c"), (100, "d")), device(1, (400, "e"), (400, "f")))
    after = plan(
        device(0, (600, "a b"), (200, "c g")),
        device(2, (100, "d"), (300, "h")),
        device(1, (400, "e"), rate=12.0),
    )
    rows = shown(before, after)
    assert ["resized", "k-0", "50 % a, b", "60 % a, b"] in rows
    assert ["other models", "k-0", "20 % c", "20 % c, g"] in rows
    assert ["moved", "k-0 to k-2", "10 % d", "10 % d"] in rows
    assert ["tuned", "k-1", "40 % e batch 4 10/s", "40 % e batch 4 12/s"] in rows
    assert ["started", "k-2", "-", "30 % h"] in rows
    assert ["stopped", "k-1", "40 % f", "-"] in rows
    assert rows[-2] == [
        "1 worker kept (1 with another rate or a smaller batch), 4 to start, 4 to stop; 1 device added: k-2"
    ]
    assert rows[-1] == ["rates: e 10 to 12/s, f 10 to 0/s, g 0 to 10/s, h 0 to 10/s"]


def test_plan_diff_table_with_equal_changes_shows_one_row() -> None:
    fleet = plan(*(device(i, (1000, "a"), rate=20000.0) for i in range(100)))
    rows = shown(plan(), fleet)
    assert ["started", "k-0 and 99 more", "-", "100 % a"] in rows
    assert rows[-2] == ["0 workers kept, 100 to start, 0 to stop; 100 devices added: k-0, k-1, k-2 and 97 more"]
    assert rows[-1] == ["rates: a 0 to 2000000/s"]


def test_plan_diff_table_with_very_many_changes_is_cut_short() -> None:
    many = plan(*(device(i, (1000, f"m{i}")) for i in range(MAX_ROWS + 5)))
    assert ["… and 5 more changes; --json has them all"] in shown(plan(), many)


def test_plan_diff_of_equal_plans_says_no_change() -> None:
    same = plan(device(0, (500, "a")))
    assert summary(diff_plans(same, same)) == "no change: the new plan equals the plan in force"
    assert shown(same, same) == [["no change: the new plan equals the plan in force"]]
