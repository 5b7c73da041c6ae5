"""The driver as a kubelet meets it: over its sockets, with an API server's double behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cotenant.errors import ConfigError
from cotenant.k8s.client import ApiClient
from cotenant.k8s.dra.container_edits import PIPE_DIRECTORY, SHARED_MEMORY, ContainerOptions
from cotenant.k8s.dra.devices import NodeDevice
from cotenant.k8s.dra.node_plugin import NodeOptions, NodePlugin, node_plugin
from cotenant.protocol.kubelet import dra
from tests.k8s.api_double import ApiDouble
from tests.k8s.dra.kubelet import UNPREPARE, Kubelet
from tests.k8s.dra.samples import GIB, NODE, claim, config, gpu, mig_gpu, result
from tests.k8s.eventually import eventually
from tests.k8s.play import play


class Node:
    """A node with its kubelet, on which drivers are started and stopped. devices: what is found on it."""

    def __init__(self, api: ApiDouble, client: ApiClient, folder: Path) -> None:
        self.api = api
        self.client = client
        self.kubelet = Kubelet(folder)
        self.devices: list[NodeDevice] = [gpu(0), gpu(1)]
        self.container = ContainerOptions()
        api.put("nodes", {"metadata": {"name": NODE}})

    @asynccontextmanager
    async def driver(self) -> AsyncIterator[NodePlugin]:
        options = NodeOptions(
            node=NODE, kubelet=self.kubelet.folder, cdi=self.kubelet.cdi, container=self.container, period=0.05
        )
        async with node_plugin(self.client, options, lambda: tuple(self.devices)) as running:
            await self.kubelet.register()
            yield running

    def claim(self, name: str, *results: dict[str, Any], configs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        return self.api.put("resourceclaims", claim(name, *results, configs=configs))

    def files(self) -> list[str]:
        return sorted(path.name for path in self.kubelet.cdi.iterdir())


def on_node(folder: Path, scenario: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
    async def run(api: ApiDouble, client: ApiClient) -> None:
        await scenario(Node(api, client, folder))

    play(run)


def test_kubelet_registers_prepares_and_unprepares(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver() as running:
            assert running.plugin.is_registered
            made = node.claim("a", result(gpu(1), "200", "16Gi"), configs=[config(share=200, memory=16 * GIB)])
            prepared = await node.kubelet.prepare(made)
            environment, mounts, nodes, others = node.kubelet.container(prepared["a"])
            assert environment == {
                "COTENANT_DEVICE_UUID": gpu(1).uuid,
                "COTENANT_SHARE": "20",
                "CUDA_VISIBLE_DEVICES": gpu(1).uuid,
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20",
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=16384M",
            }
            assert (mounts, nodes, others) == ([], [], [f"nvidia.com/gpu={gpu(1).uuid}"])
            assert await node.kubelet.unprepare(made) == {"a": ""}
            assert node.files() == []
            assert running.driver.claims == {}

    on_node(folder, scenario)


def test_prepare_again_gives_the_same_without_asking_the_server(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver():
            made = node.claim("a", result(gpu(0)))
            first = await node.kubelet.prepare(made)
            with node.api.away():
                assert await node.kubelet.prepare(made) == first
            node.api.remove("resourceclaims", "a", "default")
            assert await node.kubelet.prepare(made) == first

    on_node(folder, scenario)


def test_unprepare_of_what_was_never_prepared_succeeds(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver():
            made = node.claim("a", result(gpu(0)))
            for _ in range(2):
                assert await node.kubelet.unprepare(made) == {"a": ""}

    on_node(folder, scenario)


def test_restarted_driver_goes_on_from_its_checkpoint(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver():
            made = node.claim("a", result(gpu(0), "600", "40Gi"))
            before = await node.kubelet.prepare(made)
            files = node.files()
        for path in node.kubelet.cdi.iterdir():  # as after a restart of the machine
            path.unlink()
        (node.kubelet.cdi / "cotenant.dev-claim_0.json").write_text("{}")
        (node.kubelet.cdi / "nvidia.json").write_text('{"kind": "nvidia.com/gpu", "devices": []}')
        async with node.driver():
            assert node.files() == [*files, "nvidia.json"]
            with node.api.away():
                assert await node.kubelet.prepare(made) == before
            other = node.claim("b", result(gpu(0), "500", "1Gi"))
            assert "40 %" in (await node.kubelet.prepare(other))["b"]
            await node.kubelet.unprepare(made)
        async with node.driver():
            assert node.kubelet.container((await node.kubelet.prepare(other))["b"])[0]["COTENANT_SHARE"] == "50"

    on_node(folder, scenario)


def test_wrong_claims_fail_alone(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver():
            unknown = config(shares=200)
            bodies = {
                "good": node.claim("good", result(gpu(0), "300", "8Gi")),
                "unknown": node.claim("unknown", result(gpu(0)), configs=[unknown]),
                "contradicts": node.claim("contradicts", result(gpu(0), "300"), configs=[config(share=200)]),
                "large": node.claim("large", result(gpu(0), "800", "8Gi")),
                "free": node.claim("free"),
                "gone": node.claim("gone", result(gpu(1))),
                "other": node.claim("other", result(gpu(1))),
            }
            node.api.remove("resourceclaims", "gone", "default")
            node.api.remove("resourceclaims", "other", "default")
            node.claim("other", result(gpu(1)))
            answers = await node.kubelet.prepare(*bodies.values())
            assert isinstance(answers.pop("good"), list)
            wanted = {
                "unknown": "unknown field `shares`",
                "contradicts": "planned with 200 ‰ of the device, and allocated 300 ‰",
                "large": "80 % of device GPU-00000000-0000-0000-0000-000000000000 are more than the 70 %",
                "free": "is not allocated",
                "gone": "claim default/gone is gone",
                "other": "is gone; another has its name",
            }
            assert answers.keys() == wanted.keys()
            for name, text in wanted.items():
                assert text in answers[name], answers[name]

    on_node(folder, scenario)


def test_second_claim_for_the_whole_of_a_device_fails(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver():
            one = node.claim("one", result(gpu(0), "1k", "80Gi"))
            two = node.claim("two", result(gpu(0), None, None))
            answers = await node.kubelet.prepare(one, two)
            environment = node.kubelet.container(answers["one"])[0]
            assert environment["COTENANT_SHARE"] == "100"
            assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in environment
            assert "0 % that are left beside default/one" in answers["two"]
            await node.kubelet.unprepare(one)
            assert isinstance((await node.kubelet.prepare(two))["two"], list)

    on_node(folder, scenario)


@pytest.mark.parametrize("end", ["deleted", "deallocated", "made anew"])
def test_share_of_a_claim_that_ended_unseen_is_free_again(folder: Path, end: str) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver() as running:
            old = node.claim("old", result(gpu(0), "1000", "80Gi"))
            await node.kubelet.prepare(old)
            new = node.claim("new", result(gpu(0), "1000", "80Gi"))
            assert "beside default/old" in (await node.kubelet.prepare(new))["new"]
            if end == "deallocated":
                node.api.put("resourceclaims", {**old, "status": {}})
            else:
                node.api.remove("resourceclaims", "old", "default")
            if end == "made anew":
                node.claim("old", result(gpu(0), "1000", "80Gi"))
            assert isinstance((await node.kubelet.prepare(new))["new"], list)
            assert set(running.driver.claims) == {new["metadata"]["uid"]}

    on_node(folder, scenario)


def test_claim_that_is_gone_fails_alone_where_its_share_goes_to_another_of_the_same_call(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver():
            old = node.claim("old", result(gpu(0), "1000", "80Gi"))
            await node.kubelet.prepare(old)
            new = node.claim("new", result(gpu(0), "1000", "80Gi"))
            node.api.remove("resourceclaims", "old", "default")
            answers = await node.kubelet.prepare(new, old)
            assert isinstance(answers["new"], list)
            assert answers["old"] == "claim default/old is gone"

    on_node(folder, scenario)


def test_api_server_that_fails_costs_the_claim_alone(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver():
            made = node.claim("a", result(gpu(0)))
            with node.api.failing(500, "GET /apis/resource.k8s.io/v1/namespaces/default/resourceclaims"):
                assert "is refused (500)" in (await node.kubelet.prepare(made))["a"]
            assert isinstance((await node.kubelet.prepare(made))["a"], list)

    on_node(folder, scenario)


def test_device_that_is_lost_is_given_to_no_claim(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver() as running:
            before = node.claim("before", result(gpu(0)))
            first = await node.kubelet.prepare(before)
            node.devices = [gpu(1)]
            await eventually(lambda: set(running.publisher.devices) == {gpu(1).name})
            answers = await node.kubelet.prepare(before, node.claim("after", result(gpu(0))))
            assert answers["before"] == first["before"]
            assert "is lost, or was never here; available: gpu-00000001" in answers["after"]

    on_node(folder, scenario)


def test_mig_instances_are_given_to_one_claim_each(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        node.devices = [mig_gpu()]
        async with node.driver():
            chosen = node.claim(
                "chosen", result(mig_gpu(), "285", "20Gi"), configs=[config(sharing="mig", instance="MIG-00000000-2")]
            )
            small = node.claim("small", result(mig_gpu(), "200", "10Gi"))
            third = node.claim("third", result(mig_gpu(), "428", "20Gi"))
            fourth = node.claim("fourth", result(mig_gpu(), "100", "1Gi"))
            answers = await node.kubelet.prepare(chosen, small, third, fourth)
            seen = {
                name: node.kubelet.container(ids)[0]["CUDA_VISIBLE_DEVICES"]
                for name, ids in answers.items()
                if name != "fourth"
            }
            assert seen == {"chosen": "MIG-00000000-2", "small": "MIG-00000000-1", "third": "MIG-00000000-0"}
            assert "claims that have one: default/chosen, default/small, default/third" in answers["fourth"]
            assert answers["small"][0] == "nvidia.com/gpu=MIG-00000000-1"

    on_node(folder, scenario)


def test_several_whole_devices_are_given_by_their_nodes(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        node.container = ContainerOptions(vendor="")
        async with node.driver():
            made = node.claim("pair", result(gpu(0), "1000", "80Gi", "a"), result(gpu(1), "1000", "80Gi", "b"))
            ids = (await node.kubelet.prepare(made))["pair"]
            assert isinstance(ids, list)
            first, second = ids
            environment, _, nodes, _ = node.kubelet.container([second])
            assert nodes == ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
            assert "CUDA_VISIBLE_DEVICES" not in environment
            assert "/dev/nvidia0" in node.kubelet.container([first])[2]

    on_node(folder, scenario)


def test_mps_folders_of_the_node_are_mounted(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        node.container = ContainerOptions(mps_pipe=Path("/run/mps/pipe"), mps_shm=Path("/run/mps/shm"))
        async with node.driver():
            shared, whole = node.claim("shared", result(gpu(0))), node.claim("whole", result(gpu(1), None, None))
            answers = await node.kubelet.prepare(shared, whole)
            environment, mounts, _, _ = node.kubelet.container(answers["shared"])
            assert environment["CUDA_MPS_PIPE_DIRECTORY"] == PIPE_DIRECTORY
            paths = [(each["hostPath"], each["containerPath"]) for each in mounts]
            assert paths == [("/run/mps/pipe", PIPE_DIRECTORY), ("/run/mps/shm", SHARED_MEMORY)]
            assert node.kubelet.container(answers["whole"])[1] == []

    on_node(folder, scenario)


def test_many_calls_at_once_give_no_share_twice(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver():
            claims = [node.claim(f"c{number}", result(gpu(0), "300", "1Gi")) for number in range(8)]
            answers = await asyncio.gather(*(node.kubelet.prepare(each) for each in claims))
            assert sum(isinstance(each, list) for answer in answers for each in answer.values()) == 3

    on_node(folder, scenario)


def test_files_that_cannot_be_written_cost_the_claim_alone(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver() as running:
            made = node.claim("a", result(gpu(0)))
            node.kubelet.cdi.rename(node.kubelet.cdi.with_name("away"))
            assert "its files cannot be written" in (await node.kubelet.prepare(made))["a"]
            assert running.driver.claims == {}
            node.kubelet.cdi.mkdir()
            assert isinstance((await node.kubelet.prepare(made))["a"], list)

    on_node(folder, scenario)


def test_uid_that_is_a_path_is_refused(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        victim = folder / "cdi" / "victim.json"
        async with node.driver():
            victim.write_text("{}")
            bad = {"metadata": {"name": "a", "namespace": "default", "uid": "/../../victim"}}
            assert "is not a uid" in (await node.kubelet.prepare(bad))["a"]
            assert "is not a uid" in (await node.kubelet.unprepare(bad))["a"]
            assert victim.exists()

    on_node(folder, scenario)


def test_bytes_that_are_no_message_are_refused_and_the_driver_goes_on(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver():
            async with grpc.aio.insecure_channel(f"unix://{node.kubelet.endpoint}") as channel:
                call: Any = channel.unary_unary(UNPREPARE)
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(b"\xff\xff\xff", timeout=30)
            assert await node.kubelet.unprepare(node.claim("a", result(gpu(0)))) == {"a": ""}

    on_node(folder, scenario)


def test_kubelet_that_does_not_take_the_driver_is_told_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver() as running:
            await node.kubelet.register(error="no such version")
            assert running.plugin.is_registered is False

    on_node(folder, scenario)
    assert "the kubelet does not take this driver: no such version" in caplog.text


def test_stopped_driver_leaves_the_registry(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver():
            pass
        assert list((node.kubelet.folder / "plugins_registry").iterdir()) == []
        (node.kubelet.folder / "plugins_registry" / "cotenant.dev-reg.sock").touch()  # as one that was killed leaves it
        async with node.driver():
            pass

    on_node(folder, scenario)


@pytest.mark.parametrize("text", ["", "{", '{"version": 2, "claims": []}', '{"version": 1, "claims": [{"uid": 1}]}'])
def test_checkpoint_that_is_damaged_is_refused(folder: Path, text: str) -> None:
    async def scenario(node: Node) -> None:
        state = node.kubelet.folder / "plugins" / "cotenant.dev"
        state.mkdir(parents=True)
        (state / "checkpoint.json").write_text(text)
        with pytest.raises(
            ConfigError, match=r"checkpoint.json: is not a checkpoint of this driver .* delete the file"
        ):
            async with node.driver():
                pass

    on_node(folder, scenario)


def test_folder_with_too_long_a_path_is_refused(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        node.kubelet.folder = folder / ("k" * 100)
        with pytest.raises(ConfigError, match="longer than the 107 bytes"):
            async with node.driver():
                pass

    on_node(folder, scenario)


def test_checkpoint_is_readable_text(folder: Path) -> None:
    async def scenario(node: Node) -> None:
        async with node.driver():
            made = node.claim("a", result(gpu(0)))
            await node.kubelet.prepare(made)
        text = (node.kubelet.folder / "plugins" / "cotenant.dev" / "checkpoint.json").read_text()
        (kept,) = json.loads(text)["claims"]
        assert (kept["uid"], kept["name"], kept["devices"][0]["share"]) == (made["metadata"]["uid"], "a", 200)

    on_node(folder, scenario)


def test_messages_are_those_of_the_kubelet_on_the_wire() -> None:
    request = dra.NodePrepareResourcesRequest(claims=[dra.Claim(namespace="n", uid="u", name="c")])
    assert request.SerializeToString() == b"\x0a\x09" + b"\x0a\x01n" + b"\x12\x01u" + b"\x1a\x01c"
    answer = dra.NodePrepareResourcesResponse()
    answer.claims["u"].devices.add(request_names=["r"], pool_name="p", device_name="d", cdi_device_ids=["i"])
    device = b"\x0a\x01r" + b"\x12\x01p" + b"\x1a\x01d" + b"\x22\x01i"
    entry = b"\x0a\x01u" + b"\x12" + bytes([len(device) + 2]) + b"\x0a" + bytes([len(device)]) + device
    assert answer.SerializeToString() == b"\x0a" + bytes([len(entry)]) + entry
