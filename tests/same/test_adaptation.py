"""Rates that rise and batches that take longer: the simulator and the live driver must tell a controller the same,
and get the same commands at the same times."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cotenant.backends import Backend
from cotenant.backends.fake import Fake
from cotenant.control.adaptation import (
    Cause,
    ControllerCommand,
    ControllerEvent,
    Observed,
    Roll,
    RollEnded,
    Solve,
    Solved,
)
from cotenant.control.controller import Controller
from cotenant.control.provider import FixedProvider
from cotenant.core.identity import LaneId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.request import Request
from cotenant.core.tensor import Tensor
from cotenant.live.adaptation_driver import AdaptationDriver
from cotenant.live.batch_listener import BatchListener, Payload
from cotenant.live.control_driver import ControlDriver
from cotenant.live.deployment import Deployment
from cotenant.live.driver import Driver, Tensors
from cotenant.live.pool import Pool
from cotenant.live.rollout_driver import RolloutDriver
from cotenant.live.serving_observer import ServingObserver
from cotenant.live.serving_state import ServingState
from cotenant.measure.ledger import OutcomeLedger
from cotenant.planners import Problem
from cotenant.runtime import events as runtime
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.lane_assignment import LaneAssignment
from cotenant.runtime.lane_specs import lane_specs
from cotenant.sim import adaptation as simulated_adaptation
from cotenant.sim.loop import play
from cotenant.sim.workers import Workers
from cotenant.worker.arena import Arena
from cotenant.worker.wire import Timing
from tests.live.deployment import repository
from tests.same.test_rollouts import DEVICES, MODELS, Recording, VirtualDriver, VirtualPool, given, startup
from tests.virtual_loop import virtual_loop

SECONDS = 24.0
RISE, SLOWER = 6.0, 14.0  # when requests come three times as often, and when batches take 1.7 times as long
SOLVING = 0.313  # seconds: none of its multiples is one of an observation
RATES = {"identity": 20.0, "lookup": 10.0}
WITHIN = 0.2

Told = list[tuple[float, ControllerEvent, list[ControllerCommand]]]


def takes(run: runtime.Run, now: float) -> float:
    chance = 1 + 0.1 * (run.batch * 0.6180339887 % 1)
    return 0.01 * len(run.requests) * chance * (1.7 if now >= SLOWER else 1.0)


def plan(share: int, devices: int, slowdown: float = 1.0) -> Plan:
    """Each model on a partition of its own, on each of the devices."""
    partitions = tuple(
        Partition(
            share=share,
            placements=(Placement(model=model, batch=4, rate=RATES[model], duty=0.1, latency=0.04 * slowdown),),
        )
        for model in MODELS
    )
    return Plan(planner="hand", devices=tuple(Device(id=each, partitions=partitions) for each in DEVICES[:devices]))


def solved(solve: Solve) -> Solved:
    """Two devices for more than 40 requests/s, larger shares for slow batches."""
    slowdown = max(solve.slowdowns.values(), default=1.0)
    made = plan(300 if slowdown > 1.2 else 200, 2 if sum(solve.rates.values()) > 40.0 else 1, slowdown)
    sustained = {name: 1.5 * rate for name, rate in solve.rates.items()}
    return Solved(number=solve.number, plan=made, sustained=sustained)


def requests_of(seed: int) -> list[tuple[float, str]]:
    rng = np.random.default_rng(seed)
    arrived = []
    for model, rate in RATES.items():
        for begin, end, times in ((0.0, RISE, 1), (RISE, SECONDS, 3)):
            count = int(rng.poisson(rate * times * (end - begin)))
            arrived += [(float(time), model) for time in rng.uniform(begin, end, count)]
    return sorted(arrived)


def controller() -> Controller:
    return Controller(DEVICES, dict.fromkeys(MODELS, 0.99))


class Times:
    """The lanes of the simulator: batches take what they take live."""

    def __init__(self) -> None:
        self.lanes: Mapping[LaneId, LaneAssignment] = {}

    def predicted(self, run: runtime.Run, took: float) -> float:
        """What the plan in force says of a batch, which may be another than when it began; `took` where it has none."""
        spec = self.lanes[run.lane].spec
        latencies = next(model.latencies for model in spec.models if model.model == run.model)
        return latencies[len(run.requests) - 1] if len(run.requests) <= len(latencies) else took


def simulated(arrivals: Sequence[tuple[float, str]], deployment: Deployment) -> Told:
    problem, times, told = deployment.problem, Times(), Told()
    models = {model.name: model for model in problem.models}

    def opened(lanes: Mapping[LaneId, LaneAssignment]) -> None:
        times.lanes = {**times.lanes, **lanes}

    workers = Workers(
        plan(200, 1),
        problem,
        lambda wanted: lane_specs(wanted, models, problem.profiles),
        opened,
        lambda lane: startup(lane.spec.id),
    )
    workers.orchestrator = recording = Recording()
    ledgers = {name: OutcomeLedger() for name in MODELS}
    adaptation = simulated_adaptation.Adaptation(
        controller=controller(),
        solver=solved,
        solve_seconds=SOLVING,
        log=lambda now, event, commands: told.append((now, event, commands)),
    )
    driver = simulated_adaptation.AdaptationDriver(adaptation, workers, ledgers, SECONDS)
    driver.start(plan(200, 1), RATES)

    def serve(run: runtime.Run, now: float) -> float:
        took = takes(run, now)
        finishing.append((run, took))
        return took

    # Batches count when they end, by the plan in force then, as live; those of a lane that has left tell nothing.
    finishing: list[tuple[runtime.Run, float]] = []
    dispatcher = Dispatcher()

    def handle(event: runtime.Event, now: float) -> list[runtime.Command]:
        if isinstance(event, runtime.Finished):
            for entry in [entry for entry in finishing if (entry[0].lane, entry[0].batch) == (event.lane, event.batch)]:
                finishing.remove(entry)
                run, took = entry
                in_force = event.lane in recording.rollout.lanes
                ledgers[run.model].ran(len(run.requests), times.predicted(run, took) if in_force else took, took)
        return dispatcher.handle(event, now)

    def ended(reply: runtime.Reply, now: float) -> Sequence[Request]:
        ledgers[reply.requests[0].model].ended(reply.requests, reply.outcome, now)
        return ()

    requests = (Request(n, model, time, time + WITHIN) for n, (time, model) in enumerate(arrivals, 1))
    play(handle, driver.count(requests), serve, ended, workers)
    return told


class SlowerPool(VirtualPool):
    """Batches take longer from some time on."""

    def __init__(self, backend: Backend, arena: Arena, control: ControlDriver, batches: BatchListener) -> None:
        super().__init__(backend, arena, control, batches)
        self._listener = batches

    def run(self, lane: LaneId, batch: int, model: str, payloads: Sequence[Payload]) -> None:
        run = runtime.Run(lane, batch, model, tuple(Request(0, model, 0, 0) for _ in payloads))
        self._batches_by_lane[lane] = self._loop.call_later(
            takes(run, self._loop.time()),
            self._listener.finished,
            lane,
            batch,
            list(payloads),
            Timing(0, 0, 0, 0, 0, 0),
        )


class SlowerDriver(VirtualDriver):
    def make_pool(self, backend: Backend, arena: Arena, batches: BatchListener, warm_workers: int) -> Pool:
        self._clock = asyncio.get_running_loop().time
        return SlowerPool(backend, arena, self, batches)


class InstantSolver:
    async def __call__(self, problem: Problem, solve: Solve) -> Solved:
        await asyncio.sleep(SOLVING)
        return solved(solve)

    async def close(self) -> None: ...


async def driven(arrivals: Sequence[tuple[float, str]], deployment: Deployment) -> Told:
    loop, told = asyncio.get_running_loop(), Told()
    first = msgspec.structs.replace(deployment, plan=plan(200, 1))
    state = ServingState(first)
    observer = ServingObserver(state, lambda lane: None)

    def run(lane: LaneId, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        rollouts.run(lane, batch, model, payloads)

    driver = Driver(
        Dispatcher(), run, observer, clock=loop.time, drained=lambda lane: rollouts.drained(lane), rounding=1e-9
    )
    with contextlib.closing(Arena(4096)) as arena:
        recording = Recording()
        rollouts = RolloutDriver(recording, state, driver, observer, Fake(), arena, control=SlowerDriver)
        rollouts._control._clock = loop.time
        pool = rollouts._control.pool
        assert isinstance(pool, SlowerPool)
        pool.orchestrator, pool.driver, pool.failures = recording, driver, []
        adapting = AdaptationDriver(
            controller(),
            InstantSolver(),
            state,
            driver,
            observer,
            rollouts,
            FixedProvider(DEVICES, DEVICES),
            clock=loop.time,
            log=lambda now, event, commands: told.append((now, event, commands)),
        )
        await rollouts.apply(first, "start of the server")
        await asyncio.sleep(0)
        adapting.start(RATES)

        def submit(number: int, model: str) -> None:
            payload = (Tensor("x", "UINT8", (1,), bytes([number % 256])),)
            driver.submit(model, payload, lambda answer: None, within=WITHIN)

        for number, (time, model) in enumerate(arrivals):
            loop.call_at(time, submit, number, model)
        await asyncio.sleep(SECONDS - 0.25 - loop.time())  # the simulator observes nothing at its very end
        await adapting.stop()
        await asyncio.sleep(5.0)
        await pool.close()
    return told


def _same(one: Any, other: Any) -> bool:
    """Compare what JSON can hold; floats to a millionth, since an event loop adds up its times in another order."""
    match one, other:
        case (float(), int() | float()) | (int(), float()):
            return bool(abs(one - other) < 1e-6)
        case dict(), dict():
            return set(one) == set(other) and all(_same(one[key], other[key]) for key in one)
        case list(), list():
            return len(one) == len(other) and all(map(_same, one, other))
        case _:
            return bool(one == other)


def _plain(entry: tuple[float, ControllerEvent, list[ControllerCommand]]) -> Any:
    return msgspec.to_builtins(list(entry), enc_hook=str)


@pytest.mark.parametrize("seed", range(5))
def test_simulator_and_server_tell_a_controller_the_same(seed: int, tmp_path: Path) -> None:
    deployment, arrivals = given(repository(tmp_path)), requests_of(seed)
    expected = [entry for entry in simulated(arrivals, deployment) if entry[0] < SECONDS - 0.25]
    loop = virtual_loop()
    try:
        got = loop.run_until_complete(driven(arrivals, deployment))
    finally:
        loop.close()
    asked = [command for _, _, commands in expected for command in commands]
    assert {command.cause for command in asked if isinstance(command, Solve)} >= {Cause.RATE, Cause.LATENCY}
    assert sum(isinstance(command, Roll) for command in asked) >= 2
    assert any(isinstance(event, RollEnded) for _, event, _ in expected)
    for live, entry in zip(got, expected, strict=True):
        assert _same(_plain(live), _plain(entry)), (live, entry)
    assert any(isinstance(event, Observed) and event.latencies for _, event, _ in got)
