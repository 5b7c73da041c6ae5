"""The slice of a Service names the front end that leads, and no address that only itself can reach."""

from __future__ import annotations

import pytest

from cotenant.errors import ConfigError
from cotenant.k8s.endpoints import differs, endpoint_slice


def test_slice_names_one_address_and_its_ports() -> None:
    assert endpoint_slice("cotenant", "10.0.0.7", {"http": 8000, "grpc": 8001}) == {
        "metadata": {
            "name": "cotenant",
            "labels": {
                "kubernetes.io/service-name": "cotenant",
                "endpointslice.kubernetes.io/managed-by": "cotenant.dev",
            },
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.0.0.7"], "conditions": {"ready": True}}],
        "ports": [
            {"name": "grpc", "port": 8001, "protocol": "TCP"},
            {"name": "http", "port": 8000, "protocol": "TCP"},
        ],
    }
    assert endpoint_slice("cotenant", "fd00::7", {})["addressType"] == "IPv6"


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.1", "is of this machine alone"), ("::", "is of this machine alone"), ("front", "is not an IP address")],
)
def test_address_that_others_cannot_reach_is_refused(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        endpoint_slice("cotenant", address, {})


def test_what_the_server_adds_is_no_difference_and_another_address_is_one() -> None:
    wanted = endpoint_slice("cotenant", "10.0.0.7", {"http": 8000})
    found = {**wanted, "metadata": {**wanted["metadata"], "uid": "1", "resourceVersion": "2"}}
    assert not differs(found, wanted)
    assert differs(found, endpoint_slice("cotenant", "10.0.0.8", {"http": 8000}))
    assert differs({**found, "metadata": {"name": "cotenant"}}, wanted)
