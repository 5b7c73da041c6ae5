"""A worker that hangs costs its callers their targets and a grace, and its lane some seconds; never a minute."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from cotenant.control.events import KillWorker, SpawnWorker, StartLane, WakeAt, WorkerBusy, WorkerReady
from cotenant.control.supervisor import Supervisor
from cotenant.control.supervisor_options import SupervisorOptions
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.core.request import Outcome, Request
from cotenant.planners import Problem
from cotenant.runtime.dispatcher import OVERDUE, Dispatcher
from cotenant.runtime.events import (
    Applied,
    Arrived,
    Command,
    Died,
    Event,
    Finished,
    LaneModel,
    LaneSpec,
    Ready,
    Reply,
    Run,
    Woke,
)
from cotenant.runtime.lane import MIN_GRACE
from cotenant.sim.run import simulate
from cotenant.sim.service import BatchTimes, Noise
from tests.security.server import ORDINARY, Served, served

FIRST, SECOND = (LaneId(DeviceId("cpu", index), 0) for index in range(2))
LATENCY = 0.1
PATIENCE = 60.0


def spec(lane: LaneId, latency: float = LATENCY) -> LaneSpec:
    return LaneSpec(id=lane, models=(LaneModel(model="m", latencies=(latency,)),))


def started(*specs: LaneSpec) -> Dispatcher:
    dispatcher = Dispatcher()
    dispatcher.handle(Applied(specs), 0.0)
    for each in specs:
        dispatcher.handle(Ready(each.id), 0.0)
    return dispatcher


def arrive(dispatcher: Dispatcher, number: int, now: float, within: float = 1.0) -> list[Command]:
    commands = dispatcher.handle(Arrived(Request(number, "m", now, now + within)), now)
    dispatcher.invariants()
    return commands


def wake(dispatcher: Dispatcher, lane: LaneId) -> tuple[float, list[Command]]:
    """Wake a lane when it wants to be."""
    due = dispatcher.lanes[lane].wake
    commands = dispatcher.handle(Woke(lane, due), due)
    dispatcher.invariants()
    return due, commands


def outcomes(commands: list[Command]) -> dict[int, tuple[Outcome, str]]:
    return {
        request.id: (command.outcome, command.reason)
        for command in commands
        if isinstance(command, Reply)
        for request in command.requests
    }


def lanes_of(commands: list[Command]) -> list[LaneId]:
    return [command.lane for command in commands if isinstance(command, Run)]


def test_running_request_is_answered_when_its_deadline_has_passed_by_the_grace() -> None:
    dispatcher = started(spec(FIRST))
    arrive(dispatcher, 0, 0.0)
    now, commands = wake(dispatcher, FIRST)
    assert now == 1.0 + MIN_GRACE
    assert outcomes(commands) == {0: (Outcome.EXPIRED, OVERDUE)}
    assert outcomes(dispatcher.handle(Finished(FIRST, 1), 9.0)) == {}


def test_grace_of_a_slow_batch_is_what_it_was_predicted_to_take() -> None:
    dispatcher = started(spec(FIRST, 30.0))
    arrive(dispatcher, 0, 0.0, within=70.0)
    now, commands = wake(dispatcher, FIRST)
    assert now == 100.0 and outcomes(commands) == {0: (Outcome.EXPIRED, OVERDUE)}


def test_lane_that_does_not_answer_gets_no_requests_until_it_does() -> None:
    dispatcher = started(spec(FIRST), spec(SECOND))
    assert lanes_of(arrive(dispatcher, 0, 0.0)) == [FIRST]
    now, _ = wake(dispatcher, FIRST)
    assert dispatcher.lanes[FIRST].stalled
    assert lanes_of(arrive(dispatcher, 1, now)) == [SECOND]
    arrive(dispatcher, 2, now)  # waits for the second, which is busy
    assert lanes_of(dispatcher.handle(Finished(SECOND, 2), now + LATENCY)) == [SECOND]
    dispatcher.handle(Finished(SECOND, 3), now + 2 * LATENCY)
    dispatcher.handle(Finished(FIRST, 1), now + 3 * LATENCY)
    now += 4 * LATENCY
    both = arrive(dispatcher, 3, now) + arrive(dispatcher, 4, now)
    assert {*lanes_of(both)} == {FIRST, SECOND}


def test_requests_that_wait_for_a_lane_that_does_not_answer_move_to_another() -> None:
    dispatcher = started(spec(FIRST))
    arrive(dispatcher, 0, 0.0, within=0.5)
    arrive(dispatcher, 1, 0.4, within=5.0)  # behind the first
    dispatcher.handle(Applied((spec(FIRST), spec(SECOND))), 0.4)
    dispatcher.handle(Ready(SECOND), 0.4)
    now, commands = wake(dispatcher, FIRST)
    assert now == 0.5 + MIN_GRACE and outcomes(commands) == {0: (Outcome.EXPIRED, OVERDUE)}
    assert lanes_of(commands) == [SECOND]


def test_model_whose_only_lane_does_not_answer_rejects_at_once() -> None:
    dispatcher = started(spec(FIRST))
    arrive(dispatcher, 0, 0.0)
    now, _ = wake(dispatcher, FIRST)
    assert outcomes(arrive(dispatcher, 1, now))[1][0] is Outcome.REJECTED


@pytest.mark.parametrize(("predicted", "limit"), [(0.001, 5.0), (0.25, 5.0), (1.0, 20.0)])
def test_limit_of_a_batch_follows_from_its_prediction(predicted: float, limit: float) -> None:
    supervisor = Supervisor(SupervisorOptions())
    commands = supervisor.handle(StartLane(FIRST, FIRST.device), 0.0)
    assert any(isinstance(command, SpawnWorker) for command in commands)
    assert any(isinstance(command, WakeAt) for command in commands)
    supervisor.handle(WorkerReady(FIRST, 1), 0.0)
    busy = WorkerBusy(FIRST, 1, 10.0, "a batch of 1 of 'm'", predicted)
    assert supervisor.handle(busy, 10.0 + limit) == []
    reason = f"a batch of 1 of 'm' took longer than {limit:g} s"
    assert supervisor.handle(busy, 10.1 + limit) == [KillWorker(FIRST, 1, reason)]


@pytest.mark.parametrize(("seconds", "dies"), [(4.9, False), (1e6, True)])
def test_simulated_worker_that_hangs_is_replaced(seconds: float, dies: bool) -> None:
    problem = Problem(
        models=(Model(name="m", slo=1.0),),
        rates={"m": 5.0},
        fleet=(Kind(name="cpu"),),
        profiles={("m", "cpu"): Profile("m", "cpu", [Point(share=1000, batch=1, latency=LATENCY, memory=0)])},
    )
    placement = Placement(model="m", batch=1, rate=5.0, duty=LATENCY, latency=LATENCY)
    partition = Partition(share=1000, placements=(placement,))
    plan = Plan(planner="hand", devices=(Device(id=DeviceId("cpu", 0), partitions=(partition,)),))
    began: list[float] = []
    deaths: list[float] = []
    dispatcher = Dispatcher()

    def handle(event: Event, now: float) -> list[Command]:
        commands = dispatcher.handle(event, now)
        began.extend(now for command in commands if isinstance(command, Run))
        deaths.extend(now for _ in [event] if isinstance(event, Died))
        return commands

    times = {(FIRST, "m"): BatchTimes((seconds,), Noise())}
    simulate(plan, problem, seconds=30.0, startup=1.0, observed=times, handle=handle)
    assert len(began) >= 4
    # Each batch is cut off after 5 s; the next begins once another worker is ready.
    assert deaths == pytest.approx([begin + 5.0 for begin in began] if dies else [])


def test_frozen_worker_costs_its_callers_their_targets_and_its_lane_some_seconds(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        pid = worker(server)
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        status, answer = server.infer("identity", ORDINARY["identity"], parameters={"timeout": 500_000})
        assert status == 503 and OVERDUE in answer["error"]
        assert time.monotonic() - begun < 5.0
        assert not ready(server, "/v2/models/identity/ready") and not ready(server, "/v2/health/ready")
        status, answer = server.infer("identity", ORDINARY["identity"])
        assert status == 503 and time.monotonic() - begun < 5.0
        while not ready(server, "/v2/models/identity/ready"):
            assert time.monotonic() - begun < PATIENCE
            time.sleep(0.05)
        assert worker(server) != pid
        assert ready(server, "/v2/health/ready") and server.serves()


def ready(server: Served, path: str) -> bool:
    return server.get(path)[0] == 200


def worker(server: Served) -> int:
    """Return the process of the only lane."""
    _, status = server.get("/cotenant/status")
    (each,) = json.loads(status)["workers"]
    return int(each["pid"])
