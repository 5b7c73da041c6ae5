"""A node that is cut off and comes back: a front end over the product's own links, in virtual time, and the simulator
must get the same commands at the same times, given when the front end noticed and when the node's worker was ready."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest

from cotenant.control.revision import MemoryPolicy
from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.request import Outcome, Request
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Reply
from cotenant.runtime.events import Run as Batch
from cotenant.runtime.lane_specs import lane_specs
from cotenant.sim.loop import play
from cotenant.sim.workers import Workers
from cotenant.workload.failures import Failure
from tests.chaos.cluster.front_ends import PROBLEMS, FrontEnd
from tests.chaos.cluster.network import NetworkLoop
from tests.chaos.cluster.schedule import NODES, Schedule
from tests.chaos.cluster.world import Run, patched
from tests.chaos.schedule import Step
from tests.same.test_simulator_and_driver import Recorder, Story, _shape

LATENCY = 0.0007  # seconds one way
BEGIN, CUT, BACK, END = 4.0, 6.0, 7.5, 12.0
WITHIN = 0.31
PLAN = Plan(
    planner="hand",
    devices=tuple(
        Device(
            id=DeviceId("cpu", node=node),
            partitions=(
                Partition(
                    share=300,
                    placements=tuple(
                        Placement(model=name, batch=4, rate=10.0, duty=0.1, latency=0.04) for name in models
                    ),
                ),
            ),
        )
        for node, models in zip(NODES, ("ab", "bc"), strict=True)
    ),
)


def takes(batch: Batch) -> float:
    """As workers of the harness, and the network both ways."""
    rows = sum(request.size for request in batch.requests)
    return 2 * LATENCY + 0.009 * rows * (1 + 0.3 * (batch.batch * 0.6180339887 % 1))


class RecordedFrontEnd(FrontEnd):
    def make_dispatcher(self) -> Dispatcher:
        return Recorder()

    def planned(self) -> Plan:
        return PLAN


class CutRun(Run):
    make_front_end = RecordedFrontEnd


def requests(seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(BEGIN, END - 1, 400)).tolist()
    return [
        Request(number, "abc"[int(rng.integers(3))], time, time + WITHIN, int(rng.integers(1, 3)))
        for number, time in enumerate(times, 1)
    ]


def driven(asked: list[Request], folder: Path) -> tuple[Story, list[str], list[int]]:
    """Return what the dispatcher said, what the orchestrator heard, and how many answers each request got."""
    schedule = Schedule(
        0, MemoryPolicy.REFUSE, shared=False, warm=0, standbys=0, in_place=False, narrow=False, steps=()
    )
    loop = NetworkLoop()
    run = CutRun(schedule, loop, folder)
    run.network.delay = lambda source, target: LATENCY  # type: ignore[method-assign]

    answers: list[int] = []

    async def scenario() -> None:
        for name in NODES:
            run.start_node(name)
        run.start_front_end()
        for request in asked:
            how = f"{request.model} small"
            loop.call_at(request.arrived, run._send, Step(request.arrived, "request", request.size, WITHIN, how))
        loop.call_at(CUT, run.network.hole, run.active.host.name, NODES[0], BACK)
        loop.call_at(CUT, run.network.hole, NODES[0], run.active.host.name, BACK)
        await asyncio.sleep(END)
        answers.extend(len(caller.answers) for caller in run.active.callers)
        await run._stop()

    with contextlib.closing(run), patched(run):
        loop.run_until_complete(scenario())
        front_end = run.active
    assert not run.problems
    assert isinstance(front_end.dispatcher, Recorder)
    return front_end.dispatcher.story, run.told, answers


def simulated(asked: list[Request], failure: Failure, startup: float) -> Story:
    problem, recorder = PROBLEMS[False], Recorder()
    models = {model.name: model for model in problem.models}
    workers = Workers(
        PLAN,
        problem,
        lambda plan: lane_specs(plan, models, problem.profiles),
        lambda lanes: None,
        lambda lane: startup,
    )
    workers.fail([failure])
    play(workers.hearing(recorder.handle), asked, lambda run, now: takes(run), lambda reply, now: (), workers)
    return recorder.story


@pytest.mark.parametrize("seed", range(5))
def test_simulator_and_server_do_the_same_about_a_node_that_is_cut_off(seed: int, tmp_path: Path) -> None:
    asked = requests(seed)
    story, told, answers = driven(asked, tmp_path)
    assert answers == [1] * len(asked)

    def heard(event: str) -> float:
        """When the orchestrator first heard of something after the cut."""
        times = [float(line.split()[0]) for line in told if line.endswith(f" {event}")]
        return min(time for time in times if time > CUT)

    lost, restored, ready = heard("DevicesLost"), heard("DeviceRestored"), heard("WorkerReady")
    assert 0.7 < lost - CUT < 1.0 and BACK < restored < BACK + 1.1
    failure = Failure(nodes=(NODES[0],), time=CUT, back=restored - CUT, noticed=lost - CUT)
    live = [entry for entry in story if entry[1] and entry[0] >= BEGIN and entry[0] < END]
    expected = [entry for entry in simulated(asked, failure, ready - restored) if entry[1] and BEGIN <= entry[0] < END]
    assert [_shape(commands) for _, commands in live] == [_shape(commands) for _, commands in expected]
    # The driver wakes up to a microsecond late.
    assert [now for now, _ in live] == pytest.approx([now for now, _ in expected], abs=3e-6)
    outcomes = {
        command.outcome
        for now, commands in live
        if CUT < now < BACK
        for command in commands
        if isinstance(command, Reply)
    }
    assert outcomes >= {Outcome.SERVED, Outcome.EXPIRED}, "the cut cost nobody anything"
