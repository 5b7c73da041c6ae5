"""The messages of the instance controller are the .proto file beside them."""

from __future__ import annotations

from cotenant.protocol.instances import SERVICE, instances
from tests.protocol.test_protocol import compiled, written


def test_descriptors_match_the_proto_file() -> None:
    file = instances.pool.FindFileByName("instances.proto")
    assert compiled(file) == written("instances.proto")
    assert file.services_by_name["Instances"].full_name == SERVICE
