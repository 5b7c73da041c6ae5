"""Read, write and watch objects of a Kubernetes API server.

lightkube finds the configuration and authenticates: kubeconfig, service accounts whose tokens change, certificates,
plugins. Its own watches are not used: they wait for ever on a connection that was cut off, ask for no bookmarks, and
begin again at once, without end, where a server closes them at once. A watch may be silent for minutes, so whether its
connection still leads anywhere is for the kernel to ask.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from cotenant.errors import ConfigError, KubernetesError
from cotenant.k8s.resource import KubeObject, ObjectKey, Resource, key_of

if TYPE_CHECKING:
    import httpx2
    from lightkube.config.kubeconfig import SingleConfig

Subresource = Literal["status", "binding", "eviction"]

TIMEOUT = 10.0  # seconds for an answer
LIST_PAGE = 500  # objects at once
WATCH_SECONDS = 240  # after which the server ends a watch, as client-go asks of it
SILENCE = 60.0  # seconds beyond that; a watch that is not ended by then is given up: its server is there, and hangs
# Seconds of silence after which the kernel asks whether the other end is there, and between two times; how often it
# asks in vain until the connection fails, after 30 s in all. It fails as soon where what was sent is not received.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES = 15, 5, 3
IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")

CONFLICT, GONE, NOT_FOUND, INVALID_OBJECT, UNREACHABLE = 409, 410, 404, 422, 0


class Listing(msgspec.Struct, frozen=True):
    """All objects of a collection at one moment. version: from where to watch what comes after."""

    objects: list[KubeObject]
    version: str


class WatchEvent(msgspec.Struct, frozen=True):
    """A change of an object; a bookmark brings nothing but a newer version to watch from."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: KubeObject


class _RawEvent(msgspec.Struct):
    type: str
    object: Any


