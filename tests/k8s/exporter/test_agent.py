"""The exporter over a fake NVIDIA driver and an API server's double."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from cotenant.backends.mig import cut_gpu
from cotenant.errors import DeviceError
from cotenant.k8s.client import ApiClient
from cotenant.k8s.exporter.agent import DeviceAgent
from cotenant.k8s.exporter.metrics import DeviceCollector
from cotenant.k8s.exporter.readings import read_devices
from cotenant.k8s.pods.inventory import DEVICES, read_node
from cotenant.k8s.pods.objects import CUTS
from cotenant.k8s.pods.request import PLACEMENT, SharePlacement, read_pod
from tests.driver.build import fitted, loaded
from tests.k8s.api_double import ApiDouble
from tests.k8s.eventually import eventually
from tests.k8s.play import play
from tests.k8s.pods.cluster import pod_object
from tests.k8s.pods.test_command import write_kubeconfig

GIB = 1 << 30


def node(name: str = "n1", **annotations: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "annotations": annotations}, "status": {}}


def placed_pod(name: str, device: str, visible: str, *, on: str = "n1", slot: int = 0) -> dict[str, Any]:
    placement = SharePlacement(
        node=on, device=device, visible=visible, slot=slot, share=250, model="mid", slo=0.1, rate=50.0
    )
    text = msgspec.json.encode(placement).decode()
    return pod_object(name, gated=False, annotations={PLACEMENT: text}, nodeName=on)


def reported(api: ApiDouble) -> Any:
    found = read_node(api.objects("nodes")[0])
    return () if found is None else found.devices


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Metric and partition, or device, to value."""
    return {
        (each.name, each.labels.get("partition", each.labels.get("device", ""))): each.value
        for family in registry.collect()
        for each in family.samples
    }


@contextmanager
def driver(gpus: str, state: Path | None = None) -> Iterator[None]:
    with loaded(gpus, state=state):
        yield


