"""Run a schedule against front ends and nodes in virtual time, and check what must hold: all of it is the product's but
the network, the processes of workers, the devices and the clock."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from cotenant.control.revision import MemoryPolicy
from cotenant.errors import CotenantError
from cotenant.live import pool as pool_module
from cotenant.live import process as process_module
from cotenant.live import serving_observer as observer_module
from cotenant.live.descriptors import DescriptorReserve
from cotenant.live.nodes import link as link_module
from cotenant.live.nodes import node as node_module
from cotenant.live.nodes import remote_pool as remote_pool_module
from cotenant.live.nodes import session as session_module
from cotenant.live.nodes import session_pool as session_pool_module
from cotenant.live.nodes.link import Link
from cotenant.live.nodes.messages import PROTOCOL, Message
from cotenant.live.nodes.node import Node
from cotenant.live.nodes.session import Session
from cotenant.live.pool import Pool
from tests.chaos.clock import Clock
from tests.chaos.cluster.front_ends import FrontEnd
from tests.chaos.cluster.hosts import HERE, Host
from tests.chaos.cluster.network import KERNEL, Network, NetworkLoop
from tests.chaos.cluster.nodes import DEVICE, PLACES, ChaosNode
from tests.chaos.cluster.schedule import LAGS, NODES, SECONDS, Schedule
from tests.chaos.schedule import MODELS, Step, describe_failure
from tests.chaos.world import ENTRIES, INJECTED, Caller, ViolationError, _Log

# Both ends are honest: neither ever finds that the other says what cannot be true, but for another version.
HONEST = ("install the same on both",)
SETTLE = 60.0  # seconds within which all must be well again once nothing goes wrong any more
NOTICED = 1.0  # seconds within which a front end notices that it does not hear a node any more
OTHER_PROTOCOL = PROTOCOL + 1
MODEL_SIZE = 2500  # bytes; more than two parts
PART = 1 << 10


class Run:
    """One schedule. Raises ViolationError."""

    make_front_end: type[FrontEnd] = FrontEnd

    def __init__(self, schedule: Schedule, loop: NetworkLoop, folder: Path) -> None:
        self.schedule = schedule
        self.loop = loop
        self.problems: list[str] = []
        self.told: list[str] = []  # to orchestrators, and when
        self.network = loop.network = Network(loop, schedule.seed)
        self.nodes: dict[str, ChaosNode] = {}
        self.front_ends: list[FrontEnd] = []  # that live, the newest last
        self._dead: list[ChaosNode | FrontEnd] = []
        self._folder = folder
        self._plan = 0
        self._started = 0
        self._settling = False
        for name in MODELS:
            path = folder / "models" / name / "1"
            path.mkdir(parents=True)
            (path / "model.onnx").write_bytes(name.encode() * MODEL_SIZE)
        self._offered = {
            name: msgspec.structs.replace(
                each,
                entry=msgspec.structs.replace(
                    each.entry, folder=folder / "models" / name, path=folder / "models" / name / "1" / "model.onnx"
                ),
            )
            for name, each in ENTRIES.items()
        }

    def problem(self, text: str) -> None:
        self.problems.append(f"{self.loop.now:.3f} s: {text}")

    def watched(self, receiver: type[Node] | type[Session]) -> Callable[..., None]:
        """Return the receiver's method that takes messages, and keep what it finds wrong with them."""
        received = receiver.received

        def watch(self_: Any, link: Link, message: Message, *body: Any) -> None:
            try:
                received(self_, link, message, *body)
            except CotenantError as error:
                if not any(words in str(error) for words in HONEST):
                    self.problem(f"{receiver.__name__}: {type(message).__name__} ended a session: {error}")
                raise

        return watch

    # Machines

    def enter(self, host: Host) -> None:
        """What a program has as constants is its own on each machine."""
        for module in (session_module, node_module):
            module.__dict__["PROTOCOL"] = host.protocol
        node_module.FRONT_END = host.front_end

    def start_node(self, name: str, protocol: int = PROTOCOL) -> None:
        if name in self.nodes:
            return
        schedule = self.schedule
        host = Host(self.loop, name, protocol=protocol)
        self.network.hosts[name] = host
        node = host.do(
            lambda: ChaosNode(
                host,
                self._folder / name,
                self.problem,
                in_place=schedule.in_place,
                shared=schedule.shared,
                warm=schedule.warm,
            )
        )
        node.machine.standbys = bool(schedule.standbys)
        if not schedule.shared and schedule.memory is not MemoryPolicy.OVERSUBSCRIBE:
            node.machine.places = PLACES
        host.left.append(node)
        self.nodes[name] = node

    def stop_node(self, name: str, *, vanished: bool) -> None:
        node = self.nodes.pop(name, None)
        if node is not None:
            node.die()
            self.network.died(node.host, vanished=vanished)
            self._dead.append(node)

    def start_front_end(self) -> None:
        self._started += 1
        name = f"front-{self._started}"
        host = Host(self.loop, name, front_end=f"{name:->32}", protocol=PROTOCOL)
        self.network.hosts[name] = host
        made = host.do(
            lambda: self.make_front_end(host, self.schedule, self._offered, self._plan, self.told, self.problem)
        )
        self.front_ends.append(made)

    def stop_front_end(self, front_end: FrontEnd, *, vanished: bool) -> None:
        if front_end in self.front_ends:
            self.front_ends.remove(front_end)
            front_end.die()
            self.network.died(front_end.host, vanished=vanished)
            self._dead.append(front_end)

    @property
    def active(self) -> FrontEnd:
        """The front end that callers ask."""
        return self.front_ends[-1]

    def popen(self, command: Any, **options: Any) -> Any:
        return self._node_here().machine.popen(command, **options)

    def make_pool(self, *args: Any, **options: Any) -> Pool:
        made = Pool(*args, **options)
        made.processes.descriptors.close()
        made.processes.descriptors = DescriptorReserve(0)  # real files are not what is scarce here
        self._node_here().pools.append(made)
        return made

    def _node_here(self) -> ChaosNode:
        host = HERE.get()
        assert host is not None
        return next(node for node in self.nodes.values() if node.host is host)

    # What happens

    async def run(self) -> None:
        for name in NODES:
            self.start_node(name)
        self.start_front_end()
        for step in self.schedule.steps:
            self.loop.call_at(step.time, self._take, step)
        await asyncio.sleep(SECONDS + 2.0)
        await self._settle()
        await self._probe()
        await self._stop()

    def _take(self, step: Step) -> None:
        name = NODES[step.which % len(NODES)]
        node = self.nodes.get(name)
        front_end = self.active
        match step.what:
            case "request":
                self._send(step)
            case "leave":
                if there := [caller for caller in front_end.callers if not caller.answers]:
                    front_end.host.do(there[step.which % len(there)].leave)
            case "plan":
                self._plan = step.which
                for each in self.front_ends:
                    each.host.do(lambda each=each: each.plan(step.which))  # type: ignore[misc]
            case "unload":
                front_end.host.do(lambda: front_end.unload(MODELS[step.which]))
            case "batch" if node is not None:
                node.machine.batch_faults.setdefault(DEVICE, deque()).append((step.how, step.more))
            case "start" if node is not None:
                node.machine.start_faults.setdefault(DEVICE, deque()).append(step.how)
            case "kill":
                alive = [(each, one) for each in self.nodes.values() for one in each.machine.processes if one.alive]
                if alive:
                    owner, process = alive[step.which % len(alive)]
                    owner.host.do(process.kill)
            case "lose" if node is not None:
                node.machine.lost[DEVICE] = INJECTED
                self.loop.call_later(step.more, node.machine.lost.pop, DEVICE, None)
            case "net":
                self._net(step, name)
            case "node" if node is not None:
                self._node(step, name, node)
            case "takeover":
                self._take_over(step)
            case "dismiss" if front_end.ready:
                self._dismiss(front_end, name, step.more)

    def _send(self, step: Step) -> Caller | None:
        front_end = self.active
        if not front_end.ready or front_end.host.frozen:
            return None  # nobody answers the port
        caller = Caller(front_end, step)  # type: ignore[arg-type]
        front_end.callers.append(caller)
        front_end.host.do(caller.send)
        return caller

    def _net(self, step: Step, name: str) -> None:
        for front_end in self.front_ends:
            other = front_end.host.name
            until = self.loop.now + step.more
            match step.how:
                case "cut":
                    self.network.cut(other, name)
                case "lag":
                    lag = LAGS[step.which // len(NODES)]
                    self.network.lags[other, name] = self.network.lags[name, other] = lag
                    self.loop.call_later(step.more, self.network.lags.pop, (other, name), None)
                    self.loop.call_later(step.more, self.network.lags.pop, (name, other), None)
                case _:
                    if step.how != "hole-from":
                        self.network.hole(other, name, until)
                    if step.how != "hole-to":
                        self.network.hole(name, other, until)
                        self._expect_notice(name, step.more)

    def _node(self, step: Step, name: str, node: ChaosNode) -> None:
        match step.how:
            case "freeze":
                self._expect_notice(name, step.more)
                node.host.freeze(step.more)
            case "upgrade":
                self.stop_node(name, vanished=False)
                self.loop.call_later(0.2, self._start_unless_settling, name, OTHER_PROTOCOL)
                self.loop.call_later(0.2 + step.more, self._downgrade, name)
            case _:
                if step.how == "vanish":
                    self._expect_notice(name, step.more)
                self.stop_node(name, vanished=step.how == "vanish")
                self.loop.call_later(step.more, self.start_node, name)

    def _start_unless_settling(self, name: str, protocol: int) -> None:
        if not self._settling:
            self.start_node(name, protocol)

    def _downgrade(self, name: str) -> None:
        if name in self.nodes and self.nodes[name].host.protocol != PROTOCOL:
            self.stop_node(name, vanished=False)
        self.start_node(name)

    def _expect_notice(self, name: str, lasts: float) -> None:
        """Check later that each front end has noticed that it hears nothing of a node any more."""
        for front_end in self.front_ends:
            node, host = front_end.nodes.get(name), front_end.host
            if lasts > NOTICED and node is not None and node.is_up and not host.frozen and not self.network.lags:
                self.loop.call_later(NOTICED, self._check_notice, front_end, node, node.link, host.slept)

    def _check_notice(self, front_end: FrontEnd, node: Node, link: Link, slept: float) -> None:
        host = front_end.host
        if node._link is link and not host.dead and not host.frozen and host.slept == slept:
            front_end.problem(f"it has not noticed within {NOTICED:g} s that it hears nothing of {node.name}")

    def _take_over(self, step: Step) -> None:
        """A front end fails, in one way or another, and a second one begins."""
        front_end = self.active
        if step.how == "freeze":
            front_end.host.freeze(step.more)
        if step.how in ("freeze", "lives"):
            self.start_front_end()
            if len(self.front_ends) > 3:
                self.stop_front_end(self.front_ends[0], vanished=False)
            return
        # Callers find nobody until the next one has started: here that takes no time, and its nodes take theirs.
        self.start_front_end()
        self.stop_front_end(front_end, vanished=step.how == "vanish")

    def _dismiss(self, front_end: FrontEnd, name: str, lasts: float) -> None:
        address = f"{name}:8010"

        def back() -> None:
            if not front_end.host.dead and not front_end.host.frozen:
                front_end.host.do(lambda: front_end.nodes.add(name, address))

        if not front_end.host.frozen:
            front_end.host.do(lambda: front_end.nodes.remove(name))
            self.loop.call_later(lasts, back)

    # What holds in the end

    async def _settle(self) -> None:
        """Nothing goes wrong any more: wait until all is well."""
        self._settling = True
        self.network.mend()
        for front_end in self.front_ends[:-1]:
            self.stop_front_end(front_end, vanished=False)
        active = self.active
        active.host.wake()
        for name in NODES:
            if name in self.nodes:
                self.nodes[name].host.wake()
                self.nodes[name].machine.batch_faults.clear()
                self.nodes[name].machine.start_faults.clear()
                self.nodes[name].machine.lost.clear()
            self._downgrade(name)
            active.host.do(lambda name=name: active.nodes.add(name, f"{name}:8010"))  # type: ignore[misc]
        unwell = "it has not started"
        for count in range(int(SETTLE)):
            await asyncio.sleep(1.0)
            if self.problems:
                raise ViolationError(self.problems[0])
            if count == 3:
                active.host.do(active.plan_again)
            if count > 3 and not (unwell := active.unwell() or self._unwell()):
                return
            if "permanently" in unwell:
                await active.host.begin(active.revive())
        raise ViolationError(f"{SETTLE:g} s after the last fault: {unwell}")

    def _unwell(self) -> str:
        """Say what is not as it should be on nodes."""
        lanes = self.active.orchestrator.rollout.lanes
        for name, node in self.nodes.items():
            here = {lane.local for lane in lanes if lane.device.node == name}
            if node.backend.opened != here:
                return f"{name} has partitions {sorted(node.backend.opened)}, and {sorted(here)} are planned"
            if len(node.agent._sessions) != 1:
                return f"{name} has {len(node.agent._sessions)} connections"
            if any(pool._flights for pool in node.pools):
                return f"{name} is at work"
        return ""

    async def _probe(self) -> None:
        """Everything that is planned is served again."""
        active = self.active
        lanes, dispatched = active.orchestrator.rollout.lanes, active.dispatcher.lanes
        if dispatched.keys() != lanes.keys():
            raise ViolationError(f"lanes {sorted(lanes)}, dispatched to {sorted(dispatched)}")
        for lane in dispatched.values():
            if not lane.available or lane.batch is not None:
                raise ViolationError(f"{lane.id} is not available, and nothing is wrong with it")
        models = {model for lane in dispatched.values() for model in lane.queues}
        for rows in (1, 3, 11):
            probes = [self._send(Step(self.loop.now, "request", rows, 3.0, f"{model} small")) for model in MODELS]
            await asyncio.sleep(1.0)
            for probe in probes:
                if probe is None or probe.served != (probe.model in models):
                    raise ViolationError(f"{probe}, asked when all was well: {probe and probe.answers}")
        if any(not task.done() for task in active.applied):
            raise ViolationError("changes of plan have no answer")
        for caller in active.callers:
            if len(caller.answers) != 1:
                raise ViolationError(f"{caller} got {len(caller.answers)} answers")

    async def _stop(self) -> None:
        """Nothing is left."""
        active = self.active
        await active.host.begin(active.stop())
        await asyncio.sleep(7.0)
        if active.driver._callers or active.driver._split or active.driver._running:
            raise ViolationError("the driver keeps requests after the server stopped")
        for caller in active.callers:
            caller.answers.clear()
        for name, node in self.nodes.items():
            if alive := [process.pid for process in node.machine.processes if process.alive]:
                raise ViolationError(f"{len(alive)} processes are left on {name} after its front end has gone")
            if node.backend.opened:
                raise ViolationError(f"partitions {sorted(node.backend.opened)} of {name} are left open")
            await node.host.begin(node.agent.stop("the run is over"))
        for arena in (active.arena, *(node.arena for node in self.nodes.values())):
            if arena.free != arena.size:
                gc.collect()
            if arena.free != arena.size:
                raise ViolationError(f"{arena.size - arena.free} bytes of an arena never came back")

    def close(self) -> None:
        """End all machines, and the loop."""
        for name in [*self.nodes]:
            self.stop_node(name, vanished=True)
        for front_end in [*self.front_ends]:
            self.stop_front_end(front_end, vanished=True)
        for task in asyncio.all_tasks(self.loop):  # their machines are dead, and they have no time to end in good order
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(Exception):
                task.get_coro().close()
        self.loop.close()


@contextlib.contextmanager
def patched(run: Run) -> Iterator[None]:
    """Let the product take time, processes and constants from a run."""
    run.loop.on_entered = run.enter
    clock = Clock(run.loop)
    with contextlib.ExitStack() as stack:
        for module in (pool_module, observer_module, link_module, remote_pool_module, session_pool_module):
            stack.enter_context(mock.patch.object(module, "time", clock))
        for target, name, value in (
            (process_module, "subprocess", mock.Mock(Popen=run.popen)),
            (session_pool_module, "Pool", run.make_pool),
            (Node, "received", run.watched(Node)),
            (Session, "received", run.watched(Session)),
            (session_module, "PROTOCOL", PROTOCOL),
            (node_module, "PROTOCOL", PROTOCOL),
            (node_module, "FRONT_END", node_module.FRONT_END),
            (session_module, "PART", PART),
            (node_module, "PART", PART),
            (link_module, "WRITE_LIMIT", KERNEL if run.schedule.narrow else link_module.WRITE_LIMIT),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def play(schedule: Schedule) -> Run:
    """Run a schedule to its end; what did not hold is in `problems`."""
    folder = Path(tempfile.mkdtemp(prefix="cotenant-chaos-"))
    loop = NetworkLoop()
    run = Run(schedule, loop, folder)
    log = _Log()
    logger = logging.getLogger("cotenant")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(log)
    try:
        with patched(run):
            loop.run_until_complete(run.run())
    except ViolationError as failed:
        run.problem(str(failed))
    except Exception as error:  # noqa: BLE001  # whatever it is, it is a finding
        run.problem(f"{type(error).__name__}: {error}")
    finally:
        logger.removeHandler(log)
        logger.propagate = propagate
        run.close()
        shutil.rmtree(folder, ignore_errors=True)
    run.problems += log.unexpected + loop.problems
    return run


def failure(schedule: Schedule) -> str:
    """Return what `describe_failure` does of a schedule."""
    return describe_failure(schedule, lambda played: play(played).problems)
