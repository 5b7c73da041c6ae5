"""Load the message classes of the protocols that are spoken, from the bundled descriptors.

They live in descriptor pools of their own, so that a client library that registers the same names in the same process
does not clash with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

_FOLDER = Path(__file__).parent


class Messages:
    """Give the message classes of a package as attributes: `messages.ModelInferRequest`."""

    def __init__(self, file: str, package: str) -> None:
        """file: of descriptors, beside this one."""
        files = descriptor_pb2.FileDescriptorSet.FromString((_FOLDER / file).read_bytes())
        self.package = package
        self.pool = descriptor_pool.DescriptorPool()
        self.pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
        for each in files.file:
            self.pool.Add(each)

    def __getattr__(self, name: str) -> Any:
        message = message_factory.GetMessageClass(self.pool.FindMessageTypeByName(f"{self.package}.{name}"))
        setattr(self, name, message)
        return message


# The Open Inference Protocol, ModelConfig among it.
messages = Messages("inference.bin", "inference")
