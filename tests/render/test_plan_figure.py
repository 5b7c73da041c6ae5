from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.errors import ConfigError
from cotenant.render import figure
from cotenant.render.plan_figure import save_plan
from tests.render.plans import PLAN, fleet


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
@pytest.mark.parametrize("plan", [PLAN, Plan(planner="none"), fleet(100, kinds=50)])
def test_save_plan_with_a_suffix_writes_that_format(tmp_path: Path, suffix: str, start: bytes, plan: Plan) -> None:
    pytest.importorskip("matplotlib")
    save_plan(plan, tmp_path / f"plan{suffix}")
    assert (tmp_path / f"plan{suffix}").read_bytes().startswith(start)


def test_save_plan_that_cannot_be_drawn_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"plan\.gif: cannot draw a \.gif; use \.svg, \.png or \.pdf$"):
        save_plan(PLAN, tmp_path / "plan.gif")
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"plan\.svg: cannot be written: "):
        save_plan(PLAN, tmp_path / "file" / "plan.svg")

    monkeypatch.setattr(figure, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"drawing needs matplotlib; install `cotenant\[plot\]`$"):
        save_plan(PLAN, tmp_path / "plan.svg")


def test_save_plan_on_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib_figure = pytest.importorskip("matplotlib.figure")
    path = tmp_path / "plan.png"
    save_plan(PLAN, path)
    before = path.read_bytes()

    def full(self: object, file: Path, **options: object) -> None:
        file.write_bytes(b"half of")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(matplotlib_figure.Figure, "savefig", full)
    with pytest.raises(ConfigError, match=r"plan\.png: cannot be written: No space left on device$"):
        save_plan(PLAN, path)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


def test_save_plan_names_every_model_of_every_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pytest.importorskip("matplotlib").rcParams, "svg.fonttype", "none")
    save_plan(PLAN, tmp_path / "plan.svg")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "plan.svg").read_text())
    for model in ("resnet50", "digits", "bert"):
        assert sum(text.startswith(model) for text in texts) == 2  # in its partition, and in the legend
    assert {"80 ms", "20 ms", "300 ms", "one duty cycle: a batch of each model", "free 15 %", "free"} <= set(texts)


def test_save_plan_in_narrow_partitions_shortens_names_and_leaves_out_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pytest.importorskip("matplotlib").rcParams, "svg.fonttype", "none")
    cuts = tuple(
        Partition(
            share=50,
            placements=(Placement(model=f"long-name-{number:02}", batch=1, rate=1.0, duty=0.1, latency=0.1),),
        )
        for number in range(20)
    )
    save_plan(Plan(planner="p", devices=(Device(id=DeviceId("cpu"), partitions=cuts),)), tmp_path / "plan.svg")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "plan.svg").read_text())
    for number in range(20):
        assert any(re.fullmatch(rf"lo?n?g?…-{number:02}", text) for text in texts), number
        assert f"long-name-{number:02}" in texts  # in the legend
