from __future__ import annotations

import errno
import io
import os
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console, RenderableType

from cotenant.core.device_groups import group_devices
from cotenant.core.identity import DeviceId
from cotenant.core.model import Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.errors import ConfigError
from cotenant.measure import plan_drawing
from cotenant.measure.plan_drawing import GROUPS, WIDTH, plan_bars, plan_table, profile_table, save_plan, save_profiles

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


def test_the_table_says_where_models_run_what_is_left_and_what_is_unserved() -> None:
    rows = cells(plan_table(PLAN, [Model(name="bert", slo=1.0)]))
    assert ["cpu-0/0", "60 %", "resnet50", "4", "12", "80 ms", "100 ms", "180 ms", "-"] in rows
    assert ["digits", "8", "60", "20 ms", "100 ms", "120 ms", "-"] in rows
    assert ["cpu-0/1", "25 %", "bert", "1", "1", "300 ms", "300 ms", "600 ms", "1 s"] in rows
    assert ["cpu-0", "15 %", "free"] in rows
    assert ["unserved", "ssd", "3"] in rows
    assert "plan by elastic: 1 device, 2.50 per hour, 15 % of a device free, 3 requests/s unserved" in shown(
        plan_table(PLAN)
    )


def test_a_bound_is_said() -> None:
    plan = msgspec.structs.replace(PLAN, planner="geometry", bound=0.75, unserved={})
    assert "plan by geometry: 1 device, 2.50 per hour, proven bound 0.75, 15 % of a device free" in shown(
        plan_table(plan)
    )


def test_bars_are_as_wide_as_shares() -> None:
    bar = shown(plan_bars(PLAN)).rstrip("\n").removeprefix("cpu-0 ")
    assert len(bar) == WIDTH
    assert bar.index("25 % bert") == 43
    assert bar.endswith("·" * 10)


def test_80_columns_are_enough() -> None:
    models = [Model(name="resnet50", slo=1.0), Model(name="digits", slo=0.01)]
    table = plan_table(PLAN, models)
    for what in (table, plan_bars(PLAN)):
        narrow, wide = ([line.rstrip() for line in shown(what, width).splitlines()] for width in (80, 160))
        first = 3 if what is table else 0  # the title may fold
        assert narrow[-len(wide) + first :] == wide[first:]


def fleet(count: int, *, kinds: int = 1) -> Plan:
    """So many devices, every `kinds`-th alike."""

    def device(i: int) -> Device:
        placement = Placement(model=f"m{i % kinds}", batch=4, rate=12.0, duty=0.1, latency=0.1)
        return Device(id=DeviceId("v100", i), partitions=(Partition(share=1000, placements=(placement,)),))

    return Plan(planner="geometry", devices=tuple(device(i) for i in range(count)))


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_bars_fit_into_narrow_terminals(columns: int) -> None:
    console = Console(width=columns, file=io.StringIO())
    with console.capture() as caught:
        console.print(plan_bars(PLAN))
    (bar,) = caught.get().splitlines()
    assert columns - 7 <= len(bar) <= columns and "60 %" in bar


def test_devices_that_are_alike_are_shown_once() -> None:
    plan = fleet(1000, kinds=3)
    rows = cells(plan_table(plan))
    assert ["334 x v100/0", "100 %", "m0", "4", "12", "100 ms", "100 ms", "200 ms", "-"] in rows
    assert "N x: so many devices are alike" in rows[-1][0]
    assert [line[:10] for line in shown(plan_bars(plan)).splitlines()] == ["334 x v100", "333 x v100", "333 x v100"]
    first, *rest = fleet(2).devices
    (placement,) = first.partitions[0].placements
    other = msgspec.structs.replace(placement, rate=13.0)
    differs = msgspec.structs.replace(first, partitions=(Partition(share=1000, placements=(other,)),))
    assert [group.count for group in group_devices(Plan(planner="p", devices=(differs, *rest)))] == [1, 1]


def test_of_very_many_different_devices_the_first_are_shown() -> None:
    plan = fleet(1000, kinds=100)
    assert ["… and 600 more devices"] in cells(plan_table(plan))
    assert shown(plan_bars(plan)).splitlines()[-1] == "… and 600 more devices"
    assert len(shown(plan_bars(plan)).splitlines()) == GROUPS + 1


def test_what_sevenths_leave_over_is_not_called_free() -> None:
    placement = Placement(model="bert", batch=1, rate=1.0, duty=0.3, latency=0.3)
    cuts = tuple(Partition(share=142, placements=(placement,)) for _ in range(7))
    text = shown(plan_table(Plan(planner="p", devices=(Device(id=DeviceId("a100", 0), partitions=cuts),))))
    assert "14.2 %" in text and "free" not in text


def test_a_long_name_loses_its_middle() -> None:
    name = "distilbert-base-uncased-finetuned-sst-2-english"
    text = shown(plan_table(Plan(planner="p", unserved={name: 1.0})))
    assert "distilbert-b…t-2-english" in text


def test_an_empty_plan_is_shown_too() -> None:
    assert "0 devices" in shown(plan_table(Plan(planner="none")))
    shown(plan_bars(Plan(planner="none")))


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
@pytest.mark.parametrize("plan", [PLAN, Plan(planner="none"), fleet(100, kinds=50)])
def test_pictures_are_what_their_suffix_says(tmp_path: Path, suffix: str, start: bytes, plan: Plan) -> None:
    pytest.importorskip("matplotlib")
    save_plan(plan, tmp_path / f"plan{suffix}")
    assert (tmp_path / f"plan{suffix}").read_bytes().startswith(start)


def profile(model: str) -> Profile:
    return Profile(
        model, "cpu", [Point(share=s, batch=b, latency=0.01 * b, memory=1) for s in (200, 400) for b in (1, 4)]
    )


def test_profiles_are_shown_as_they_were_measured(tmp_path: Path) -> None:
    assert ["20 %", "10 ms", "40 ms"] in cells(profile_table(profile("a")))
    pytest.importorskip("matplotlib")
    path = tmp_path / "profiles.svg"
    save_profiles([profile(model) for model in "abcd"], path)
    assert path.read_text().count("<!-- latency, ms -->") == 4
    assert path.read_text().count("<!-- share -->") == 1


def test_a_picture_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"plan\.gif: cannot draw a \.gif; take \.svg, \.png or \.pdf$"):
        save_plan(PLAN, tmp_path / "plan.gif")
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"plan\.svg: cannot be written: "):
        save_plan(PLAN, tmp_path / "file" / "plan.svg")

    monkeypatch.setattr(plan_drawing, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"drawing needs matplotlib; install `cotenant\[plot\]`$"):
        save_plan(PLAN, tmp_path / "plan.svg")


def test_a_picture_that_does_not_fit_on_the_disk_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    path = tmp_path / "plan.png"
    save_plan(PLAN, path)
    before = path.read_bytes()

    def full(self: object, file: Path, **options: object) -> None:
        file.write_bytes(b"half of")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(figure.Figure, "savefig", full)
    with pytest.raises(ConfigError, match=r"plan\.png: cannot be written: No space left on device$"):
        save_plan(PLAN, path)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before
