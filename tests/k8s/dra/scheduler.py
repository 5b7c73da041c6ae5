"""As much of a scheduler as allocates claims for a device by its UUID, with consumable capacity."""

from __future__ import annotations

import copy
import re
import uuid
from typing import Any

from cotenant.k8s.dra.quantities import read_quantity
from tests.k8s.api_double import ApiDouble

EXPRESSION = re.compile(r'device\.attributes\["([a-z.]+)"\]\.uuid == "([^"]+)"')


def allocate(api: ApiDouble, name: str, pod: dict[str, Any]) -> dict[str, Any] | None:
    """Allocate a claim and reserve it for a pod; None where nothing fits."""
    claims = api.objects("resourceclaims")
    body = copy.deepcopy(next(each for each in claims if each["metadata"]["name"] == name))
    (request,) = body["spec"]["devices"]["requests"]
    asked = request["exactly"]
    match = EXPRESSION.fullmatch(asked["selectors"][0]["cel"]["expression"])
    assert match
    for published in api.objects("resourceslices"):
        spec = published["spec"]
        for device in spec["devices"]:
            if spec["driver"] != match[1] or device["attributes"]["uuid"]["string"] != match[2]:
                continue
            consumed = {key: _consumed(asked["capacity"]["requests"], key, device) for key in device["capacity"]}
            used = _used(claims, spec["pool"]["name"], device["name"])
            if any(used.get(key, 0) + consumed[key] > _total(device, key) for key in consumed):
                return None
            result = {
                "request": request["name"],
                "driver": spec["driver"],
                "pool": spec["pool"]["name"],
                "device": device["name"],
                "shareID": str(uuid.uuid4()),
                "consumedCapacity": {key: str(value) for key, value in consumed.items()},
            }
            config = [{"source": "FromClaim", **each} for each in body["spec"]["devices"].get("config", [])]
            metadata = pod["metadata"]
            body["status"] = {
                "allocation": {"devices": {"results": [result], "config": config}},
                "reservedFor": [{"resource": "pods", "name": metadata["name"], "uid": metadata["uid"]}],
            }
            return api.put("resourceclaims", body)
    return None


def _total(device: dict[str, Any], key: str) -> int:
    return read_quantity(device["capacity"][key]["value"], key)


def _consumed(requests: dict[str, str], key: str, device: dict[str, Any]) -> int:
    policy = device["capacity"][key].get("requestPolicy", {})
    return read_quantity(requests.get(key, policy.get("default", device["capacity"][key]["value"])), key)


def _used(claims: list[dict[str, Any]], pool: str, device: str) -> dict[str, int]:
    used: dict[str, int] = {}
    for claim in claims:
        for result in claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", []):
            if (result["pool"], result["device"]) == (pool, device):
                for key, value in result["consumedCapacity"].items():
                    used[key] = used.get(key, 0) + read_quantity(value, key)
    return used
