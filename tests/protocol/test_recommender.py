"""The messages of the recommender are the .proto file beside them."""

from __future__ import annotations

from cotenant.protocol.recommender import SERVICE, recommender
from tests.protocol.test_protocol import compiled, written


def test_descriptors_match_the_proto_file() -> None:
    file = recommender.pool.FindFileByName("recommender.proto")
    assert compiled(file) == written("recommender.proto")
    assert file.services_by_name["Recommender"].full_name == SERVICE
