"""Ask an instance controller over gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import msgspec

from cotenant.control.scaling.provisioning import Instance, Provision
from cotenant.errors import ConfigError, InstanceError
from cotenant.k8s.grpc_channel import open_channel, unary_call
from cotenant.k8s.scaling.bearer import read_bearer
from cotenant.protocol.instances import SERVICE, instances

TIMEOUT = 30.0  # seconds for an answer, which waits for the API server's


class InstanceClient:
    """Call an instance controller. address: ``host:port``. authority: certificates (PEM) of who signed that of the
    service; None: in the clear. token_file: holds the token that it asks for, read for each call. Every error is an
    InstanceError; what was asked for may have been done, and asking again for it does no harm."""

    def __init__(self, address: str, authority: bytes | None = None, token_file: Path | None = None) -> None:
        self._channel = open_channel(address, authority)
        self._address = address
        self._token_file = token_file

    async def list(self) -> list[Instance]:
        """Return all instances."""
        answer = await self._call("List", instances.ListRequest(), instances.ListResponse)
        try:
            return [_read(each) for each in answer.instances]
        except msgspec.ValidationError as error:
            raise InstanceError(f"the instance controller at {self._address} is of another version: {error}") from None

    async def provision(self, wanted: Provision) -> bool:
        """Ask for an instance; return whether it was not there yet."""
        request = instances.ProvisionRequest(
            name=wanted.name, model=wanted.model, kind=wanted.kind, slo_ms=wanted.slo * 1e3, qps=wanted.rate
        )
        answer = await self._call("Provision", request, instances.ProvisionResponse)
        return bool(answer.created)

    async def release(self, name: str) -> bool:
        """Ask for an instance to go; return whether it was there."""
        answer = await self._call("Release", instances.ReleaseRequest(name=name), instances.ReleaseResponse)
        return bool(answer.released)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def _call(self, name: str, request: Any, answer: Any) -> Any:
        call = unary_call(self._channel, f"{SERVICE}/{name}", request, answer)
        try:
            return await call(request, timeout=TIMEOUT, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            what = error.details() or error.code().name
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                what = f"the instance controller at {self._address} cannot do it now: {what}"
            raise InstanceError(what) from None

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        if self._token_file is None:
            return ()
        try:
            return (("authorization", read_bearer(self._token_file)),)
        except ConfigError as error:
            raise InstanceError(str(error)) from None


def _read(message: Any) -> Instance:
    numbers = instances.pool.FindEnumTypeByName("cotenant.instances.v1.State").values_by_number
    named = numbers.get(message.state)
    state = "" if named is None else named.name.lower()
    fields = {"name": message.name, "model": message.model, "kind": message.kind, "reason": message.reason}
    return msgspec.convert(fields | {"state": state}, Instance)
