"""Best-effort jobs on what simulated lanes leave idle."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.background_job import BackgroundJob
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Partition, Placement, Plan
from cotenant.errors import PlanError
from cotenant.measure.report import JobReport, Report
from cotenant.planners import Problem
from cotenant.planners.forecast import forecast, forecast_jobs
from cotenant.planners.job_placement import place_jobs, without_jobs
from cotenant.predictors import NoInterference
from cotenant.runtime.lane_assignment import LaneAssignment, LaneMatcher
from cotenant.runtime.lane_specs import lane_specs
from cotenant.sim.background_lane import BackgroundLane, JobRun
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from cotenant.workload.failures import Failure
from cotenant.workload.sources import Uniform
from tests.planners.job_problems import CUTS, HALF, SERVED, STEP, WideTail, job, partition, plan, problem

PROCESSORS = 2.0
TWO = (partition("served", 500, 20.0), partition("other", 250, 5.0))


def on_processors(*jobs: BackgroundJob, **options: Any) -> Problem:
    """As `problem`, on shares of two processors, without interference unless asked for."""
    fleet = (Kind(name="k", count=4, cuts=CUTS, processors=PROCESSORS),)
    return problem(*jobs, **{"fleet": fleet, "interference": NoInterference(), **options})


def on_gpus(*jobs: BackgroundJob, **options: Any) -> Problem:
    return problem(*jobs, **{"interference": NoInterference(), **options})


def ran(asked: Problem, made: Plan, seconds: float = 20.0, **options: Any) -> Report:
    return simulate(made, asked, seconds=seconds, **options)


def results(report: Report) -> dict[str, JobReport]:
    assert report.jobs is not msgspec.UNSET
    return {each.job: each for each in report.jobs}


def lanes_of(made: Plan, asked: Problem) -> dict[LaneId, LaneAssignment]:
    models = {model.name: model for model in asked.models}
    return LaneMatcher().match(made, lane_specs(made, models, asked.profiles))


@given(
    changes=st.lists(
        st.tuples(
            st.floats(0.0, 1.0),
            st.sampled_from(["begin 0", "end 0", "begin 1", "end 1", "grant one", "grant two", "refuse one", "look"]),
        ),
        max_size=60,
    ),
    processors=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_every_idle_share_second_is_taken_at_most_once(changes: list[tuple[float, str]], processors: bool) -> None:
    """On processors, whatever is idle goes to a job as long as any may go on; on GPUs, never more than there is."""
    jobs = job("one", "train", priority=2), job("two", "train")
    asked = (on_processors if processors else on_gpus)(*jobs)
    lane = BackgroundLane(asked, asked.fleet[0], None, 0.0)
    lane.open(lanes_of(plan(TWO), asked))
    names = {"0": LaneId(DeviceId("k", 0), 0), "1": LaneId(DeviceId("k", 0), 1)}
    served = {"0": "served", "1": "other"}
    runs = {each.name: JobRun(each) for each in jobs}
    for name, run in runs.items():
        lane.start(name, run)
    lane.reschedule()
    now, unused, busy = 0.0, 0.0, set[str]()
    for wait, change in changes:
        end = now + wait
        while True:  # as the simulator does: nothing due is passed over
            step = min(end, lane.due)
            if not any(run.granted for run in runs.values()):
                unused += (1000 - 500 * ("0" in busy) - 250 * ("1" in busy)) / 1000 * (step - now) * lane.capacity
            lane.advance(step)
            lane.reschedule()
            now = step
            if step >= end:
                break
        verb, _, what = change.partition(" ")
        if verb == "begin":
            busy.add(what)
            lane.begin(names[what], served[what])
        elif verb == "end":
            busy.discard(what)
            lane.end(names[what])
        elif verb != "look":
            runs[what].granted = 500 if verb == "grant" else 0
        lane.reschedule()
    taken = sum(run.share_seconds for run in runs.values())
    if processors:
        assert taken == pytest.approx(lane.idle_seconds - unused, abs=1e-6)
    assert taken <= lane.idle_seconds + 1e-6
    for run in runs.values():  # a step takes as many share-seconds on any share
        assert run.steps + run.part == pytest.approx(run.share_seconds / STEP / lane.capacity, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("lend", [False, True])
def test_jobs_without_interference_change_nothing_of_what_is_served_on_processors(lend: bool) -> None:
    asked = on_processors(job(), job("second", "train"))
    made = place_jobs(plan(TWO), asked)
    beside, alone = ran(asked, made, lend=lend), ran(asked, without_jobs(plan(TWO)), lend=lend)
    assert beside.models == alone.models
    assert alone.jobs is msgspec.UNSET
    assert b'"jobs"' not in alone.to_json()
    assert Report.from_json(beside.to_json()) == beside


def test_jobs_on_processors_take_all_that_is_idle_by_their_priorities() -> None:
    asked = on_processors(job("heavy", "train", priority=3), job("light", "train"))
    report = ran(asked, place_jobs(plan(HALF), asked))
    heavy, light = results(report).values()
    assert heavy.share_seconds / light.share_seconds == pytest.approx(3.0, rel=0.05)
    assert heavy.idle_share_seconds == light.idle_share_seconds
    # The first start takes a moment.
    assert heavy.share_seconds + light.share_seconds == pytest.approx(heavy.idle_share_seconds, rel=0.02)
    (served,) = [row for row in report.models if row.offered]
    busy = served.served * SERVED * 2 * 0.5  # of a batch of one row on half the device, that half
    assert heavy.idle_share_seconds == pytest.approx(PROCESSORS * 20.0 * (1 - busy), rel=0.02)


def test_jobs_beside_lent_shares_have_the_processor_time_that_no_batch_computes_with() -> None:
    """Two lanes share a processor, since a third has the other: batches of `rude` compute for 200 ms and of `other` for
    20, and are held for as long again while the other lane is at work."""
    models = tuple(Model(name=name, slo=5.0) for name in ("served", "rude", "other"))
    rates = {"served": 0.1, "rude": 2.0, "other": 5.0}
    asked = on_processors(job(), rates=rates, models=models)
    long = Placement(model="rude", batch=1, rate=2.0, duty=4 * STEP, latency=4 * STEP)
    lanes = partition("served", 500, 0.1), Partition(share=250, placements=(long,)), partition("other", 250, 5.0)
    steady = Workload(sources={name: Uniform(rate=rate) for name, rate in rates.items()})
    got = results(ran(asked, place_jobs(plan(lanes), asked), workload=steady, lend=True))["train"]
    computed = 20.0 * (0.1 * 0.02 + 2.0 * 0.2 + 5.0 * 0.02)
    assert got.idle_share_seconds == pytest.approx(PROCESSORS * 20.0 - computed, rel=0.01)
    assert got.idle_part > 0.95


def test_job_ends_when_its_steps_are_done_and_leaves_the_rest_to_others() -> None:
    asked = on_processors(job("short", "train", steps=30, deadline=15.0), job("long", "train"))
    made = place_jobs(plan(HALF), asked)
    short, long = results(ran(asked, made)).values()
    assert short.steps == 30
    assert short.ended is not None
    assert short.predicted_end is not None
    assert short.ended == pytest.approx(short.predicted_end, rel=0.1)
    assert short.share_seconds == pytest.approx(30 * STEP * PROCESSORS, rel=0.01)
    assert short.share_seconds + long.share_seconds == pytest.approx(short.idle_share_seconds, rel=0.02)


def test_forecast_of_jobs_is_near_what_the_simulator_gives_them() -> None:
    for asked in (on_processors(job()), on_gpus(job())):
        asked = msgspec.structs.replace(asked, rates={"served": 20.0, "other": 5.0})
        made = place_jobs(plan(TWO), asked)
        predicted = forecast_jobs(made, asked, forecast(made, asked))["train"]
        report = results(ran(asked, made, seconds=60.0))["train"]
        assert report.steps_per_s == pytest.approx(predicted.steps, rel=0.1)
        assert report.predicted_steps_per_s == pytest.approx(predicted.steps, rel=0.1)


def test_step_on_a_gpu_has_at_most_the_share_that_it_began_with_and_gives_way_to_lanes() -> None:
    asked = on_gpus(job())
    lane = BackgroundLane(asked, asked.fleet[0], None, 0.0)
    lane.open(lanes_of(plan(HALF), asked))
    name, run = LaneId(DeviceId("k", 0), 0), JobRun(job(), granted=1000)
    lane.start("job-1", run)
    told = []

    def at(now: float, change: str = "") -> None:
        lane.advance(now)
        if change == "begin":
            lane.begin(name, "served")
        elif change == "end":
            lane.end(name)
        lane.reschedule()
        told.append((now, run.most, run.share, run.steps, round(lane.due, 6)))

    at(0.0)
    at(0.05, "begin")  # half of the step is left, on half of the device
    at(0.15)
    at(0.25, "end")  # half of the second step is done: it began with half, and keeps it
    at(0.35)
    assert told == [
        (0.0, 1000, 1000.0, 0, 0.1),
        (0.05, 1000, 500.0, 0, 0.15),
        (0.15, 500, 500.0, 1, 0.35),
        (0.25, 500, 500.0, 1, 0.35),
        (0.35, 1000, 1000.0, 2, 0.45),
    ]


def test_several_jobs_on_a_gpu_begin_steps_within_legal_shares_of_their_parts() -> None:
    """Of 1000 ‰ that are idle three of equal priority get 333 each, of which 250 are legal; what is left is too little
    for anybody."""
    asked = on_gpus()
    lane = BackgroundLane(asked, asked.fleet[0], None, 0.0)
    lane.open(lanes_of(plan(HALF), asked))
    runs = [JobRun(job(name, "train"), granted=333) for name in "abc"]
    for n, run in enumerate(runs):
        lane.start(f"job-{n}", run)
    lane.reschedule()
    assert [run.most for run in runs] == [250, 250, 250]
    lane.advance(0.1)
    lane.stop("job-0")
    assert (runs[0].steps, runs[0].part, runs[0].share) == (0, 0.0, 0.0)


def test_batches_beside_jobs_take_as_much_longer_as_is_predicted() -> None:
    asked = on_processors(job(), interference=WideTail(tail=0.2))
    made = place_jobs(plan(HALF), asked)
    beside, alone = ran(asked, made), ran(asked, without_jobs(made))
    assert beside.models[0].observed == pytest.approx(1.1 * (alone.models[0].observed or 0.0), rel=0.01)


@pytest.mark.parametrize("lend", [False, True])
def test_jobs_yield_while_requests_are_rejected(lend: bool) -> None:
    """A rate of three times the lane's capacity: half of the device is never used, and jobs must not have it either."""
    asked = on_processors(job())
    made = place_jobs(plan(HALF), asked)
    crowd = Workload(sources={"served": Uniform(rate=150.0)})
    report = ran(asked, made, workload=crowd, lend=lend)
    assert report.models[0].outcomes["rejected"] > 1000
    got = results(report)["train"]
    assert got.idle_share_seconds == pytest.approx(0.5 * PROCESSORS * 20.0, rel=0.05)
    assert got.idle_part < 0.05
    calm = results(ran(asked, made, lend=lend))["train"]
    assert calm.idle_part > 0.95


