"""A node of the harness: the agent, sessions and pools of the product, with processes and devices of the harness."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from cotenant.backends import Launch
from cotenant.backends.fake import Fake
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.live.confinement import Confinement
from cotenant.live.nodes.agent import Agent
from cotenant.live.nodes.model_store import ModelStore
from cotenant.live.nodes.session import NodeOffer
from cotenant.live.pool import Pool
from cotenant.worker.arena import PAGE, Arena
from tests.chaos.cluster.hosts import Host
from tests.chaos.processes import Machine

TOKEN = "a token of a test, which is long enough"  # noqa: S105
PORT = 8010
PLACES = 4  # workers that a device has room for
WORKER = 64 << 20  # bytes of a device that a worker takes
DEVICE = DeviceId("cpu")


def kind(name: str, *, in_place: bool) -> Kind:
    return Kind(
        name=name,
        cuts=tuple(range(50, 1001, 50)),
        count=1,
        memory=PLACES * WORKER,
        in_place=(200, 1000) if in_place else (),
        batches_grow=in_place,
    )


class NodeBackend(Fake):
    """Opens partitions, each for one owner."""

    def __init__(self, node: ChaosNode, kinds: tuple[Kind, ...], *, shared: bool) -> None:
        super().__init__(kinds)
        self.opened: set[LaneId] = set()
        self._node = node
        self._shared = shared

    def _launch(self, lane: LaneId) -> Launch:
        return Launch(fake=True, env={"LANE": str(lane)}, process=str(lane.device) if self._shared else "")

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        if lane in self.opened:
            self._node.problem(f"the partition of {lane} was opened twice")
        self._node.check_owner()
        self.opened.add(lane)
        return self._launch(lane)

    def resize(self, shares: Mapping[LaneId, int]) -> dict[LaneId, Launch]:
        return {lane: self._launch(lane) for lane in shares}

    def close(self, lane: LaneId) -> None:
        self.opened.discard(lane)

    def lost(self) -> dict[DeviceId, str]:
        return dict(self._node.machine.lost)


class ChaosNode:
    """One life of a node's program, from its start to its death."""

    def __init__(
        self, host: Host, folder: Path, tell: Callable[[str], None], *, in_place: bool, shared: bool, warm: int
    ) -> None:
        self.host = host
        self.machine = Machine(host.loop, self.problem)
        self.pools: list[Pool] = []
        self._tell = tell
        self.backend = NodeBackend(self, (kind("cpu", in_place=in_place),), shared=shared)
        self.arena = self.machine.arena = Arena(64 * PAGE)
        offer = NodeOffer(
            backend=self.backend,
            kinds=self.backend.fleet(),
            arena=self.arena,
            store=ModelStore(folder, 1 << 26),
            machine="a machine of a test",
            warm_workers=warm,
            confinement=Confinement(),
            grace=5.0,
        )
        self.agent = Agent(offer, [TOKEN])
        host.begin(self.agent.listen(host.name, PORT))

    def problem(self, text: str) -> None:
        self._tell(f"{self.host.name}: {text}")

    def check_owner(self) -> None:
        """Check that one front end at most has the node."""
        owners = [session for session in self.agent._sessions if session._begun]
        if len(owners) > 1:
            self.problem(f"{len(owners)} sessions have it at once")

    def die(self) -> None:
        self.host.die()
        for process in self.machine.processes:
            process.exit(-9)
        for pool in self.pools:
            for line in pool._workers:
                line._connection.close()
            for held in pool.processes._running:
                held._connection.close()
                os.close(held._output)
        self.arena.close()
