"""Describe the routes of the server as an OpenAPI document (https://spec.openapis.org/oas/v3.1.0)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from cotenant import __version__
from cotenant.core.job import JobRequest, JobStatus
from cotenant.core.tensor import TensorSpec
from cotenant.live.access import Permission
from cotenant.live.job_service import JobList, JobOutput, KeyFile
from cotenant.live.oip import IndexEntry
from cotenant.live.shared_memory import RegionStatus

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


# What `codec` reads and writes; there `data` are not looked at until the tensor has been checked.


class Input(msgspec.Struct):
    """A tensor. data: flat or nested; none where parameters say where it is (`binary_data_size`,
    `shared_memory_region`)."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] = []
    parameters: dict[str, Any] | None = None


class Output(msgspec.Struct):
    """An output that is asked for. parameters: `binary_data`, `classification`, `shared_memory_region`."""

    name: str
    parameters: dict[str, Any] | None = None


class InferBody(msgspec.Struct):
    """A request. parameters: `timeout` in microseconds, `priority`, `binary_data_output`."""

    inputs: list[Input]
    outputs: list[Output] = []
    id: str = ""
    parameters: dict[str, bool | int | float | str] = {}


class InferAnswer(msgspec.Struct, kw_only=True):
    id: str = ""
    model_name: str
    model_version: str
    outputs: list[Input]


class ServerMetadata(msgspec.Struct):
    name: str
    version: str
    extensions: list[str]


class ModelMetadata(msgspec.Struct):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]


class Registration(msgspec.Struct):
    """Register a region of shm_open(3). key: its name there."""

    key: str
    byte_size: int
    offset: int = 0


class ErrorAnswer(msgspec.Struct):
    """Say why a request was not answered."""

    error: str


# What bodies and answers are called in routes.
SCHEMAS: Mapping[str, Any] = {
    "InferBody": InferBody,
    "InferAnswer": InferAnswer,
    "ServerMetadata": ServerMetadata,
    "ModelMetadata": ModelMetadata,
    "Index": list[IndexEntry],
    "Regions": list[RegionStatus],
    "Registration": Registration,
    "JobRequest": JobRequest,
    "JobStatus": JobStatus,
    "JobList": JobList,
    "JobOutput": JobOutput,
    "KeyFile": KeyFile,
    "object": dict[str, Any],
    "Error": ErrorAnswer,
}


class Described(Protocol):
    """What a method of a path says of itself. takes, gives: a key of SCHEMAS; empty: nothing; else a media type."""

    @property
    def permission(self) -> Permission: ...

    @property
    def summary(self) -> str: ...

    @property
    def takes(self) -> str: ...

    @property
    def gives(self) -> str: ...


def paths_of(template: str) -> Iterator[str]:
    """Yield the paths of a route, with and without what stands in brackets."""
    if "[" not in template:
        yield template
        return
    head, _, rest = template.partition("[")
    optional, _, tail = rest.partition("]")
    for path in paths_of(tail):
        yield head + path
        yield head + optional + path


def openapi_document(routes: Iterable[tuple[str, Mapping[bytes, Described]]]) -> dict[str, Any]:
    """Return the document of routes: templates of paths, with what each method does."""
    schemas, components = msgspec.json.schema_components(
        SCHEMAS.values(), schema_hook=_schema_of_identity, ref_template="#/components/schemas/{name}"
    )
    known = dict(zip(SCHEMAS, schemas, strict=True))
    paths: dict[str, Any] = {}
    for template, endpoints in routes:
        for path in paths_of(template):
            paths[path] = {
                method.decode().lower(): _operation(path, endpoint, known) for method, endpoint in endpoints.items()
            }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Cotenant",
            "version": __version__,
            "summary": "The Open Inference Protocol v2 with Triton's extensions",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schema_of_identity(kind: type[Any]) -> dict[str, Any]:
    """Return the schema of a device's or lane's name, the only types of ours that are text."""
    return {"type": "string"}


def _operation(path: str, endpoint: Described, schemas: Mapping[str, Any]) -> dict[str, Any]:
    error = {"description": "Why not", "content": {"application/json": {"schema": schemas["Error"]}}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {"200": {"description": "OK"} | _content(endpoint.gives, schemas), "default": error},
        "security": [{}] if endpoint.permission is Permission.PUBLIC else [{}, {"token": []}],
    }
    if endpoint.takes:
        operation["requestBody"] = _content(endpoint.takes, schemas)
    if names := _PLACEHOLDER.findall(path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation


def _content(kind: str, schemas: Mapping[str, Any]) -> dict[str, Any]:
    if not kind:
        return {}
    if "/" in kind:
        return {"content": {kind: {"schema": {"type": "string"}}}}
    return {"content": {"application/json": {"schema": schemas[kind]}}}
