from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from cotenant.core.profile import Point, Profile
from cotenant.live.foreign_load import available_cores
from cotenant.profiling import machine_load
from cotenant.profiling.machine_load import (
    FOREIGN,
    MachineLoad,
    describe_load,
    foreign_load,
    is_busy,
    measure_load,
    slowdowns_under,
)


def profiled(model: str, *percent: float) -> Profile:
    """A profile whose points were measured while others used so much."""
    points = [
        Point(share=1000, batch=batch, latency=0.01, memory=0, features={FOREIGN: each})
        for batch, each in enumerate(percent, 1)
    ]
    return Profile(model, "cpu", points or [Point(share=1000, batch=1, latency=0.01, memory=0)])


# Of another parent, since what a child of this process uses is its own; it ends by itself, whatever happens here,
# and closes its output, for whose end its starter waits.
BURN = """
import os, time
if os.fork():
    os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
os.close(1)
end = time.monotonic() + 20
while time.monotonic() < end:
    pass
os._exit(0)
"""


@contextmanager
def burning(programs: int) -> Iterator[None]:
    """Run programs of others, each of which uses a processor all the while."""
    with ExitStack() as stack:
        for _ in range(programs):
            started = subprocess.run([sys.executable, "-c", BURN], stdout=subprocess.PIPE, check=True, text=True)
            stack.callback(os.kill, int(started.stdout), signal.SIGKILL)
        yield


def test_load_of_another_program_is_measured_with_what_it_costs() -> None:
    cores = len(available_cores())
    with burning(2 * cores):
        load = measure_load(0.2)
    assert load is not None and load.busy and load.processors == cores
    assert load.used > 0.5 * cores
    assert load.slowdown > 1.3


def test_quiet_machine_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "BUSY", 2.0)
    monkeypatch.setattr(machine_load, "_slowdown", lambda cores, seconds: pytest.fail("probed"))
    load = measure_load(0.05)
    assert load is not None and not load.busy and load.slowdown == 1.0


def test_load_is_unknown_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.live.foreign_load.ForeignLoad.read", lambda self, now: None)
    assert measure_load(0.01) is None


def test_foreign_load_of_a_profile_is_the_mean_of_its_points() -> None:
    assert foreign_load(profiled("a", 10.0, 50.0)) == pytest.approx(0.3)
    assert is_busy(profiled("a", 10.0, 50.0)) and not is_busy(profiled("a", 1.0, 5.0))
    assert foreign_load(profiled("a")) == 0.0


def test_slowdowns_count_what_slowed_the_profile_once() -> None:
    load = MachineLoad(used=1.0, processors=2, slowdown=1.5)
    profiles = {("quiet", "cpu"): profiled("quiet", 0.0), ("busy", "cpu"): profiled("busy", 50.0)}
    assert slowdowns_under(load, profiles) == {"quiet": 1.5}
    assert slowdowns_under(None, profiles) == {}


def test_load_is_described_with_its_cost() -> None:
    load = MachineLoad(used=0.94, processors=2, slowdown=1.5)
    assert describe_load(load, {"a": 1.2, "b": 1.5}) == (
        "other programs use 0.9 of 2 processors; batches take 1.5 x as profiled"
    )
    assert describe_load(load, {}) == "other programs use 0.9 of 2 processors, as when the models were profiled"
    light = MachineLoad(used=0.3, processors=2)
    assert describe_load(light, {}) == "other programs use 0.3 of 2 processors"
