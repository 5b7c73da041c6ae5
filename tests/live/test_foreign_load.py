from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.live.foreign_load import TICK, ForeignLoad


def tell(proc: Path, *, cores: tuple[float, ...], own: float, child: float, gone: float = 0.0) -> None:
    """Write what Linux tells: seconds that each core was busy, that we used, our child, and one that has ended."""

    def ticks(seconds: float) -> int:
        return round(seconds * TICK)

    lines = [f"cpu{number} {ticks(used)} 0 0 1000 50 0 0 0 0 0" for number, used in enumerate(cores)]
    (proc / "stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *lines, "intr 1"]))
    for pid, used, children in (("self", own, "17 "), ("17", child, "")):
        (proc / pid / "task" / "1").mkdir(parents=True, exist_ok=True)
        fields = ["S", *["0"] * 10, str(ticks(used)), "0", str(ticks(gone if pid == "self" else 0.0)), "0"]
        (proc / pid / "stat").write_text(f"1 (a) name)) {' '.join(fields)}")
        (proc / pid / "task" / "1" / "children").write_text(children)


def test_foreign_load_is_what_neither_we_nor_our_workers_used(tmp_path: Path) -> None:
    meter = ForeignLoad((0, 1), tmp_path)
    tell(tmp_path, cores=(10.0, 20.0, 99.0), own=3.0, child=1.0)
    assert meter.read(0.0) is None
    # Other programs used 1.2 of the 4 seconds that two cores have in two.
    tell(tmp_path, cores=(11.5, 21.5, 500.0), own=3.8, child=2.0)
    assert meter.read(2.0) == pytest.approx(1.2 / 4)
    assert meter.processors == 2


def test_time_of_a_worker_that_has_ended_is_ours(tmp_path: Path) -> None:
    meter = ForeignLoad((0,), tmp_path)
    tell(tmp_path, cores=(10.0,), own=3.0, child=1.0)
    meter.read(0.0)
    tell(tmp_path, cores=(11.0,), own=3.0, child=0.0, gone=2.0)
    assert meter.read(1.0) == pytest.approx(0.0, abs=1e-9)


def test_foreign_load_is_unknown_where_the_system_does_not_tell(tmp_path: Path) -> None:
    meter = ForeignLoad((0,), tmp_path)
    assert meter.read(0.0) is None and meter.read(1.0) is None
    tell(tmp_path, cores=(10.0,), own=3.0, child=1.0)
    assert meter.read(2.0) is None
    assert meter.read(2.0) is None  # no time has passed
    tell(tmp_path, cores=(10.5,), own=3.0, child=1.0)
    assert meter.read(3.0) == pytest.approx(0.5)


def test_foreign_load_of_this_machine_is_a_fraction() -> None:
    meter = ForeignLoad((0,))
    meter.read(0.0)
    load = meter.read(1e9)  # over so long a time it is next to nothing
    assert load is None or 0.0 <= load < 0.01