class ApiClient:
    """Call one API server, from one event loop. Every error is a KubernetesError; `status` of it is the HTTP status, 0
    where there was no answer. namespace: where objects of namespaced kinds lie unless a call names another. timeout:
    seconds for each step of a call but a watch."""

    def __init__(self, http: httpx2.AsyncClient, namespace: str, timeout: float = TIMEOUT) -> None:
        self.namespace = namespace
        self._http = http
        self._seconds = timeout

    def within(self, seconds: float) -> ApiClient:
        """Return a client with the same connections that waits for so long at most. To cancel a call in place of that
        would leave the socket of a connection that is being made to the garbage collector."""
        return ApiClient(self._http, self.namespace, min(seconds, self._seconds))

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> KubeObject:
        """Return an object. Raises KubernetesError, of status 404 where there is none."""
        return await self._call("GET", resource.path(self._space(resource, namespace), name))

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        everywhere: bool = False,
        labels: str = "",
        fields: str = "",
    ) -> Listing:
        """Return the objects of a namespace, or of all. labels, fields: selectors."""
        path = resource.path(None if everywhere else self._space(resource, namespace))
        params = {"limit": str(LIST_PAGE)} | _selectors(labels, fields)
        objects: list[KubeObject] = []
        while True:
            page = await self._call("GET", path, params=params)
            objects += page.get("items") or ()  # which come without kind and version
            metadata = page.get("metadata", {})
            if not metadata.get("continue"):
                return Listing(objects, metadata.get("resourceVersion", ""))
            params["continue"] = metadata["continue"]

    async def create(self, resource: Resource, body: Mapping[str, Any]) -> KubeObject:
        """Create an object, in its own namespace or the client's. Raises KubernetesError, of status 409 where there is
        one of its name."""
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        space = self._space(resource, body["metadata"].get("namespace"))
        return await self._call("POST", resource.path(space), body=body)

    async def replace(
        self, resource: Resource, body: Mapping[str, Any], subresource: Subresource | None = None
    ) -> KubeObject:
        """Replace an object, or its status. Raises KubernetesError, of status 409 where it has changed since the
        `resourceVersion` that `body` has."""
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        key = key_of(body)
        path = resource.path(self._space(resource, key.namespace or None), key.name, subresource)
        return await self._call("PUT", path, body=body)

    async def patch(
        self,
        resource: Resource,
        key: ObjectKey,
        body: Mapping[str, Any],
        subresource: Subresource | None = None,
    ) -> KubeObject:
        """Merge fields into an object (RFC 7386). With `metadata.resourceVersion` in `body` it is a conflict where the
        object has changed since."""
        path = resource.path(self._space(resource, key.namespace or None), key.name, subresource)
        return await self._call("PATCH", path, body=body, content_type="application/merge-patch+json")

    async def create_subresource(
        self, resource: Resource, key: ObjectKey, subresource: Subresource, body: Mapping[str, Any]
    ) -> KubeObject:
        """Create what belongs to an object, such as the binding of a pod."""
        path = resource.path(self._space(resource, key.namespace or None), key.name, subresource)
        return await self._call("POST", path, body=body)

    async def delete(self, resource: Resource, key: ObjectKey, uid: str = "") -> None:
        """Delete an object; harmless where there is none. uid: of the one that is meant; "": any of that name. Raises
        KubernetesError, of status 409 where another one has its name."""
        path = resource.path(self._space(resource, key.namespace or None), key.name)
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}} if uid else None
        try:
            await self._call("DELETE", path, body=body)
        except KubernetesError as error:
            if error.status != NOT_FOUND:
                raise

    async def watch(
        self,
        resource: Resource,
        version: str,
        *,
        namespace: str | None = None,
        everywhere: bool = False,
        labels: str = "",
        fields: str = "",
        seconds: int = WATCH_SECONDS,
    ) -> AsyncIterator[WatchEvent]:
        """Yield what changes after a version, until the server ends the watch. seconds: when it is asked to.

        Raises KubernetesError, of status 410 where the server does not remember that version.
        """
        path = resource.path(None if everywhere else self._space(resource, namespace))
        params = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        } | _selectors(labels, fields)
        with _reported(path):
            timeout = _timeout(TIMEOUT, seconds + SILENCE)
            request = self._http.build_request("GET", path, params=params, timeout=timeout, extensions=_EXTENSIONS)
            response = await self._http.send(request, stream=True)
            try:
                if response.status_code != 200:
                    raise _refused("GET", path, response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if line:
                        yield _event(line, path)
            finally:
                await response.aclose()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    def _space(self, resource: Resource, namespace: str | None) -> str | None:
        return (namespace or self.namespace) if resource.namespaced else None

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> KubeObject:
        content = None if body is None else msgspec.json.encode(body)
        headers = {"Accept": "application/json"} | ({} if content is None else {"Content-Type": content_type})
        with _reported(path):
            response = await self._http.request(
                method,
                path,
                params=params,
                content=content,
                headers=headers,
                timeout=_timeout(self._seconds),
                extensions=_EXTENSIONS,
            )
        if not 200 <= response.status_code < 300:
            raise _refused(method, path, response.status_code, response.content)
        return _decoded(response.content, path)


@asynccontextmanager
async def connected(namespace: str | None = None, kubeconfig: Path | None = None) -> AsyncIterator[ApiClient]:
    """Call, within the block, the API server of the cluster that this process runs in; else that of `kubeconfig`, else
    of ``KUBECONFIG`` or ``~/.kube/config``. namespace: None: that of the configuration.

    Raises ConfigError for a configuration that cannot be used; the server is not asked yet.
    """
    config = _configuration(kubeconfig)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells of every call
    client = ApiClient(_http(config), namespace or config.namespace)
    try:
        yield client
    finally:
        await client.close()


def _configuration(kubeconfig: Path | None) -> SingleConfig:
    try:
        import yaml
        from lightkube import KubeConfig
        from lightkube.core.exceptions import ConfigError as LightkubeError
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Kubernetes needs the package {error.name}, which is not installed; run `pip install 'cotenant[k8s]'`"
        ) from None
    place = "the service account" if kubeconfig is None and IN_CLUSTER.exists() else str(kubeconfig or "kubeconfig")
    try:
        configuration = KubeConfig.from_env() if kubeconfig is None else KubeConfig.from_file(kubeconfig)
        single = configuration.get()
    except (LightkubeError, OSError) as error:
        raise ConfigError(
            f"no API server of Kubernetes to ask: {error}; run in a cluster, or name a file with KUBECONFIG"
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # lightkube takes its parts as they come
        raise ConfigError(f"{place}: is not a configuration of a Kubernetes client: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{place}: is not YAML: {' '.join(str(error).split())}") from None
    if single is None:
        raise ConfigError(f"{place}: names no current context; set one with `kubectl config use-context`")
    return single


def _http(config: SingleConfig) -> httpx2.AsyncClient:
    from lightkube.config import client_adapter
    from lightkube.config.models import User
    from lightkube.core.exceptions import ConfigError as LightkubeError

    if config.user is None:  # lightkube asserts one
        config = config._replace(user=User())
    parameters = client_adapter.ConnectionParams(timeout=_timeout(TIMEOUT))
    try:
        return client_adapter.AsyncClient(config, parameters)
    except (LightkubeError, OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{config.cluster.server}: certificates or credentials cannot be used: {error}") from None


async def _keep_alive(event: str, info: Mapping[str, Any]) -> None:
    """Have the kernel look after a connection that was made. httpx takes options of sockets with a transport alone, and
    one that is given to it passes over the proxies of the environment."""
    if event == "connection.connect_tcp.complete":
        made = info["return_value"].get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        longest = KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_PROBES
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * longest)


_EXTENSIONS = {"trace": _keep_alive}


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {name: text for name, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}


def _timeout(seconds: float, read: float | None = None) -> httpx2.Timeout:
    """Return the limits of a call. read: seconds without anything from the server; None: as for any other step."""
    import httpx2

    return httpx2.Timeout(seconds, read=seconds if read is None else read)


@contextmanager
def _reported(path: str) -> Iterator[None]:
    """Turn errors of the connection within the block into KubernetesError."""
    import httpx2
    from lightkube.core.exceptions import ConfigError as LightkubeError

    try:
        yield
    except httpx2.HTTPError as error:
        what = str(error) or type(error).__name__
        raise KubernetesError(f"the API server does not answer ({path}): {what}", UNREACHABLE) from None
    except (LightkubeError, OSError) as error:  # a token file that is gone, a plugin that fails
        raise KubernetesError(f"cannot authenticate to the API server: {error}", UNREACHABLE) from None
    except (KeyError, TypeError, ValueError):  # of a plugin whose answer lightkube takes as it comes
        what = "its plugin's answer is not an ExecCredential with a token"
        raise KubernetesError(f"cannot authenticate to the API server: {what}", UNREACHABLE) from None


def _event(line: str, path: str) -> WatchEvent:
    try:
        event = msgspec.json.decode(line, type=_RawEvent)
        if event.type == "ERROR":
            said = event.object if isinstance(event.object, dict) else {}
            raise KubernetesError(f"watch of {path} ended: {said.get('message', '')}", int(said.get("code") or 500))
        return msgspec.convert({"type": event.type, "object": event.object}, WatchEvent)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # also a line that was cut off
        raise KubernetesError(f"watch of {path}: not an event: {error}", UNREACHABLE) from None


def _decoded(content: bytes, path: str) -> KubeObject:
    try:
        return msgspec.json.decode(content, type=KubeObject)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise KubernetesError(
            f"the API server answers {path} with what is not an object: {error}", UNREACHABLE
        ) from None


def _refused(method: str, path: str, status: int, content: bytes) -> KubernetesError:
    """Return the error that an answer stands for: a Status, or text of whatever stands before the API server."""
    try:
        message = str(msgspec.json.decode(content, type=KubeObject).get("message", ""))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        message = content[:200].decode(errors="replace").strip()
    return KubernetesError(f"{method} {path} is refused ({status}): {message or 'no reason is given'}", status)
