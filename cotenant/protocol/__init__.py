"""Load the message classes of the Open Inference Protocol, ModelConfig among them, from the bundled descriptors.

They live in a descriptor pool of their own, so that a client library that registers the same names in the same process
does not clash with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_DESCRIPTORS = Path(__file__).parent / "inference.bin"


class Messages:
    """Give the message classes as attributes: `messages.ModelInferRequest`."""

    def __init__(self) -> None:
        files = descriptor_pb2.FileDescriptorSet.FromString(_DESCRIPTORS.read_bytes())
        self.pool = descriptor_pool.DescriptorPool()
        for file in files.file:
            self.pool.Add(file)

    def __getattr__(self, name: str) -> Any:
        message = message_factory.GetMessageClass(self.pool.FindMessageTypeByName(f"inference.{name}"))
        setattr(self, name, message)
        return message


messages = Messages()
