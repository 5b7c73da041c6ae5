"""Hold objects against what is published of resource.k8s.io/v1: the schemas, and the rules of the API server's own
validation that schemas cannot say (kubernetes `pkg/apis/resource/validation`, `pkg/apis/resource/types.go`)."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate

VERSIONS = ("1.34", "1.37")  # the first that has resource.k8s.io/v1, and the newest that is known here
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")


def check(body: dict[str, Any]) -> None:
    """Raise for an object that is not of its published schema."""
    for version in VERSIONS:
        kubernetes_validate.validate(body, version, strict=True)


def check_slice(body: dict[str, Any]) -> None:
    """Raise for a ResourceSlice that an API server would refuse."""
    check(body)
    name, spec = body["metadata"]["name"], body["spec"]
    assert len(name) <= 253 and SUBDOMAIN.fullmatch(name), name
    assert len(spec["driver"]) <= 63 and SUBDOMAIN.fullmatch(spec["driver"])
    assert SUBDOMAIN.fullmatch(spec["pool"]["name"]) and spec["pool"]["resourceSliceCount"] > 0
    devices = spec["devices"]
    assert len(devices) <= 128
    assert len({each["name"] for each in devices}) == len(devices)
    for device in devices:
        assert LABEL.fullmatch(device["name"]), device["name"]
        assert len(device["attributes"]) + len(device["capacity"]) <= 32
        for name in (*device["attributes"], *device["capacity"]):
            assert IDENTIFIER.fullmatch(name), name
        for attribute in device["attributes"].values():
            assert len(attribute) == 1
            assert len(str(attribute.get("string", ""))) <= 64
        for capacity in device["capacity"].values():
            policy = capacity.get("requestPolicy")
            if policy is None:
                continue
            assert device["allowMultipleAllocations"] and not policy.keys() - {"default", "validRange"}
            low, high, step = (int(policy["validRange"][key]) for key in ("min", "max", "step"))
            assert low <= int(policy["default"]) <= high <= int(capacity["value"])
            assert (high - low) % step == (int(policy["default"]) - low) % step == 0
