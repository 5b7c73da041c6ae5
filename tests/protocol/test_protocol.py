"""The descriptors that are loaded are the .proto file beside them, and speak what clients speak."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor
from tritonclient.grpc import model_config_pb2, service_pb2

import cotenant.protocol
from cotenant.protocol import messages

PROTOCOL = Path(cotenant.protocol.__file__).parent
NUMBERED = re.compile(r"(?:(?:repeated |optional )?(?:map<\w+, [\w.]+>|[\w.]+) )?(\w+) = (\d+);")

Numbers = dict[str, dict[str, int]]


def written(name: str) -> Numbers:
    """Message or enum → name → number, as the file has them."""
    found: Numbers = {}
    scopes: list[str] = []
    package = ""
    for line in (PROTOCOL / name).read_text().splitlines():
        line = line.strip()
        if line.startswith("package "):
            package = line.removeprefix("package ").removesuffix(";")
        elif opened := re.match(r"(message|enum|oneof|service) (\w+) \{(\})?", line):
            if opened[1] in ("message", "enum"):
                inside = [scope for scope in scopes if scope]
                found[".".join([package, *inside, opened[2]])] = {}
            if not opened[3]:
                scopes.append("" if opened[1] == "oneof" else opened[2])
        elif line == "}":
            scopes.pop()
        elif field := NUMBERED.fullmatch(line):
            found[".".join([package, *[scope for scope in scopes if scope]])][field[1]] = int(field[2])
    return found


def compiled(file: descriptor.FileDescriptor) -> Numbers:
    def messages_of(message: descriptor.Descriptor) -> Iterator[tuple[str, dict[str, int]]]:
        if not message.GetOptions().map_entry:
            yield message.full_name, {field.name: field.number for field in message.fields}
        for enum in message.enum_types:
            yield enum.full_name, {value.name: value.number for value in enum.values}
        for nested in message.nested_types:
            yield from messages_of(nested)

    found = dict(pair for message in file.message_types_by_name.values() for pair in messages_of(message))
    return found | {
        enum.full_name: {value.name: value.number for value in enum.values} for enum in file.enum_types_by_name.values()
    }


def test_descriptors_match_the_proto_file() -> None:
    assert compiled(messages.pool.FindFileByName("inference.proto")) == written("inference.proto")


def test_messages_have_the_numbers_of_the_stock_client() -> None:
    theirs = compiled(service_pb2.DESCRIPTOR) | compiled(model_config_pb2.DESCRIPTOR)
    ours = compiled(messages.pool.FindFileByName("inference.proto"))
    kserve = {
        "inference.RepositoryModelLoadResponse": {"model_name": 1, "isLoaded": 2},
        "inference.RepositoryModelUnloadResponse": {"model_name": 1, "isUnloaded": 2},
    }
    assert ours == theirs | kserve


def test_messages_have_the_types_and_methods_of_the_stock_client() -> None:
    ours = messages.pool.FindFileByName("inference.proto")
    for file in (service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR):
        for name, message in file.message_types_by_name.items():
            for field in message.fields:
                mine = ours.message_types_by_name[name].fields_by_name[field.name]
                assert (mine.type, mine.is_repeated) == (field.type, field.is_repeated), field.full_name
                # protobuf keeps the presence of an `optional` field in a oneof of its own.
                oneof = field.containing_oneof is not None or field.full_name == "inference.ModelConfig.max_batch_size"
                assert (mine.containing_oneof is not None) == oneof, field.full_name
    methods = ours.services_by_name["GRPCInferenceService"].methods
    wanted = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    assert {(m.name, m.input_type.name, m.output_type.name) for m in methods} == {
        (m.name, m.input_type.name, m.output_type.name) for m in wanted
    }
