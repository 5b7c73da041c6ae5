"""A front end of the harness: driver, rollouts, supervisor and dispatcher over nodes, as a server has them."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from cotenant.backends.none import NoDevices
from cotenant.control.revision import RolloutOutcome
from cotenant.control.supervised_lane import LaneState
from cotenant.core.identity import DeviceId
from cotenant.core.model import Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Point, Profile
from cotenant.errors import CotenantError
from cotenant.live.deployment import Deployment, ServableModel, without_model
from cotenant.live.driver import TOGETHER, Driver
from cotenant.live.nodes.cluster import Cluster
from cotenant.live.nodes.node import NodeSettings
from cotenant.live.nodes.registry import Nodes
from cotenant.live.rollout_driver import RolloutDriver
from cotenant.live.rollout_statistics import Past
from cotenant.live.serving_observer import ServingObserver
from cotenant.live.serving_state import ServingState
from cotenant.planners import Problem
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.worker.arena import PAGE, Arena
from tests.chaos.cluster.hosts import Host
from tests.chaos.cluster.nodes import PORT, TOKEN, WORKER, kind
from tests.chaos.cluster.schedule import NODES, Schedule
from tests.chaos.schedule import MODELS
from tests.chaos.world import Caller, CheckedDispatcher, CheckedOrchestrator, VirtualDriver, plan_of

PATIENCE = 1.5  # seconds that a start waits for nodes


def _problem(*, in_place: bool) -> Problem:
    points = [
        Point(share=share, batch=batch, latency=0.01 * batch, memory=WORKER) for share in (1000, 50) for batch in (1, 8)
    ]
    fleet = tuple(kind(f"{node}/cpu", in_place=in_place) for node in NODES)
    return Problem(
        models=tuple(Model(name=name, slo=1.0) for name in MODELS),
        rates=dict.fromkeys(MODELS, 10.0),
        fleet=fleet,
        profiles={(name, each.name): Profile(name, each.name, points) for name in MODELS for each in fleet},
    )


PROBLEMS = {in_place: _problem(in_place=in_place) for in_place in (False, True)}


def plan_on_nodes(number: int) -> Plan:
    """The plan of a number, with each device on a node of its own."""
    plan = plan_of(number)
    devices = tuple(
        msgspec.structs.replace(device, id=DeviceId("cpu", node=NODES[device.id.index])) for device in plan.devices
    )
    return msgspec.structs.replace(plan, devices=devices)


class FrontEnd:
    """One life of a server, from its start to its death. It is the run of its callers, too: their answers count as long
    as it lives."""

    def __init__(
        self,
        host: Host,
        schedule: Schedule,
        offered: Mapping[str, ServableModel],
        plan: int,
        told: list[str],
        tell: Callable[[str], None],
    ) -> None:
        self.host = host
        self.loop = host.loop
        self.schedule = schedule
        self.told = told
        self.callers: list[Caller] = []
        self.applied: list[asyncio.Task[None]] = []
        self.ended: dict[int, RolloutOutcome] = {}
        self.ready = False  # it takes requests
        self.arena = Arena(64 * PAGE)
        self.nodes = Nodes(NodeSettings(tokens=(TOKEN,)))
        self._offered = offered
        self._plan = plan
        self._tell = tell
        host.begin(self._start())

    # What callers and checks ask of a run

    @property
    def jumped(self) -> float:
        return self.host.slept

    def problem(self, text: str) -> None:
        self._tell(f"{self.host.name}: {text}")

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.problem(f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}")
            raise

    # Its life

    def make_dispatcher(self) -> Dispatcher:
        made = CheckedDispatcher()
        made.run = self  # type: ignore[assignment]
        return made

    def planned(self) -> Plan:
        """The plan for all nodes."""
        return plan_on_nodes(self._plan)

    async def _start(self) -> None:
        """As `app.nodes.connected`: plan with the nodes that have answered, and again when others do."""
        for name in NODES:
            self.nodes.add(name, f"{name}:{PORT}")
        await self.nodes.heard(PATIENCE)
        schedule, problem = self.schedule, PROBLEMS[self.schedule.in_place]
        self.deployment = Deployment(
            offered=dict(self._offered), problem=problem, plan=Plan(planner="hand", devices=())
        )
        state = ServingState(self.deployment)
        observer = ServingObserver(state, lambda lane: self.driver.busy_since(lane))
        dispatcher = self.dispatcher = self.make_dispatcher()
        self.driver = Driver(
            dispatcher,
            lambda *batch: self.rollouts.run(*batch),
            observer,
            clock=self.loop.time,
            drained=lambda lane: self.rollouts.drained(lane),
            rounding=1e-6,
            together=TOGETHER,
        )
        self.orchestrator = CheckedOrchestrator(self, schedule.memory)  # type: ignore[arg-type]
        self.rollouts = RolloutDriver(
            self.orchestrator,
            state,
            self.driver,
            observer,
            Cluster(NoDevices(), self.nodes),
            self.arena,
            control=VirtualDriver,
        )
        self.control = self.rollouts._control
        self.rollouts.on_ended = self._ended
        observer.track(self._offered.values())
        self.nodes.on_session = self.plan_again
        self.ready = True
        self.plan_again()

    def plan(self, number: int) -> None:
        self._plan = number
        if self.ready:
            self.plan_again()

    def plan_again(self) -> None:
        """Plan for the devices that there are now."""
        known = {each.name for each in self.nodes.fleet()}
        plan = self.planned()
        devices = tuple(device for device in plan.devices if device.id.kind in known)
        self._apply(msgspec.structs.replace(self.deployment, plan=msgspec.structs.replace(plan, devices=devices)))

    def unload(self, model: str) -> None:
        if self.ready:
            self._apply(without_model(self.rollouts.desired[1], model))

    def _apply(self, deployment: Deployment) -> None:
        self.applied.append(self.loop.create_task(self._until_applied(deployment)))

    async def _until_applied(self, deployment: Deployment) -> None:
        with contextlib.suppress(CotenantError):
            await self.rollouts.apply(deployment, "a step")

    async def revive(self) -> None:
        for model in MODELS:
            with contextlib.suppress(CotenantError):
                await self.rollouts.revive(model)

    def _ended(self, past: Past) -> None:
        ended = past.ended
        number = ended.revision.number
        if number in self.ended:
            self.problem(f"rollout {number} ended twice")
        self.ended[number] = ended.outcome

    async def stop(self) -> None:
        await self.rollouts.shutdown(1.0)
        await self.nodes.close()

    def die(self) -> None:
        self.host.die()
        self.arena.close()

    # What is to hold

    def unwell(self) -> str:
        """Say what is not as it should be when nothing goes wrong; nothing where all is."""
        if not self.ready:
            return "it has not started"
        if down := [node.reason for node in self.nodes if not node.is_up]:
            return down[0]
        status = self.rollouts.status()
        if status.phase is not None:
            return f"a rollout is in phase {status.phase}"
        if self.driver.in_flight or self.driver._running:
            return f"{self.driver.in_flight} requests are open, and {[*self.driver._running]} busy"
        for name, lane in self.orchestrator.supervisor.lanes().items():
            if lane.state is LaneState.FAILED:
                return f"{name} has permanently failed"
            if lane.state is not LaneState.READY:
                return f"{name} is {lane.state}"
            if name in self.orchestrator._kept and lane.standby != "ready":
                return f"{name} has no standby worker, perhaps permanently"
        return ""
