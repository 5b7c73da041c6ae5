"""The messages of the kubelet's plugin APIs are the .proto files beside them."""

from __future__ import annotations

import pytest

from cotenant.protocol import Messages
from cotenant.protocol.kubelet import DRA_SERVICE, REGISTRATION_SERVICE, dra, registration
from tests.protocol.test_protocol import compiled, written


@pytest.mark.parametrize(
    ("messages", "name"), [(dra, "dra.proto"), (registration, "pluginregistration.proto")], ids=["dra", "registration"]
)
def test_descriptors_match_the_proto_file(messages: Messages, name: str) -> None:
    assert compiled(messages.pool.FindFileByName(name)) == written(name)


@pytest.mark.parametrize(
    ("messages", "service", "methods"),
    [
        (dra, DRA_SERVICE, ["NodePrepareResources", "NodeUnprepareResources"]),
        (registration, REGISTRATION_SERVICE, ["GetInfo", "NotifyRegistrationStatus"]),
    ],
    ids=["dra", "registration"],
)
def test_services_have_the_methods_that_a_kubelet_calls(messages: Messages, service: str, methods: list[str]) -> None:
    found = messages.pool.FindServiceByName(service)
    assert [each.name for each in found.methods] == methods