def test_job_stops_with_its_device_and_goes_on_when_it_is_back() -> None:
    asked = on_processors(job())
    made = place_jobs(plan(HALF), asked)
    lost = Failure(parts=(DeviceId("k", 0),), time=5.0, back=10.0)
    report = ran(asked, made, failures=[lost])
    whole = results(ran(asked, made))["train"]
    got = results(report)["train"]
    assert 0.35 * whole.steps < got.steps < 0.6 * whole.steps


def test_job_moves_with_the_plan() -> None:
    """The second plan has the job on another device: its steps are counted together."""
    asked = on_processors(job(), rates={"served": 5.0})
    light = (partition("served", 500, 2.5),)
    one = place_jobs(plan(light, light), asked)
    (first, second) = one.devices
    assert [len(device.jobs) for device in one.devices] == [1, 0]
    moved = msgspec.structs.replace(
        one, devices=(msgspec.structs.replace(first, jobs=()), msgspec.structs.replace(second, jobs=first.jobs))
    )
    got = results(ran(asked, one, changes=[(10.0, moved)]))["train"]
    stayed = results(ran(asked, one))["train"]
    assert got.device == "k-1"
    assert stayed.device == "k-0"
    assert got.steps == pytest.approx(stayed.steps, rel=0.15)


def test_job_leaves_a_device_that_the_plan_gives_back() -> None:
    asked = on_processors(job(), rates={"served": 5.0})
    light = (partition("served", 500, 2.5),)
    both = place_jobs(plan(light, light), asked)
    first, second = both.devices
    (whole,) = plan((partition("served", 500, 5.0),)).devices
    fewer = msgspec.structs.replace(both, devices=(msgspec.structs.replace(whole, id=second.id, jobs=first.jobs),))
    got = results(ran(asked, both, changes=[(10.0, fewer)]))["train"]
    assert got.device == "k-1"
    assert got.steps == pytest.approx(results(ran(asked, both))["train"].steps, rel=0.15)


def test_jobs_that_wait_are_reported_with_their_reason() -> None:
    asked = on_processors(job(), job("elsewhere", "nothing"))
    got = results(ran(asked, place_jobs(plan(HALF), asked), seconds=2.0))["elsewhere"]
    assert got.device is None
    assert "was not profiled" in got.reason
    assert (got.steps, got.share_seconds, got.idle_part) == (0, 0.0, 0.0)


def test_runs_with_jobs_are_the_same_each_time() -> None:
    asked = on_gpus(job(), job("second", "train"), interference=WideTail())
    made = place_jobs(plan(HALF), asked)
    assert ran(asked, made, seed=3) == ran(asked, made, seed=3)


def test_plan_with_a_job_that_the_problem_lacks_does_not_run() -> None:
    made = place_jobs(plan(HALF), on_processors(job()))
    with pytest.raises(PlanError, match="the problem has no such job"):
        ran(on_processors(), made)
