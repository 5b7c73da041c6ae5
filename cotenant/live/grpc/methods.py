"""Serve every method of GRPCInferenceService that is no inference: health, metadata, repository, settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from google.protobuf import json_format

from cotenant.errors import UnsupportedError
from cotenant.live.access import Permission
from cotenant.live.grpc.access import METHODS
from cotenant.live.grpc.call import MAX_MESSAGE, Call, Method
from cotenant.live.grpc.tensors import check_version, parse_message, plain_parameters
from cotenant.live.oip import Core, model_metadata, server_metadata
from cotenant.protocol import messages

Fields = Mapping[str, Any]


class ManagementMethods:
    """Answer from a core. Each method takes the message, and returns the fields of its response."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def methods(self) -> dict[str, Method]:
        """Return all of them by name. Some are coroutine functions."""
        plain: dict[str, Callable[[Any], Any]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "SystemSharedMemoryStatus": self._shared_memory_status,
            "SystemSharedMemoryRegister": self._register,
            "SystemSharedMemoryUnregister": self._unregister,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._reject_cuda,
            "CudaSharedMemoryUnregister": self._cuda_status,
            "TraceSetting": self._trace_setting,
            "LogSettings": self._log_settings,
        }
        return {name: _method(name, answer) for name, answer in plain.items()}

    def _server_live(self, message: Any) -> Mapping[str, Any]:
        return {"live": self._core.live()}

    def _server_ready(self, message: Any) -> Mapping[str, Any]:
        return {"ready": self._core.ready()}

    def _model_ready(self, message: Any) -> Mapping[str, Any]:
        check_version(message.version)
        return {"ready": self._core.model_ready(message.name, message.version)}

    def _server_metadata(self, message: Any) -> Mapping[str, Any]:
        return server_metadata(self._core)

    def _model_metadata(self, message: Any) -> Mapping[str, Any]:
        check_version(message.version)
        return model_metadata(self._core.model(message.name, message.version))

    def _model_config(self, message: Any) -> Mapping[str, Any]:
        check_version(message.version)
        config = self._core.config(message.name, message.version)
        return {"config": json_format.ParseDict(config, messages.ModelConfig(), ignore_unknown_fields=True)}

    def _model_statistics(self, message: Any) -> Mapping[str, Any]:
        check_version(message.version)
        # Both are Triton's, field by field: one shape serves JSON and protobuf.
        return {"model_stats": self._core.statistics(message.name, message.version)}

    def _index(self, message: Any) -> Mapping[str, Any]:
        if message.repository_name:
            raise UnsupportedError("there is one model repository; leave repository_name empty")
        return {"models": [msgspec.structs.asdict(entry) for entry in self._core.index(ready=message.ready)]}

    async def _load(self, message: Any) -> Mapping[str, Any]:
        name = _repository_model(message)
        await self._core.load(name, plain_parameters(message.parameters))
        return {"model_name": name, "isLoaded": True}

    async def _unload(self, message: Any) -> Mapping[str, Any]:
        name = _repository_model(message)
        await self._core.unload(name, plain_parameters(message.parameters))
        return {"model_name": name, "isUnloaded": True}

    def _trace_setting(self, message: Any) -> Mapping[str, Any]:
        # No value resets to the default.
        update = {name: _single_or_list(setting.value) for name, setting in message.settings.items()}
        settings = self._core.trace_setting(message.model_name, update or None)
        return {
            "settings": {
                name: {"value": value if isinstance(value, list) else [str(value)]} for name, value in settings.items()
            }
        }

    def _log_settings(self, message: Any) -> Mapping[str, Any]:
        update = plain_parameters(message.settings)
        kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
        settings = self._core.log_settings(update or None)
        return {"settings": {name: {kinds[type(value)]: value} for name, value in settings.items()}}

    def _shared_memory_status(self, message: Any) -> Mapping[str, Any]:
        regions = self._core.shared_memory.status(message.name)
        return {"regions": {region.name: msgspec.structs.asdict(region) for region in regions}}

    def _register(self, message: Any) -> Mapping[str, Any]:
        self._core.shared_memory.register(message.name, message.key, message.offset, message.byte_size)
        return {}

    def _unregister(self, message: Any) -> Mapping[str, Any]:
        self._core.shared_memory.unregister(message.name)
        return {}

    def _cuda_status(self, message: Any) -> Mapping[str, Any]:
        return {}

    def _reject_cuda(self, message: Any) -> Mapping[str, Any]:
        raise UnsupportedError("memory of a GPU is not registered here; send tensors in the message")


def _repository_model(message: Any) -> str:
    """Return the model that a repository request names. In KServe's dialect, its name is where Triton's has the
    repository's."""
    if message.model_name and message.repository_name:
        raise UnsupportedError("there is one model repository; leave repository_name empty")
    name: str = message.model_name or message.repository_name
    return name


def _single_or_list(value: Any) -> str | list[str] | None:
    if not value:
        return None
    return value[0] if len(value) == 1 else list(value)


def _method(name: str, answer: Callable[[Any], Any]) -> Method:
    request, response = getattr(messages, f"{name}Request"), getattr(messages, f"{name}Response")
    needed = METHODS[name]

    def start(call: Call, wire: bytes) -> None:
        try:
            message = parse_message(request, wire)
            if not isinstance(needed, Permission):
                call.connection.check(needed(message), call)
            if inspect.iscoroutinefunction(answer):
                call.work(partial(finish, call, message))
            else:
                call.respond(response(**answer(message)).SerializeToString())
        except Exception as error:  # noqa: BLE001  # `fail` logs what nobody expects
            call.fail(error)

    async def finish(call: Call, message: Any) -> None:
        call.respond(response(**await answer(message)).SerializeToString())

    permission = needed if isinstance(needed, Permission) else None
    if permission is Permission.CONTROL:
        return Method(unary=start, permission=permission, message_size=MAX_MESSAGE)  # may bring a model's configuration
    return Method(unary=start, permission=permission)
