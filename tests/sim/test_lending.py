"""Idle share of processors that is lent, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.errors import ConfigError
from cotenant.measure.report import ModelReport, Report
from cotenant.planners import Problem
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Command, Died, Event, Finished, Run
from cotenant.runtime.lane_assignment import LaneMatcher
from cotenant.runtime.lane_specs import lane_specs
from cotenant.sim.lending import LentProcessors
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from cotenant.workload.failures import Failure
from cotenant.workload.sources import ClosedLoop, Offline, Uniform

CPU = 0.02  # processor seconds of a batch of one row
PROCESSORS = 2.0


def profile(name: str, cpu: float = CPU) -> Profile:
    """One thread up to half of two processors, and no faster with two."""
    points = [
        Point(
            share=share,
            batch=rows,
            latency=rows * max(cpu / (PROCESSORS * share / 1000), cpu),
            memory=0,
            features={"cpu_ms": 1e3 * cpu * rows},
        )
        for share in (50, 250, 500, 1000)
        for rows in (1, 4)
    ]
    return Profile(name, "cpu", points)


def problem(names: str, cpu: float = CPU) -> Problem:
    return Problem(
        models=tuple(Model(name=name, slo=10.0) for name in names),
        rates=dict.fromkeys(names, 1.0),
        fleet=(Kind(name="cpu", count=1, cuts=tuple(range(50, 1001, 50)), processors=PROCESSORS),),
        profiles={(name, "cpu"): profile(name, cpu) for name in names},
    )


def plan(**shares: int) -> Plan:
    """A partition for each model."""
    return Plan(
        planner="hand",
        devices=(
            Device(
                id=DeviceId("cpu", 0),
                partitions=tuple(
                    Partition(
                        share=share,
                        placements=(
                            Placement(model=name, batch=1, rate=1.0, duty=0.0, latency=profile(name).latency(1, share)),
                        ),
                    )
                    for name, share in shares.items()
                ),
            ),
        ),
    )


def row(report: Report, name: str) -> ModelReport:
    return next(row for row in report.models if row.model == name)


def median(report: Report, name: str) -> float:
    value = row(report, name).p50
    assert value is not None
    return value


def test_batch_on_an_idle_machine_takes_what_it_computes() -> None:
    asked = Workload({"a": Uniform(1.0)})
    held = simulate(plan(a=100), problem("a"), asked, seconds=20)
    lent = simulate(plan(a=100), problem("a"), asked, seconds=20, lend=True)
    assert median(held, "a") == pytest.approx(CPU / 0.2, rel=0.05)
    assert median(lent, "a") == pytest.approx(CPU, rel=0.05)
    # Plans and admission count on the share alone.
    assert row(lent, "a").observed == pytest.approx(row(held, "a").observed)


def test_batch_is_held_to_its_share_while_another_lane_of_its_cores_works() -> None:
    """Three lanes fit on no two cores of their own: all of them float."""
    asked = Workload({"a": Uniform(1.0), "b": ClosedLoop(1), "c": ClosedLoop(1)})
    report = simulate(plan(a=300, b=350, c=350), problem("abc"), asked, seconds=20, lend=True)
    assert median(report, "a") > 1.5 * CPU


def test_lane_without_work_holds_nobody() -> None:
    asked = Workload({"a": Uniform(3.0), "b": Uniform(0.2), "c": Uniform(0.2)})
    report = simulate(plan(a=300, b=350, c=350), problem("abc"), asked, seconds=20, lend=True)
    assert median(report, "a") == pytest.approx(CPU, rel=0.05)


def test_batches_that_compute_at_the_same_time_share_the_cores() -> None:
    """Four threads on two cores run at half the speed, three at two thirds."""
    pinned = plan(a=250, b=250, c=250, d=250)
    report = simulate(pinned, problem("abcd"), Workload({name: Offline(1) for name in "abcd"}), seconds=1, lend=True)
    assert [median(report, name) for name in "abcd"] == pytest.approx([2 * CPU] * 4, rel=0.05)
    floating = plan(a=300, b=350, c=350)
    report = simulate(floating, problem("abc"), Workload({name: Offline(1) for name in "abc"}), seconds=1, lend=True)
    assert [median(report, name) for name in "abc"] == pytest.approx([1.5 * CPU] * 3, rel=0.05)


def test_lane_with_cores_of_its_own_is_not_held_for_others() -> None:
    """The largest is pinned first, to core 0, and one of the others to core 1."""
    asked = Workload({"a": ClosedLoop(1), "c": Uniform(3.0)})
    report = simulate(plan(a=300, b=300, c=400), problem("abc"), asked, seconds=20, lend=True)
    assert median(report, "c") == pytest.approx(CPU, rel=0.05)


def test_lanes_that_always_work_keep_their_shares() -> None:
    """What is lent comes back: each gets what it would have with ceilings."""
    asked = Workload({name: ClosedLoop(2) for name in "abc"})
    shares = {"a": 350, "b": 350, "c": 300}
    held = simulate(plan(**shares), problem("abc"), asked, seconds=30)
    lent = simulate(plan(**shares), problem("abc"), asked, seconds=30, lend=True)
    for name in shares:
        assert row(lent, name).outcomes["served"] >= 0.99 * row(held, name).outcomes["served"]


def test_worker_that_waited_for_a_core_is_held_less_after_it() -> None:
    asked, shares = problem("abc"), plan(a=450, b=450, c=100)
    models = {model.name: model for model in asked.models}
    processors = LentProcessors(asked)
    processors.open(LaneMatcher().match(shares, lane_specs(shares, models, asked.profiles)))

    def begin(name: str, slot: int, now: float) -> None:
        latency = asked.profiles[name, "cpu"].latency(1, shares.devices[0].partitions[slot].share)
        processors.begin(Run(LaneId(DeviceId("cpu", 0), slot), slot, name, ()), 1, latency, latency, now)

    def end(name: str) -> float:
        while True:
            now = processors.due
            if (ended := processors.step(now)) is not None:
                processors.ended(ended.run.lane)
                if ended.run.model == name:
                    return now

    for slot, name in enumerate("abc"):  # `c` floats: three threads on two cores
        begin(name, slot, 0.0)
    assert end("a") == pytest.approx(1.5 * CPU)  # 8 ms late
    assert end("c") < 0.04
    begin("a", 0, 0.04)
    begin("c", 2, 0.041)  # and computes longer than `a`
    assert end("a") == pytest.approx(0.04 + CPU), "its time was up 2 ms later without that"


def test_batches_end_also_after_many_days() -> None:
    """What is left of a batch is not known to a nanosecond then."""
    asked = Workload.poisson(dict.fromkeys("abc", 2e-4))
    report = simulate(plan(a=300, b=350, c=350), problem("abc"), asked, seconds=4e6, lend=True)
    assert all(row(report, name).outcomes["served"] > 500 for name in "abc")


def test_without_lending_nothing_changes() -> None:
    asked = Workload.poisson({"a": 8.0, "b": 8.0})
    kinds = tuple(Kind(name="cpu", count=1, cuts=(500,)) for _ in range(1))
    given_ = problem("ab")
    without = Problem(models=given_.models, rates=given_.rates, fleet=kinds, profiles=given_.profiles)
    assert simulate(plan(a=500, b=500), given_, asked, seconds=20) == simulate(
        plan(a=500, b=500), without, asked, seconds=20
    )


def test_lending_without_processors_says_where_they_are_missing() -> None:
    given_ = problem("a")
    without = Problem(
        models=given_.models, rates=given_.rates, fleet=(Kind(name="cpu", count=1),), profiles=given_.profiles
    )
    with pytest.raises(ConfigError, match=r"^only shares of processors are lent, .*`processors` in \[\[devices\]\]$"):
        simulate(plan(a=500), without, seconds=1, lend=True)


@settings(deadline=None, max_examples=25)
@given(
    shares=st.lists(st.sampled_from([50, 100, 200, 300]), min_size=1, max_size=4).filter(
        lambda all_: sum(all_) <= 1000
    ),
    callers=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_each_batch_ends_once_between_computing_and_its_share(shares: list[int], callers: int, seed: int) -> None:
    names = "abcd"[: len(shares)]
    dispatcher = Dispatcher()
    began: dict[tuple[LaneId, int], float] = {}
    took: list[tuple[LaneId, float, float]] = []

    def watched(event: Event, now: float) -> list[Command]:
        if isinstance(event, Finished):
            seconds = now - began.pop((event.lane, event.batch))
            took.append((event.lane, seconds, event.lent))
        commands = dispatcher.handle(event, now)
        began.update({(each.lane, each.batch): now for each in commands if isinstance(each, Run)})
        return commands

    asked = Workload({name: ClosedLoop(callers, think=0.1) for name in names})
    shared = plan(**dict(zip(names, shares, strict=True)))
    simulate(shared, problem(names), asked, seconds=5, seed=seed, lend=True, handle=watched)
    assert took and not began
    for lane, seconds, lent in took:
        share = shared.devices[0].partitions[lane.slot].share
        held = max(CPU / (PROCESSORS * share / 1000), CPU)
        assert seconds >= CPU - 1e-9, "nobody computes faster than alone"
        assert seconds + lent >= held - 0.05 - 1e-9, "what is lent is the rest of the share's time, less the credit"
        assert lent <= held - CPU + 1e-9


def test_batch_of_a_worker_that_dies_is_answered_by_the_next() -> None:
    """The lane dies in the middle of a batch, and is back a second later."""
    dispatcher = Dispatcher()
    died: list[tuple[float, int]] = []
    finished: list[tuple[float, int]] = []

    def watched(event: Event, now: float) -> list[Command]:
        if isinstance(event, Died):
            died.append((now, finished[-1][1] + 1))
        elif isinstance(event, Finished):
            finished.append((now, event.batch))
        return dispatcher.handle(event, now)

    failure = Failure(parts=(LaneId(DeviceId("cpu", 0), 0),), time=1.0 + CPU / 2, back=1.0)
    asked = Workload({"a": ClosedLoop(1)})
    simulate(plan(a=100), problem("a"), asked, seconds=5, failures=[failure], lend=True, handle=watched)
    ((death, lost),) = died
    assert lost not in [batch for _, batch in finished]
    assert not [time for time, _ in finished if death < time < death + 1.0] and finished[-1][0] > 4.9


def test_lane_that_drains_while_it_lends_ends_its_last_batch() -> None:
    given = problem("ab")
    asked = Workload({"a": ClosedLoop(2), "b": ClosedLoop(2)})
    changed = [(1.0, plan(a=500, b=300)), (2.0, plan(a=300, b=300))]
    report = simulate(plan(a=300, b=300), given, asked, seconds=4, changes=changed, lend=True)
    assert {row(report, name).outcomes["failed"] for name in "ab"} == {0}
    assert min(row(report, name).served for name in "ab") > 0
