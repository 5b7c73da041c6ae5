"""A small API server of Kubernetes for tests: real HTTP on loopback, with the parts that clients get wrong.

Objects of any kind have uids, generations and resource versions; writes conflict, lists come in pages, watches send
bookmarks, end after their time and are gone (410) once their version is compacted. Custom resources are pruned, filled
in and validated by the schemas of the CustomResourceDefinitions that were created. Tests make it fail, hang and go
away. `tests/k8s/test_api_server.py` holds it and a real server to the same.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx2
from aiohttp import web

from cotenant.k8s.client import ApiClient
from tests.k8s.schema import admitted
from tests.k8s.selection import merged, selector

Object = dict[str, Any]
Place = tuple[str, str]  # a kind of objects: its path's beginning, such as /apis/cotenant.dev/v1alpha1, and its plural


class Refused(Exception):  # noqa: N818
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }


@dataclass
class Kind:
    """What the server knows of a kind of objects."""

    kind: str
    api_version: str
    namespaced: bool = True
    has_status: bool = True  # a subresource; where it is, plain writes leave the status as it is
    schema: Object | None = None


CORE = {
    ("/api/v1", "pods"): Kind("Pod", "v1"),
    ("/api/v1", "podtemplates"): Kind("PodTemplate", "v1", has_status=False),
    ("/api/v1", "nodes"): Kind("Node", "v1", namespaced=False),
    ("/api/v1", "configmaps"): Kind("ConfigMap", "v1", has_status=False),
    ("/api/v1", "events"): Kind("Event", "v1", has_status=False),
    ("/apis/coordination.k8s.io/v1", "leases"): Kind("Lease", "coordination.k8s.io/v1", has_status=False),
    ("/apis/discovery.k8s.io/v1", "endpointslices"): Kind("EndpointSlice", "discovery.k8s.io/v1", has_status=False),
    ("/apis/resource.k8s.io/v1", "resourceclaims"): Kind("ResourceClaim", "resource.k8s.io/v1"),
    ("/apis/resource.k8s.io/v1", "resourceslices"): Kind(
        "ResourceSlice", "resource.k8s.io/v1", namespaced=False, has_status=False
    ),
    ("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions"): Kind(
        "CustomResourceDefinition", "apiextensions.k8s.io/v1", namespaced=False
    ),
}


@dataclass
class Change:
    version: int
    type: str
    object: Object
    before: Object | None  # for selectors: an object that no longer matches is deleted to a watch


@dataclass
class Collection:
    kind: Kind
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)


class ApiDouble:
    """Hold objects and answer requests. requests: what was asked so far, as ``METHOD /path``, with
    ``?watch=true`` for a watch."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.bookmark_seconds = 60.0
        self.url = ""
        self._collections = {place: Collection(kind) for place, kind in CORE.items()}
        self._version = 100
        self._compacted = 0  # versions up to this one are forgotten
        self._wake = asyncio.Event()
        self._watches: set[asyncio.Task[Any]] = set()
        self._fault: Callable[[web.Request], tuple[int, str] | None] = lambda _: None
        self._delay = 0.0
        self._silent = False
        self._away = False
        self._continued: dict[str, tuple[list[Object], str]] = {}
        self._numbers = itertools.count()

    # For tests

    @property
    def writes(self) -> list[str]:
        """Return the requests so far that were to change something."""
        return [request for request in self.requests if not request.startswith("GET")]

    def objects(self, plural: str) -> list[Object]:
        """Return copies of all objects of a kind."""
        for (_, name), collection in self._collections.items():
            if name == plural:
                return [copy.deepcopy(each) for each in collection.objects.values()]
        raise KeyError(plural)

    @contextmanager
    def failing(self, code: int = 500, only: str = "", text: str = "") -> Iterator[None]:
        """Refuse, within the block, all requests whose ``METHOD /path`` contains `only`. text: the body, in place of a
        Status."""
        before, self._fault = (
            self._fault,
            lambda request: (code, text) if only in f"{request.method} {request.path}" else None,
        )
        try:
            yield
        finally:
            self._fault = before

    @contextmanager
    def slow(self, seconds: float) -> Iterator[None]:
        """Take time for each answer within the block."""
        self._delay, before = seconds, self._delay
        try:
            yield
        finally:
            self._delay = before

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Send nothing on watches within the block, as where a connection was cut off without a word."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False
            self._tell()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Cut every connection within the block, and answer nothing."""
        self._away = True
        self.break_watches()
        try:
            yield
        finally:
            self._away = False

    def break_watches(self) -> None:
        """Cut the connection of each watch."""
        for task in list(self._watches):
            task.cancel()

    def compact(self) -> None:
        """Forget all that was changed so far: watches of versions before are gone."""
        self._compacted = self._version
        self._continued.clear()
        self._tell()

    def put(self, plural: str, body: Object) -> Object:
        """Create or replace an object as somebody else does, its status as well."""
        place = next(place for place in self._collections if place[1] == plural)
        collection = self._collections[place]
        key = (body["metadata"].get("namespace", "") if collection.kind.namespaced else "", body["metadata"]["name"])
        if key in collection.objects:
            before = collection.objects[key]
            body = {**before, **body, "metadata": {**before["metadata"], **body["metadata"]}}
            return self._store(collection, key, body)
        return self._create(collection, key[0], body)

    def remove(self, plural: str, name: str, namespace: str = "") -> None:
        """Delete an object as somebody else does."""
        collection = next(each for place, each in self._collections.items() if place[1] == plural)
        self._delete(collection, (namespace, name))

    # Requests

    async def handle(self, request: web.Request) -> web.StreamResponse:
        watch = "?watch=true" if request.query.get("watch") in ("true", "1") else ""
        self.requests.append(f"{request.method} {request.path}{watch}")
        if self._away and request.transport is not None:
            request.transport.abort()
            return web.Response()
        if self._delay:
            await asyncio.sleep(self._delay)
        if fault := self._fault(request):
            code, text = fault
            if text:
                return web.Response(status=code, text=text)
            return web.json_response(Refused(code, "InternalError", "as the test wants it").status, status=code)
        try:
            return await self._answer(request)
        except Refused as refused:
            return web.json_response(refused.status, status=refused.status["code"])

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        collection, namespace, name, subresource = self._find(request.path)
        if request.method == "GET":
            if name is not None:
                return web.json_response(self._get(collection, (namespace or "", name)))
            if request.query.get("watch") in ("true", "1"):
                return await self._watch(request, collection, namespace)
            return web.json_response(self._list(request, collection, namespace))
        body = {}
        if request.can_read_body:
            try:
                body = await request.json()
            except ValueError as error:
                raise Refused(400, "BadRequest", f"not JSON: {error}") from None
        if request.method == "POST":
            if subresource == "binding":
                return web.json_response(self._bind(collection, (namespace or "", name or ""), body), status=201)
            return web.json_response(self._create(collection, namespace or "", body), status=201)
        key = (namespace or "", name or "")
        if request.method == "PUT":
            return web.json_response(self._replace(collection, key, body, subresource))
        if request.method == "PATCH":
            if request.content_type != "application/merge-patch+json":
                raise Refused(415, "UnsupportedMediaType", f"{request.content_type} is not known here")
            before = self._get(collection, key)
            patched = merged(before, body)
            if "resourceVersion" not in body.get("metadata", {}):
                patched["metadata"].pop("resourceVersion", None)
            return web.json_response(self._replace(collection, key, patched, subresource))
        if request.method == "DELETE":
            uid = body.get("preconditions", {}).get("uid")
            if uid not in (None, self._get(collection, key)["metadata"]["uid"]):
                raise Refused(
                    409, "Conflict", f'cannot be fulfilled on "{key[1]}": the UID in the precondition differs'
                )
            return web.json_response(self._delete(collection, key))
        raise Refused(405, "MethodNotAllowed", request.method)

    def _find(self, path: str) -> tuple[Collection, str | None, str | None, str | None]:
        parts = path.strip("/").split("/")
        taken = 2 if parts[0] == "api" else 3
        base, rest = "/" + "/".join(parts[:taken]), parts[taken:]
        namespace = None
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        if not rest or (base, rest[0]) not in self._collections:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        collection = self._collections[base, rest[0]]
        name = rest[1] if len(rest) > 1 else None
        subresource = rest[2] if len(rest) > 2 else None
        if subresource == "status" and not collection.kind.has_status:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        return collection, namespace, name, subresource

    # Objects

    def _get(self, collection: Collection, key: tuple[str, str]) -> Object:
        if key not in collection.objects:
            raise Refused(404, "NotFound", f'{collection.kind.kind.lower()}s "{key[1]}" not found')
        return copy.deepcopy(collection.objects[key])

    def _list(self, request: web.Request, collection: Collection, namespace: str | None) -> Object:
        token = request.query.get("continue")
        if token is not None:
            if token not in self._continued:
                raise Refused(410, "Expired", "The provided continue parameter is too old")
            found, version = self._continued.pop(token)
        else:
            chosen = selector(request.query)
            found = [each for key, each in sorted(collection.objects.items()) if namespace in (None, key[0])]
            found, version = [copy.deepcopy(each) for each in found if chosen(each)], str(self._version)
        metadata = {"resourceVersion": version}
        limit = int(request.query.get("limit", "0"))
        if limit and len(found) > limit:
            token = f"page-{next(self._numbers)}"
            self._continued[token] = found[limit:], version
            found, metadata = found[:limit], {**metadata, "continue": token}
        kind = collection.kind
        return {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata, "items": found}

    def _create(self, collection: Collection, namespace: str, body: Object) -> Object:
        body = copy.deepcopy(body)
        metadata = body.setdefault("metadata", {})
        if "generateName" in metadata and "name" not in metadata:
            metadata["name"] = f"{metadata['generateName']}{next(self._numbers):05}"
        if not metadata.get("name"):
            raise Refused(422, "Invalid", "metadata.name: Required value: name or generateName is required")
        namespace = namespace if collection.kind.namespaced else ""
        if metadata.get("namespace", namespace) != namespace:
            raise Refused(400, "BadRequest", "the namespace of the provided object does not match the request")
        key = (namespace, metadata["name"])
        if key in collection.objects:
            raise Refused(409, "AlreadyExists", f'{collection.kind.kind.lower()}s "{key[1]}" already exists')
        if namespace:
            metadata["namespace"] = namespace
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now, "generation": 1}
        body |= {"kind": collection.kind.kind, "apiVersion": collection.kind.api_version}
        if collection.kind.schema is not None:
            body.pop("status", None)
        stored = self._store(collection, key, self._admitted(collection, body))
        if collection.kind.kind == "CustomResourceDefinition":
            self._define(stored)
        return stored

    def _replace(self, collection: Collection, key: tuple[str, str], body: Object, subresource: str | None) -> Object:
        if key not in collection.objects and body.get("metadata", {}).get("uid"):
            raise Refused(409, "Conflict", f'cannot be fulfilled on "{key[1]}": UID in precondition')
        before = self._get(collection, key)
        version = body.get("metadata", {}).get("resourceVersion")
        if version not in (None, before["metadata"]["resourceVersion"]):
            raise Refused(409, "Conflict", f'cannot be fulfilled on "{key[1]}": the object has been modified')
        if body.get("metadata", {}).get("name", key[1]) != key[1]:
            raise Refused(400, "BadRequest", "the name of the object does not match the name on the URL")
        if "addressType" in before and body.get("addressType") != before["addressType"]:
            raise Refused(422, "Invalid", f'EndpointSlice "{key[1]}" is invalid: addressType: field is immutable')
        if subresource == "status":
            after = {**before, "status": body.get("status", {})}
        else:
            metadata = {**body["metadata"]}
            for name in ("uid", "creationTimestamp", "generation", "resourceVersion"):
                metadata[name] = before["metadata"][name]
            metadata["namespace"] = key[0]
            after = {**body, "metadata": {name: each for name, each in metadata.items() if each != ""}}
            if collection.kind.has_status:
                after.pop("status", None)
                after |= {"status": before["status"]} if "status" in before else {}
        after = self._admitted(collection, after)
        if after == before:
            return before
        if after.get("spec") != before.get("spec"):
            after["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
        return self._store(collection, key, after)

    def _bind(self, collection: Collection, key: tuple[str, str], body: Object) -> Object:
        pod = self._get(collection, key)
        if pod["spec"].get("nodeName"):
            raise Refused(409, "Conflict", f"pod {key[1]} is already assigned to node {pod['spec']['nodeName']}")
        pod["spec"]["nodeName"] = body["target"]["name"]
        self._store(collection, key, pod)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def _delete(self, collection: Collection, key: tuple[str, str]) -> Object:
        before = self._get(collection, key)
        del collection.objects[key]
        self._note(collection, "DELETED", before, before)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _store(self, collection: Collection, key: tuple[str, str], body: Object) -> Object:
        before = collection.objects.get(key)
        collection.objects[key] = body
        self._note(collection, "ADDED" if before is None else "MODIFIED", body, before)
        return copy.deepcopy(body)

    def _note(self, collection: Collection, type: str, body: Object, before: Object | None) -> None:
        self._version += 1
        body["metadata"] = {**body["metadata"], "resourceVersion": str(self._version)}
        collection.changes.append(Change(self._version, type, copy.deepcopy(body), copy.deepcopy(before)))
        self._tell()

    def _admitted(self, collection: Collection, body: Object) -> Object:
        if collection.kind.schema is None:
            return body
        fixed = {name: body[name] for name in ("kind", "apiVersion", "metadata")}
        value, errors = admitted(
            {name: each for name, each in body.items() if name not in fixed}, collection.kind.schema
        )
        if errors:
            name = body["metadata"]["name"]
            raise Refused(422, "Invalid", f'{collection.kind.kind} "{name}" is invalid: {"; ".join(errors)}')
        return {**fixed, **value}

    def _define(self, definition: Object) -> None:
        spec = definition["spec"]
        for version in spec["versions"]:
            kind = Kind(
                spec["names"]["kind"],
                f"{spec['group']}/{version['name']}",
                namespaced=spec["scope"] == "Namespaced",
                has_status="status" in version.get("subresources", {}),
                schema=version["schema"]["openAPIV3Schema"],
            )
            place = (f"/apis/{spec['group']}/{version['name']}", spec["names"]["plural"])
            self._collections.setdefault(place, Collection(kind)).kind = kind

    # Watches

    async def _watch(self, request: web.Request, collection: Collection, namespace: str | None) -> web.StreamResponse:
        seen = int(request.query.get("resourceVersion") or self._version)
        if seen < self._compacted:
            raise Refused(410, "Expired", f"too old resource version: {seen} ({self._compacted})")
        chosen, bookmarks = selector(request.query), request.query.get("allowWatchBookmarks") == "true"
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        end = loop.time() + float(request.query.get("timeoutSeconds", "3600"))
        bookmark = loop.time() + self.bookmark_seconds
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            while True:
                wake = self._wake
                if not self._silent:
                    if seen < self._compacted:
                        gone = Refused(410, "Expired", f"too old resource version: {seen} ({self._compacted})")
                        await _send(response, "ERROR", gone.status)
                        break
                    for change in [each for each in collection.changes if each.version > seen]:
                        seen = change.version
                        if namespace is not None and change.object["metadata"].get("namespace") != namespace:
                            continue
                        if (kind := _seen_as(change, chosen)) is not None:
                            await _send(response, kind, change.object)
                    if bookmarks and loop.time() >= bookmark:
                        seen = self._version
                        mark = {"kind": collection.kind.kind, "apiVersion": collection.kind.api_version}
                        metadata = {"resourceVersion": str(seen), "creationTimestamp": None}
                        await _send(response, "BOOKMARK", {**mark, "metadata": metadata})
                        bookmark = loop.time() + self.bookmark_seconds
                if loop.time() >= end:
                    break
                try:
                    async with asyncio.timeout_at(min(end, bookmark)):
                        await wake.wait()
                except TimeoutError:
                    continue
        except ConnectionResetError:
            pass  # the client has left
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._watches.discard(task)
        return response

    def _tell(self) -> None:
        self._wake.set()
        self._wake = asyncio.Event()


async def _send(response: web.StreamResponse, type: str, body: Object) -> None:
    await response.write(json.dumps({"type": type, "object": body}).encode() + b"\n")


def _seen_as(change: Change, chosen: Callable[[Object], bool]) -> str | None:
    """Return what a change is to a watch with a selector; None where it is nothing."""
    was = change.before is not None and chosen(change.before)
    if change.type == "DELETED" or not chosen(change.object):
        return "DELETED" if was else None
    return "MODIFIED" if was else "ADDED"


@asynccontextmanager
async def api_double() -> AsyncIterator[ApiDouble]:
    """Run an API server within the block, in this event loop."""
    double = ApiDouble()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", double.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    double.url = f"http://{host}:{port}"
    try:
        yield double
    finally:
        double.break_watches()
        await runner.cleanup()


@asynccontextmanager
async def client_of(url: str, namespace: str = "default") -> AsyncIterator[ApiClient]:
    """Call the server at a URL within the block."""
    client = ApiClient(httpx2.AsyncClient(base_url=url, timeout=10.0, trust_env=False), namespace)
    try:
        yield client
    finally:
        await client.close()
