from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from cotenant.core.device_groups import group_devices
from cotenant.core.identity import DeviceId
from cotenant.core.model import Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.provenance import Proof, Provenance
from cotenant.render.plan_layout import MAX_GROUPS
from cotenant.render.plan_table import WIDTH, plan_bars, plan_table
from tests.render.plans import PLAN, cells, fleet, shown


def test_plan_table_of_a_plan_lists_placements_free_and_unserved() -> None:
    rows = cells(plan_table(PLAN, [Model(name="bert", slo=1.0)]))
    assert ["cpu-0/0", "60 %", "resnet50", "4", "12", "80 ms", "100 ms", "180 ms", "-"] in rows
    assert ["digits", "8", "60", "20 ms", "100 ms", "120 ms", "-"] in rows
    assert ["cpu-0/1", "25 %", "bert", "1", "1", "300 ms", "300 ms", "600 ms", "1 s"] in rows
    assert ["cpu-0", "15 %", "free"] in rows
    assert rows[-1] == ["unserved, requests/s: ssd 3"]
    assert "plan by elastic: 1 device, 2.50 per hour, 15 % of a device free, 3 requests/s unserved" in shown(
        plan_table(PLAN)
    )


def test_plan_table_with_a_bound_shows_it() -> None:
    plan = msgspec.structs.replace(PLAN, planner="geometry", bound=0.75, unserved={})
    assert "plan by geometry: 1 device, 2.50 per hour, proven bound 0.75, 15 % of a device free" in shown(
        plan_table(plan)
    )


@pytest.mark.parametrize(
    ("proven", "unserved", "bound", "words"),
    [
        ("optimal", {}, 2.5, "2.50 per hour, proven optimal for evenly spaced requests, 15 % of a device free"),
        ("infeasible", {"ssd": 3.0}, 2.75, "3 requests/s unserved, proven: no plan serves all"),
        (None, {"ssd": 3.0}, 2.0, "3 requests/s unserved, a plan that serves all was not found in the time"),
    ],
)
def test_plan_table_says_what_is_proven(
    proven: Proof | None, unserved: dict[str, float], bound: float, words: str
) -> None:
    provenance = Provenance(source="geometry", proven=proven)
    plan = msgspec.structs.replace(PLAN, bound=bound, unserved=unserved, provenance=provenance)
    assert words in " ".join(shown(plan_table(plan)).split())


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (1.5, "1 device, 15 % of a device free, 3 requests/s unserved, serving all takes 2 devices or more"),
        (1.0, "proven bound 1, 15 % of a device free, 3 requests/s unserved, a plan that serves all was not found in"),
    ],
)
def test_plan_that_leaves_requests_unserved_says_how_many_devices_would_serve_all(bound: float, words: str) -> None:
    plan = msgspec.structs.replace(
        PLAN, cost_per_hour=None, bound=bound, unserved={"ssd": 3.0}, provenance=Provenance(source="geometry")
    )
    assert words in " ".join(shown(plan_table(plan)).split())


def test_plan_bars_of_a_device_are_as_wide_as_shares() -> None:
    bar = shown(plan_bars(PLAN)).rstrip("\n").removeprefix("cpu-0 ")
    assert len(bar) == WIDTH
    assert bar.index("25 % bert") == 43
    assert bar.endswith("·" * 10)


def test_plan_table_in_80_columns_is_complete() -> None:
    models = [Model(name="resnet50", slo=1.0), Model(name="digits", slo=0.01)]
    table = plan_table(PLAN, models)
    for what in (table, plan_bars(PLAN)):
        narrow, wide = ([line.rstrip() for line in shown(what, width).splitlines()] for width in (80, 160))
        first = 3 if what is table else 0  # the title may fold
        assert narrow[-len(wide) + first :] == wide[first:]


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_plan_bars_in_a_narrow_terminal_fit(columns: int) -> None:
    console = Console(width=columns, file=io.StringIO())
    with console.capture() as caught:
        console.print(plan_bars(PLAN))
    (bar,) = caught.get().splitlines()
    assert columns - 7 <= len(bar) <= columns and "60 %" in bar