def test_readings_are_what_the_driver_tells(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with driver("h200,h200-mig=3g.71gb+1g.18gb", state):
        state.write_text(f"process 0 1234 {GIB}\n")
        whole, cut = read_devices(recut=True)
        assert (whole.report.kind, whole.report.mig, whole.report.recut) == ("h200", False, False)
        assert whole.processes == 1 and whole.used[whole.report.uuid] >= GIB
        assert (cut.report.kind, cut.report.recut, cut.processes) == ("h200-mig", True, 0)
        assert [(one.profile, one.share) for one in cut.report.instances] == [("3g.71gb", 428), ("1g.18gb", 142)]
        assert set(cut.used) >= {one.uuid for one in cut.report.instances}


def test_devices_are_reported_once_and_again_where_they_change(tmp_path: Path) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("nodes", node())
        agent = DeviceAgent("n1", read_devices, client)
        await agent.look()
        assert [each.kind for each in reported(api)] == ["h200"]
        before = len(api.writes)
        await agent.look()
        assert len(api.writes) == before == 1
        changed = api.objects("nodes")[0]
        changed["metadata"]["annotations"][DEVICES] = "[]"  # somebody edits it
        api.put("nodes", changed)
        await agent.look()
        assert [each.kind for each in reported(api)] == ["h200"]

    with driver("h200"):
        play(scenario)


def test_api_server_that_is_away_is_reported_to_later(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("nodes", node())
        agent = DeviceAgent("n1", read_devices, client)
        with api.failing(500):
            await agent.look()
            await agent.look()
        assert caplog.text.count("refused (500)") == 1 and len(agent.readings) == 1
        await agent.look()
        assert len(reported(api)) == 1

    with driver("h200"):
        play(scenario)


def test_metrics_tell_partitions_and_who_has_them() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        whole, cut = read_devices()
        first, second = cut.report.instances
        api.put("nodes", node())
        api.put("pods", placed_pod("a", whole.report.uuid, whole.report.uuid))
        api.put("pods", placed_pod("b", cut.report.uuid, second.uuid))
        api.put("pods", placed_pod("c", cut.report.uuid, first.uuid, on="n2"))
        agent = DeviceAgent("n1", read_devices, client, interval=0.02)
        running = asyncio.create_task(agent.run())
        await eventually(lambda: len(agent.users()) == 2)
        found = samples(DeviceCollector("n1", lambda: agent.readings, agent.users).registry())
        assert found["cotenant_device_partition_share_ratio", "0"] == 0.25
        assert found["cotenant_device_partition_users", second.uuid] == 1
        assert found["cotenant_device_partition_users", first.uuid] == 0
        assert found["cotenant_device_partition_user_rate", second.uuid] == 50.0
        assert found["cotenant_device_free_share_ratio", whole.report.uuid] == 0.75
        assert found["cotenant_device_free_share_ratio", cut.report.uuid] == pytest.approx(1 - second.share / 1000)
        assert found["cotenant_device_memory_bytes", whole.report.uuid] == whole.report.memory
        assert found["cotenant_device_info", whole.report.uuid] == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with driver("h200,h200-mig=3g.71gb+1g.18gb"):
        play(scenario)


def test_idle_gpu_is_cut_as_the_controller_asks_and_one_in_use_is_not() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        [reading] = read_devices(recut=True)
        uuid, cuts = reading.report.uuid, {reading.report.uuid: (285, 428)}
        api.put("nodes", node(**{CUTS: msgspec.json.encode(cuts).decode()}))
        api.put("pods", placed_pod("a", uuid, reading.report.instances[0].uuid))
        agent = DeviceAgent("n1", lambda: read_devices(recut=True), client, cut_gpu, interval=0.02)
        running = asyncio.create_task(agent.run())
        await eventually(agent.users)
        await eventually(lambda: reported(api))
        assert [one.profile for one in reported(api)[0].instances] == ["1g.18gb"]
        api.remove("pods", "a", "default")
        await eventually(lambda: sorted(one.share for one in reported(api)[0].instances) == [285, 428])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with driver("h200-mig=1g.18gb"):
        play(scenario)


def test_cut_that_does_not_fit_is_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[tuple[int, ...]] = []

    def cut(device: str, shares: tuple[int, ...]) -> None:
        tried.append(shares)
        raise DeviceError("no room")

    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        [reading] = read_devices(recut=True)
        api.put("nodes", node(**{CUTS: msgspec.json.encode({reading.report.uuid: (571, 571)}).decode()}))
        agent = DeviceAgent("n1", lambda: read_devices(recut=True), client, cut, interval=0.01)
        running = asyncio.create_task(agent.run())
        await eventually(lambda: tried)
        await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with driver("h200-mig=1g.18gb"):
        play(scenario)
    assert tried == [(571, 571)] and "cannot be cut into 571, 571 ‰: no room" in caplog.text


def test_command_exports_and_reports(tmp_path: Path) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        import os

        api.put("nodes", node())
        options = ["--node=n1", "--port=0", "--json", f"--kubeconfig={write_kubeconfig(tmp_path, api.url)}"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cotenant", "device-exporter", *options),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **fitted("h200")},
        )
        assert process.stdout is not None and process.stderr is not None
        try:
            address = json.loads(await process.stdout.readline())["metrics"]
            await eventually(lambda: reported(api), 60)
            url = f"http://{address}/metrics"
            text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
            assert 'kind="h200",mig="false",node="n1"' in text
            process.send_signal(signal.SIGTERM)
            await process.stderr.read()
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    play(scenario, 120)


def test_users_can_be_asked_for_while_pods_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus asks in a thread of its own."""

    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("nodes", node())
        api.put("pods", placed_pod("a", "GPU-0", "GPU-0"))
        api.put("pods", placed_pod("b", "GPU-0", "GPU-0"))
        agent = DeviceAgent("n1", read_devices, client, interval=0.02)
        running = asyncio.create_task(agent.run())
        await eventually(lambda: len(agent.users()) == 2)
        assert agent._pods is not None
        objects: Any = agent._pods.objects

        def read(pod: dict[str, Any]) -> object:
            objects.pop(next(reversed(objects)), None)
            return read_pod(pod)

        monkeypatch.setattr("cotenant.k8s.exporter.agent.read_pod", read)
        assert len(agent.users()) == 2
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with driver("h200"):
        play(scenario)
