"""Answer a scheduler as its extender: filter, prioritise, bind. For clusters without scheduling gates.

The decision is that of the controller, for the nodes that the scheduler has left. Errors are told in the answer, as the
protocol has it; a pod that asks for no share is none of ours, and every node is as good.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cotenant.core.units import show_share
from cotenant.errors import ConfigError, KubernetesError
from cotenant.k8s.client import CONFLICT, ApiClient
from cotenant.k8s.pods.controller import ShareController, write_share
from cotenant.k8s.pods.placer import NoRoom, Placed, Recut
from cotenant.k8s.pods.request import CONFIG_MAP, PLACEMENT, BrokenPod, SharePlacement, SharePod, read_pod
from cotenant.k8s.resource import PODS, KubeObject, ObjectKey

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

OFFER_SECONDS: Final = 60.0
MAX_SCORE: Final = 10  # of a node, by the scheduler's protocol
MAX_BODY: Final = 1 << 26  # bytes: a scheduler may send all nodes as they are

Fields = Mapping[str, Any]


class SchedulerExtender:
    """Answer from what the controller follows, and write what is bound. clock: seconds.

    A scheduler filters for the next pods before it has bound the last. So the decision falls when it filters: one node
    is left, and the share there is the pod's until it is bound, or for `OFFER_SECONDS`.
    """

    def __init__(
        self, client: ApiClient, controller: ShareController, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._controller = controller
        self._clock = clock
        self._offers: dict[str, tuple[SharePlacement, float]] = {}  # by uid, and when each ends
        controller.offers = self.offers

    def offers(self) -> Mapping[str, SharePlacement]:
        """Return the shares that were offered and not bound yet, by uid of the pod."""
        now = self._clock()
        self._offers = {uid: offer for uid, offer in self._offers.items() if offer[1] > now}
        return {uid: placement for uid, (placement, _) in self._offers.items()}

    def filter(self, body: Fields) -> Fields:
        """Return the node where a pod gets its share, of those that a scheduler has left."""
        arguments = _lower(body)
        names, items = _nodes(arguments)
        pod = read_pod(_with_version(arguments.get("pod") or {}))
        able, fault = names, ""
        if isinstance(pod, BrokenPod):
            able, fault = [], pod.reason
        elif pod is not None:
            decided = self._decide(pod, names)
            able = [] if isinstance(decided, str) else [decided.node]
            fault = decided if isinstance(decided, str) else f"its share is on {decided.node}"
        failed = {name: fault for name in names if name not in able}
        return {"NodeNames": able, "Nodes": _node_list(items, set(able)), "FailedNodes": failed}

    def prioritise(self, body: Fields) -> list[Fields]:
        """Return the score of each node, from 0 to 10: the most for the one where the pod's share is."""
        arguments = _lower(body)
        pod = read_pod(_with_version(arguments.get("pod") or {}))
        names = _nodes(arguments)[0]
        decided = self._decide(pod, names) if isinstance(pod, SharePod) else ""
        chosen = decided if isinstance(decided, str) else decided.node
        return [{"Host": name, "Score": MAX_SCORE if name == chosen else 0} for name in names]

    async def bind(self, body: Fields) -> Fields:
        """Give a pod its share on a node, and bind it. Raises KubernetesError."""
        arguments = _lower(body)
        key = ObjectKey(str(arguments.get("podnamespace", "")), str(arguments.get("podname", "")))
        node = str(arguments.get("node", ""))
        raw = await self._client.get(PODS, key.name, key.namespace)
        if raw["metadata"].get("uid") != arguments.get("poduid"):
            return {"Error": f"pod {key} is another one by now"}
        pod = read_pod(raw)
        if isinstance(pod, BrokenPod):
            return {"Error": pod.reason}
        if pod is not None:
            async with self._controller.deciding:
                placement = self._decide(pod, [node])
            fault = placement if isinstance(placement, str) else await self._give(pod, raw, placement)
            if fault:
                return {"Error": fault}
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": key.name}, "target": target}
        await self._client.create_subresource(PODS, key, "binding", binding)
        return {"Error": ""}

    def _decide(self, pod: SharePod, names: Sequence[str]) -> SharePlacement | str:
        """Return the share of a pod on one of these nodes, which is its own from now on, or why there is none."""
        pods = self._controller.pods()
        for each in pods:
            if isinstance(each, SharePod) and each.placement is not None:
                self._offers.pop(each.uid, None)
        holding = self._controller.holding(pods)
        kept = holding.pop(pod.uid, pod.placement)
        if kept is not None and kept.node in names:
            return kept
        nodes = [node for node in self._controller.nodes() if node.name in names]
        match self._controller.placer.place(pod, nodes, holding.values()):
            case Placed(_, placement):
                self._offers[pod.uid] = placement, self._clock() + OFFER_SECONDS
                return placement
            case NoRoom(_, reason):
                return reason
            case Recut(_, node, device, _):
                return f"{device} on {node} is not cut into the instances that it needs"

    async def _give(self, pod: SharePod, raw: KubeObject, placement: SharePlacement) -> str:
        """Write a pod's share; return why there is none, "" where there is."""
        if not await write_share(self._client, pod, placement, self._controller.config_map(pod)):
            return f"ConfigMap {pod.config_map!r} is somebody else's; name another in {CONFIG_MAP}"
        written = msgspec.json.encode(placement).decode()
        version = raw["metadata"]["resourceVersion"]
        change = {"metadata": {"resourceVersion": version, "annotations": {PLACEMENT: written}}}
        await self._client.patch(PODS, pod.key, change)
        self._controller.given(pod, placement)
        self._offers.pop(pod.uid, None)
        logger.info("%s gets %s of %s on %s", pod.key, show_share(placement.share), placement.visible, placement.node)
        return ""

    # The edge

    def application(self) -> web.Application:
        """Return what serves ``/filter``, ``/prioritize`` and ``/bind``. Raises ConfigError without aiohttp."""
        try:
            from aiohttp import web
        except ModuleNotFoundError:
            raise ConfigError(
                "a scheduler extender needs the package aiohttp, which is not installed; run"
                " `pip install 'cotenant[k8s]'`"
            ) from None

        async def read(request: web.Request) -> Fields:
            try:
                body = msgspec.json.decode(await request.read())
            except msgspec.DecodeError as error:
                raise web.HTTPBadRequest(text=f"no JSON: {error}") from None
            if not isinstance(body, dict):
                raise web.HTTPBadRequest(text="no object of the scheduler's extender protocol")
            if not self._controller.leads:
                raise web.HTTPServiceUnavailable(text="another one gives shares; ask it")
            return body

        def answer(value: object) -> web.Response:
            return web.Response(body=msgspec.json.encode(value), content_type="application/json")

        async def on_filter(request: web.Request) -> web.Response:
            return answer(self.filter(await read(request)))

        async def on_prioritise(request: web.Request) -> web.Response:
            return answer(self.prioritise(await read(request)))

        async def on_bind(request: web.Request) -> web.Response:
            body = await read(request)
            try:
                return answer(await self.bind(body))
            except KubernetesError as error:
                if error.status != CONFLICT:
                    logger.warning("a pod could not be bound: %s", error)
                return answer({"Error": str(error)})  # the scheduler tries again

        async def on_health(request: web.Request) -> web.Response:
            return web.Response(status=200 if self._controller.leads else 503)

        application = web.Application(client_max_size=MAX_BODY)
        application.router.add_post("/filter", on_filter)
        application.router.add_post("/prioritize", on_prioritise)
        application.router.add_post("/bind", on_bind)
        application.router.add_get("/healthz", on_health)
        return application


def _lower(fields: Fields) -> dict[str, Any]:
    """Return fields by their names in lower case, as Go reads them whatever their case."""
    return {name.lower(): value for name, value in fields.items()}


def _nodes(arguments: Fields) -> tuple[list[str], list[KubeObject] | None]:
    """Return the names of the nodes that a scheduler asks about, and the nodes where it has sent them."""
    names = arguments.get("nodenames")
    if names is not None:
        return [str(name) for name in names], None
    items = (arguments.get("nodes") or {}).get("items") or []
    return [item["metadata"]["name"] for item in items], items


def _node_list(items: list[KubeObject] | None, able: set[str]) -> Fields | None:
    if items is None:
        return None
    return {"items": [item for item in items if item["metadata"]["name"] in able]}


def _with_version(pod: KubeObject) -> KubeObject:
    metadata = {"name": "", "resourceVersion": "", **(pod.get("metadata") or {})}
    return {**pod, "metadata": metadata}