def test_plan_table_with_equal_devices_shows_one() -> None:
    plan = fleet(1000, kinds=3)
    rows = cells(plan_table(plan))
    assert ["334 x v100/0", "100 %", "m0", "4", "12", "100 ms", "100 ms", "200 ms", "-"] in rows
    assert "N x: that many equal devices" in rows[-1][0]
    assert [line[:10] for line in shown(plan_bars(plan)).splitlines()] == ["334 x v100", "333 x v100", "333 x v100"]
    first, *rest = fleet(2).devices
    (placement,) = first.partitions[0].placements
    other = msgspec.structs.replace(placement, rate=13.0)
    differs = msgspec.structs.replace(first, partitions=(Partition(share=1000, placements=(other,)),))
    assert [group.count for group in group_devices(Plan(planner="p", devices=(differs, *rest)))] == [1, 1]


def test_plan_table_with_very_many_devices_shows_the_first() -> None:
    plan = fleet(1000, kinds=100)
    assert ["… and 600 more devices"] in cells(plan_table(plan))
    assert shown(plan_bars(plan)).splitlines()[-1] == "… and 600 more devices"
    assert len(shown(plan_bars(plan)).splitlines()) == MAX_GROUPS + 1


def test_plan_table_with_sevenths_shows_no_free_share() -> None:
    placement = Placement(model="bert", batch=1, rate=1.0, duty=0.3, latency=0.3)
    cuts = tuple(Partition(share=142, placements=(placement,)) for _ in range(7))
    text = shown(plan_table(Plan(planner="p", devices=(Device(id=DeviceId("a100", 0), partitions=cuts),))))
    assert "14.29 %" in text and "free" not in text


def test_plan_table_with_a_long_name_shortens_its_middle() -> None:
    name = "distilbert-base-uncased-finetuned-sst-2-english"
    placement = Placement(model=name, batch=1, rate=1.0, duty=0.3, latency=0.3)
    device = Device(id=DeviceId("cpu"), partitions=(Partition(share=1000, placements=(placement,)),))
    assert "distilbert-b…t-2-english" in shown(plan_table(Plan(planner="p", devices=(device,))))


def test_plan_table_in_80_columns_names_what_is_unserved_in_full() -> None:
    """As the demo shows it beside other programs: in the table its name was broken."""
    placement = Placement(model="ssd_mobilenet", batch=16, rate=0.0978, duty=0.1036, latency=1.031)
    device = Device(id=DeviceId("cpu"), partitions=(Partition(share=1000, placements=(placement,)),))
    plan = Plan(planner="geometry", devices=(device,), unserved={"mobilenet_v2_quantised": 0.0978})
    lines = shown(plan_table(plan, [Model(name="ssd_mobilenet", slo=1.2)]), 80).splitlines()
    assert "cpu-0/0    100 %  ssd_mobilenet     16  0.0978   1.03 s  104 ms  1.13 s   1.2 s" in lines
    assert lines[-1] == "unserved, requests/s: mobilenet_v2_quantised 0.0978"


def test_plan_table_of_an_empty_plan_is_shown() -> None:
    assert "0 devices" in shown(plan_table(Plan(planner="none")))
    shown(plan_bars(Plan(planner="none")))


def test_plan_bars_with_20_partitions_show_letters_and_what_they_stand_for() -> None:
    cuts = tuple(
        Partition(
            share=50,
            placements=tuple(
                Placement(model=f"model-{(number + k) % 20:02}", batch=1, rate=1.0, duty=0.1, latency=0.1)
                for k in range(2)
            ),
        )
        for number in range(20)
    )
    bar, *key = shown(
        plan_bars(Plan(planner="p", devices=(Device(id=DeviceId("cpu"), partitions=cuts),))), 80
    ).splitlines()
    assert bar.split()[1:] == [f"{chr(97 + number)}{chr(97 + (number + 1) % 20)}" for number in range(20)]
    assert "  ".join(key).split("  ") == [f"{chr(97 + number)} model-{number:02}" for number in range(20)]
    assert max(map(len, [bar, *key])) <= 80
