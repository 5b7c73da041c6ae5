"""A device that is lost under a server: the models on the others are served as before, and it says so."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import pytest

from cotenant.backends import Launch
from cotenant.backends.cpu import Cpu
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.plan import Device, Partition
from cotenant.errors import FailedError, UnavailableError
from cotenant.live import control_driver
from cotenant.live.deployment import Deployment
from cotenant.live.metrics import render
from cotenant.live.oip import InferResponse
from cotenant.live.server import Server
from cotenant.predictors.samples import Sample
from tests.live.deployment import repository, sample_deployment
from tests.live.test_server import ask, floats, indices, run, until


class Two(Cpu):
    """Two devices of one kind, either of which can be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: dict[DeviceId, str] = {}

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        return Launch(process=str(lane.device))

    def lost(self) -> dict[DeviceId, str]:
        return self.gone


def apart(given: Deployment) -> Deployment:
    """Each model on a device of its own."""
    partitions = [
        Partition(share=partition.share, placements=(placement,)) for _, partition, placement in given.plan.placements()
    ]
    devices = tuple(Device(id=DeviceId("cpu", number), partitions=(it,)) for number, it in enumerate(partitions))
    return msgspec.structs.replace(given, plan=msgspec.structs.replace(given.plan, devices=devices))


def test_lost_device_models_on_other_devices_keep_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_driver, "TICK", 0.05)

    async def prepare(wanted: Collection[str], samples: Sequence[Sample], configs: object, kept: object) -> Deployment:
        raise FailedError("nothing else is to be served")

    async def main() -> None:
        backend = Two()
        given = apart(sample_deployment(repository(tmp_path)))
        home = {placement.model: device.id for device, _, placement in given.plan.placements()}
        server = Server(given, backend, prepare)
        await server.start()
        try:
            assert home.keys() == {"identity", "lookup"} and len(set(home.values())) == 2
            gone = home["identity"]
            backend.gone = {gone: "Xid 79, it has fallen off the bus"}
            await until(lambda: not server.model_ready("identity"))
            refused = await ask(server, "identity", floats())
            assert isinstance(refused, UnavailableError)
            assert isinstance(await ask(server, "lookup", indices(1)), InferResponse)
            states = {entry.name: (entry.state, entry.reason) for entry in server.index()}
            assert states["lookup"] == ("READY", "")
            assert states["identity"] == ("UNAVAILABLE", f"{gone} is lost: Xid 79, it has fallen off the bus")
            workers = {worker.lane.device: worker for worker in server._rollouts.workers()}
            assert (workers[gone].state, workers[gone].pid) == ("lost", None)
            text = render(server.metrics(), "")[0].decode()
            assert f'cotenant_partition_lost{{device="{gone}",partition="0"}} 1' in text
            assert f'cotenant_partition_lost{{device="{home["lookup"]}",partition="0"}} 0' in text

            backend.gone = {}
            await until(lambda: server.model_ready("identity"))
            assert isinstance(await ask(server, "identity", floats()), InferResponse)
        finally:
            await server.stop(1.0)

    run(main())
