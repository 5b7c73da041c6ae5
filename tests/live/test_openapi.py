"""The OpenAPI document says what the routes do, and no more."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cotenant.live import codec
from cotenant.live.access import Permission
from cotenant.live.http import HttpServer, openapi
from cotenant.live.http.routes import ROUTES, find_route
from tests.live.stub import StubCore
from tests.live.test_http import Wire, ask, request


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return openapi.openapi_document(ROUTES)


def test_every_route_is_described_and_every_path_is_a_route(document: dict[str, Any]) -> None:
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    for path, method in described:
        filled = re.sub(r"\{(\w+)\}", lambda found: "7" if found[1] == "version" else "name", path)
        route = find_route(filled.encode())
        assert route is not None and method.upper().encode() in route.endpoints, path
        assert bool(route.version) == ("{version}" in path)
        operation, endpoint = document["paths"][path][method], route.endpoints[method.upper().encode()]
        assert operation["summary"] == endpoint.summary != ""
        names = [parameter["name"] for parameter in operation.get("parameters", [])]
        assert names == re.findall(r"\{(\w+)\}", path)
        assert ({"token": []} in operation["security"]) == (endpoint.permission is not Permission.PUBLIC)
    routes = {
        (path, method.decode().lower())
        for template, endpoints in ROUTES
        for path in openapi.paths_of(template)
        for method in endpoints
    }
    assert described == routes


def test_optional_parts_of_a_path_are_left_out_and_not() -> None:
    assert sorted(openapi.paths_of("/a[/b/{c}]/d[/e]")) == ["/a/b/{c}/d", "/a/b/{c}/d/e", "/a/d", "/a/d/e"]


def test_every_reference_leads_to_a_schema(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    assert {reference.removeprefix("#/components/schemas/") for reference in references(document)} == schemas.keys()


@pytest.mark.parametrize(
    ("read", "described"),
    [
        (codec._Request, openapi.InferBody),
        (codec.InputTensor, openapi.Input),
        (codec._Output, openapi.Output),
        (codec._Response, openapi.InferAnswer),
        (codec._ResponseTensor, openapi.Input),
    ],
)
def test_described_bodies_are_those_that_are_read_and_written(read: Any, described: Any) -> None:
    assert set(read.__struct_fields__) == set(described.__struct_fields__)


def test_document_is_served(core: StubCore, document: dict[str, Any]) -> None:
    answer = ask(Wire(HttpServer(core)), request("GET", "/openapi.json"))
    assert answer.status == 200 and answer.json == document
