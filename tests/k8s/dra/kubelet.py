"""A kubelet of the tests' own, with the container runtime behind it: it finds plugins by their sockets, registers them,
and has claims prepared over gRPC, as strict as the real one about what it is answered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grpc

from cotenant.protocol.kubelet import dra, registration
from tests.k8s.eventually import eventually

# As the real one's generated code has them.
GET_INFO = "/pluginregistration.Registration/GetInfo"
NOTIFY = "/pluginregistration.Registration/NotifyRegistrationStatus"
PREPARE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
UNPREPARE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources"

QUALIFIED = re.compile(r"([a-z0-9.-]+/[A-Za-z0-9_-]+)=([A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?)")


class Kubelet:
    """folder: its own, with the sockets of plugins. cdi: where the runtime looks for specifications."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "kubelet"
        self.cdi = folder / "cdi"
        self.endpoint = ""

    async def register(self, error: str = "") -> Any:
        """Find a plugin and register it, or tell it that it is not taken."""
        registry = self.folder / "plugins_registry"
        (path,) = await eventually(lambda: sorted(registry.glob("*.sock")))
        info = await self._call(path, GET_INFO, registration.InfoRequest(), registration.PluginInfo)
        assert (info.type, info.name) == ("DRAPlugin", "cotenant.dev")
        assert "v1.DRAPlugin" in info.supported_versions
        assert Path(info.endpoint).is_absolute() and Path(info.endpoint).is_socket()
        status = registration.RegistrationStatus(plugin_registered=not error, error=error)
        await self._call(path, NOTIFY, status, registration.RegistrationStatusResponse)
        self.endpoint = info.endpoint
        return info

    async def prepare(self, *claims: dict[str, Any]) -> dict[str, list[str] | str]:
        """Return for each claim, by its name, the CDI devices or the error."""
        request = dra.NodePrepareResourcesRequest(claims=[reference(each) for each in claims])
        response = await self._call(Path(self.endpoint), PREPARE, request, dra.NodePrepareResourcesResponse)
        assert set(response.claims) == {each["metadata"]["uid"] for each in claims}
        found: dict[str, list[str] | str] = {}
        for each in claims:
            answer = response.claims[each["metadata"]["uid"]]
            assert bool(answer.error) != bool(answer.devices)
            results = each.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
            known = {(one["pool"], one["device"]) for one in results}
            assert {(one.pool_name, one.device_name) for one in answer.devices} <= known
            ids = [one for device in answer.devices for one in device.cdi_device_ids]
            found[each["metadata"]["name"]] = answer.error or ids
        return found

    async def unprepare(self, *claims: dict[str, Any]) -> dict[str, str]:
        """Return for each claim, by its name, the error."""
        request = dra.NodeUnprepareResourcesRequest(claims=[reference(each) for each in claims])
        response = await self._call(Path(self.endpoint), UNPREPARE, request, dra.NodeUnprepareResourcesResponse)
        assert set(response.claims) == {each["metadata"]["uid"] for each in claims}
        return {each["metadata"]["name"]: response.claims[each["metadata"]["uid"]].error for each in claims}

    def container(self, ids: list[str] | str) -> tuple[dict[str, str], list[dict[str, Any]], list[str], list[str]]:
        """Return what a container that is started with CDI devices gets by the files of our kind: environment, mounts,
        device nodes; and which devices are of another kind."""
        assert isinstance(ids, list), ids
        specifications = [json.loads(path.read_text()) for path in sorted(self.cdi.glob("*.json"))]
        environment: dict[str, str] = {}
        mounts: list[dict[str, Any]] = []
        nodes: list[str] = []
        others: list[str] = []
        for each in ids:
            match = QUALIFIED.fullmatch(each)
            assert match, each
            if match[1] != "cotenant.dev/claim":
                others.append(each)
                continue
            (edits,) = [
                device["containerEdits"]
                for specification in specifications
                if specification["kind"] == match[1]
                for device in specification["devices"]
                if device["name"] == match[2]
            ]
            assert edits, "a device without edits is refused"
            environment |= dict(one.split("=", 1) for one in edits.get("env", []))
            mounts += edits.get("mounts", [])
            nodes += [one["path"] for one in edits.get("deviceNodes", [])]
        return environment, mounts, nodes, others

    async def _call(self, path: Path, method: str, request: Any, answer: Any) -> Any:
        # A kubelet that cannot connect tries again.
        options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"unix://{path}", options=options) as channel:
            call: Any = channel.unary_unary(
                method,
                request_serializer=lambda each: each.SerializeToString(),
                response_deserializer=answer.FromString,
            )
            return await call(request, timeout=45, wait_for_ready=True)


def reference(claim: dict[str, Any]) -> Any:
    metadata = claim["metadata"]
    return dra.Claim(namespace=metadata["namespace"], uid=metadata["uid"], name=metadata["name"])
