"""Answer a call of gRPC with one message, and say errors as its status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from cotenant.errors import ConfigError, KubernetesError, PlanError, StateError
from cotenant.k8s.client import INVALID_OBJECT
from cotenant.live.access import Permission
from cotenant.live.grpc.call import Call, Method
from cotenant.live.grpc.status import CallError, Status

MAX_MESSAGE = 1 << 24  # bytes


def unary_method(kind: Any, answer: Callable[[Any], Any], permission: Permission) -> Method:
    """Return a method that takes one message and answers with another. kind: class of the first. answer: awaited with
    it. permission: of whoever calls."""

    def start(call: Call, wire: bytes) -> None:
        async def work() -> None:
            try:
                message = kind.FromString(wire)
            except DecodeError:
                raise CallError(Status.INTERNAL, f"not the message {kind.DESCRIPTOR.full_name}") from None
            try:
                call.respond((await answer(message)).SerializeToString())
            except (PlanError, ConfigError) as error:
                raise CallError(Status.INVALID_ARGUMENT, str(error)) from None
            except StateError as error:
                raise CallError(Status.UNAVAILABLE, str(error)) from None
            except KubernetesError as error:
                invalid = error.status == INVALID_OBJECT
                raise CallError(Status.INVALID_ARGUMENT if invalid else Status.UNAVAILABLE, str(error)) from None

        call.work(work)

    return Method(unary=start, permission=permission, message_size=MAX_MESSAGE)
