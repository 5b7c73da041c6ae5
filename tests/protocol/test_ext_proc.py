"""The messages of Envoy's external processing are the .proto file beside them, and are Envoy's own."""

from __future__ import annotations

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2
from envoy.type.v3 import http_status_pb2
from google.protobuf.descriptor import FieldDescriptor

from cotenant.protocol.ext_proc import SERVICE, ext_proc
from tests.protocol.test_protocol import compiled, written

FILE = ext_proc.pool.FindFileByName("ext_proc.proto")
# Where Envoy keeps what is here in one package.
ELSEWHERE = {
    "Metadata": base_pb2.Metadata.DESCRIPTOR,
    "HeaderMap": base_pb2.HeaderMap.DESCRIPTOR,
    "HeaderValue": base_pb2.HeaderValue.DESCRIPTOR,
    "HeaderValueOption": base_pb2.HeaderValueOption.DESCRIPTOR,
    "HttpStatus": http_status_pb2.HttpStatus.DESCRIPTOR,
}
ENUMS = {
    "BodySendMode": processing_mode_pb2.ProcessingMode.DESCRIPTOR.enum_types_by_name["BodySendMode"],
    "HeaderAppendAction": base_pb2.HeaderValueOption.DESCRIPTOR.enum_types_by_name["HeaderAppendAction"],
}
AS_NUMBER = {FieldDescriptor.TYPE_ENUM: FieldDescriptor.TYPE_INT32}  # the same on the wire


def test_descriptors_match_the_proto_file() -> None:
    assert compiled(FILE) == written("ext_proc.proto")


@pytest.mark.parametrize("name", sorted(FILE.message_types_by_name))
def test_fields_are_those_of_envoy(name: str) -> None:
    theirs = ELSEWHERE.get(name) or external_processor_pb2.DESCRIPTOR.message_types_by_name[name]
    for field in FILE.message_types_by_name[name].fields:
        other = theirs.fields_by_name[field.name]
        assert (field.number, field.is_repeated) == (other.number, other.is_repeated), field.full_name
        assert AS_NUMBER.get(field.type, field.type) == AS_NUMBER.get(other.type, other.type), field.full_name
        own, wanted = field.containing_oneof, other.containing_oneof
        assert (own and own.name) == (wanted and wanted.name), field.full_name
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            assert field.message_type.name == other.message_type.name, field.full_name


@pytest.mark.parametrize("name", sorted(FILE.enum_types_by_name))
def test_enums_are_those_of_envoy(name: str) -> None:
    ours = {value.name: value.number for value in FILE.enum_types_by_name[name].values}
    assert ours == {value.name: value.number for value in ENUMS[name].values}


def test_service_is_that_of_envoy() -> None:
    ours = FILE.services_by_name["ExternalProcessor"]
    theirs = external_processor_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"]
    assert ours.full_name == theirs.full_name == SERVICE
    assert [(m.name, m.input_type.full_name, m.output_type.full_name) for m in ours.methods] == [
        (m.name, m.input_type.full_name, m.output_type.full_name) for m in theirs.methods
    ]
    assert all(m.client_streaming and m.server_streaming for m in ours.methods)
