"""Give shares to pods that wait for one: watch nodes, pods and ConfigMaps, decide, write.

A share is written in two steps: first the ConfigMap, which holds the share for the pod, then the pod itself, bound to
its node and its gate opened. Whatever happens between the two, or before either is seen, the next round goes on from
what is there: it decides for all pods from all objects, and writes what is missing. Writes carry the version that they
were decided on, and one that conflicts is decided again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

import msgspec

from cotenant.core.units import show_share
from cotenant.errors import KubernetesError
from cotenant.k8s.client import CONFLICT, NOT_FOUND, ApiClient
from cotenant.k8s.elector import Elector
from cotenant.k8s.informer import Informer
from cotenant.k8s.pods.inventory import NodeDevices, read_node
from cotenant.k8s.pods.kept import kept_of_node, kept_of_pod
from cotenant.k8s.pods.objects import (
    LABELS,
    Held,
    condition,
    config_map_for,
    cuts_for,
    is_foreign,
    opened,
    read_held,
    without_gone,
)
from cotenant.k8s.pods.placer import Decision, NoRoom, Placed, Placer, Recut
from cotenant.k8s.pods.request import CONFIG_MAP, BrokenPod, SharePlacement, SharePod, read_pod
from cotenant.k8s.resource import CONFIG_MAPS, NODES, PODS, KubeObject, ObjectKey, version_of

logger = logging.getLogger(__name__)

_Read = TypeVar("_Read")

RETRY = 1.0  # seconds until what failed is tried again, where nothing changes before
OF_ONE_OBJECT = frozenset((400, 403, 413, 422))  # status of a write that is refused for what it writes
QUIET = 0.02  # seconds for which changes may come together


class _Given(msgspec.Struct):
    """A share that was written, until it is seen. opened: the pod, too."""

    placement: SharePlacement
    opened: bool = False


class ShareController:
    """Follow a cluster. elect: makes what says which of several may write, given what to call when that
    changes; None: there are no others. now: the time of day, for conditions."""

    def __init__(
        self,
        client: ApiClient,
        placer: Placer,
        elect: Callable[[Callable[[], None]], Elector] | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self.placer = placer
        self._now = now
        self._changed = asyncio.Event()
        wake = self._changed.set
        self.deciding = asyncio.Lock()  # from a decision until it is written, so that nobody decides on less
        self._elector = None if elect is None else elect(wake)
        self._nodes = Informer(client, NODES, wake, keep=kept_of_node)
        self._pods = Informer(client, PODS, wake, everywhere=True, keep=kept_of_pod)
        self._config_maps = Informer(client, CONFIG_MAPS, wake, everywhere=True, labels=LABELS)
        self._given: dict[str, _Given] = {}  # by uid
        # Returns, by uid, what a scheduler was told, and may bind next.
        self.offers: Callable[[], Mapping[str, SharePlacement]] = dict
        self._decided: dict[str, SharePlacement] = {}  # by uid: shares that are being written
        self._refused: set[str] = set()  # what was logged of writes that are tried again
        self._read_pods: dict[ObjectKey, tuple[str, SharePod | BrokenPod | None]] = {}
        self._read_nodes: dict[ObjectKey, tuple[str, NodeDevices | None]] = {}
        self._read_maps: dict[ObjectKey, tuple[str, dict[str, Held]]] = {}

    async def run(self) -> None:
        """Follow the cluster until cancelled. Raises KubernetesError where another one has taken the lease."""
        work = [self._nodes.run(), self._pods.run(), self._config_maps.run(), self._reconcile_forever()]
        tasks = [asyncio.create_task(each) for each in work]
        try:
            if self._elector is None:
                await asyncio.gather(*tasks)
            else:
                election = asyncio.create_task(self._elector.run())
                tasks.append(election)
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks[:-1]:
                    if task.done():
                        task.result()  # they end by an error alone
                if election.done():
                    holder = self._elector.election.holder
                    raise KubernetesError(f"{holder} has taken the lease; this one stops", CONFLICT)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._elector is not None:
                await self._elector.release()

    async def _reconcile_forever(self) -> None:
        while True:
            self._changed.clear()
            complete = True
            if self.leads:
                async with self.deciding:
                    complete = await self.reconcile()
            try:
                async with asyncio.timeout(None if complete and not self.offers() else RETRY):  # an offer ends unseen
                    await self._changed.wait()
                    await asyncio.sleep(QUIET)
            except TimeoutError:
                pass

    @property
    def leads(self) -> bool:
        """Whether this one may write, and has seen all there is."""
        synced = all(each.is_synced for each in (self._nodes, self._pods, self._config_maps))
        return synced and (self._elector is None or self._elector.leads)

    def given(self, pod: SharePod, placement: SharePlacement) -> None:
        """Hear that a share was written in another way, until it is seen."""
        self._given[pod.uid] = _Given(placement, opened=True)

    def nodes(self) -> list[NodeDevices]:
        """Return the nodes that report devices."""
        return [each for each in self._current(self._nodes, self._read_nodes, read_node) if each is not None]

    def pods(self) -> list[SharePod | BrokenPod]:
        """Return the pods that ask for shares, with those that they were given."""
        found = []
        for each in self._current(self._pods, self._read_pods, read_pod):
            if isinstance(each, SharePod) and each.placement is None:
                given = self._given.get(each.uid)
                if given is not None and given.opened:
                    each = msgspec.structs.replace(each, placement=given.placement, gated=False)
            if each is not None:
                found.append(each)
        return found

    def holding(self, pods: list[SharePod | BrokenPod]) -> dict[str, SharePlacement]:
        """Return what pods hold, by uid: by their annotation, written down for them, or offered to them."""
        uids = {each.uid for each in pods}
        held = {**self.offers(), **self._decided}
        held |= {uid: placement for uid, placement in self._written().items() if uid in uids}
        held |= {uid: given.placement for uid, given in self._given.items() if uid in uids}
        return held | {each.uid: each.placement for each in pods if isinstance(each, SharePod) and each.placement}

    async def reconcile(self) -> bool:
        """Decide for all pods, and write what is missing; return whether all of it could be written."""
        self._forget_seen()
        pods = self.pods()
        asking = [each for each in pods if isinstance(each, SharePod)]
        written = self._written()
        writes: list[Callable[[], Awaitable[object]]] = [
            partial(self._tell, each, "Invalid", each.reason) for each in pods if isinstance(each, BrokenPod)
        ]
        writes += [
            partial(self._restore, pod, pod.placement)
            for pod in asking
            if pod.placement is not None and pod.uid not in written and pod.uid not in self._given and not pod.leaving
        ]
        decisions = self.placer.decide(self.nodes(), asking, self.holding(pods))
        writes += [partial(self._carry_out, decision) for decision in decisions]
        writes.append(partial(self._prune, {each.uid for each in pods}))
        self._decided = {each.pod.uid: each.placement for each in decisions if isinstance(each, Placed)}
        try:
            return await self._write(writes)
        finally:
            self._decided = {}

    async def _write(self, writes: list[Callable[[], Awaitable[object]]]) -> bool:
        complete, refused = True, set[str]()
        for write in writes:
            try:
                await write()
            except KubernetesError as error:
                complete = False
                if error.status in OF_ONE_OBJECT:  # which holds up no other pod
                    refused.add(str(error))
                elif error.status not in (CONFLICT, NOT_FOUND):  # else what has changed is seen soon
                    logger.warning("shares: %s", error)
                    break
        for text in sorted(refused - self._refused):
            logger.warning("shares: %s", text)
        self._refused = refused
        return complete

    async def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Placed(pod, placement):
                try:
                    await self._give(pod, placement)
                except KubernetesError as error:
                    if error.status in OF_ONE_OBJECT:
                        await self._tell(pod, "Invalid", str(error))
                    raise
            case NoRoom(pod, reason):
                await self._tell(pod, "NoRoom", reason)
            case Recut(pod, node, device, shares):
                await self._cut(node, device, shares)
                sizes = " + ".join(show_share(share) for share in shares)
                await self._tell(pod, "WaitsForCut", f"{device} on {node} is being cut into {sizes}")

    def _written(self) -> dict[str, SharePlacement]:
        """Return what ConfigMaps hold for pods, by uid."""
        maps = self._current(self._config_maps, self._read_maps, read_held)
        return {each.uid: each.placement for held in maps for each in held.values()}

    def _current(
        self,
        informer: Informer,
        known: dict[ObjectKey, tuple[str, _Read]],
        read: Callable[[KubeObject], _Read],
    ) -> list[_Read]:
        """Return what the objects say; only those that have changed are read."""
        for key in known.keys() - informer.objects.keys():
            del known[key]
        for key, each in informer.objects.items():
            version = version_of(each)
            if key not in known or known[key][0] != version:
                known[key] = version, read(each)
        return [each for _, each in known.values()]

    def _forget_seen(self) -> None:
        """Forget what was written where the objects tell it now, or the pod is gone."""
        there = {each["metadata"].get("uid"): each for each in self._pods.objects.values()}
        for uid in list(self._given):
            pod = read_pod(there[uid]) if uid in there else None
            if not isinstance(pod, SharePod) or pod.placement is not None:
                del self._given[uid]

    async def _give(self, pod: SharePod, placement: SharePlacement) -> None:
        """Write a share: the ConfigMap, then the pod."""
        present = self._pods.objects.get(pod.key)
        if present is None or not await self._restore(pod, placement):
            return
        self._given[pod.uid] = _Given(placement)
        await self._client.patch(PODS, pod.key, opened(present, placement))
        self._given[pod.uid].opened = True
        logger.info("%s gets %s of %s on %s", pod.key, show_share(placement.share), placement.visible, placement.node)

    async def _restore(self, pod: SharePod, placement: SharePlacement) -> bool:
        """Write the ConfigMap of a share; return whether it stands."""
        if await write_share(self._client, pod, placement, self.config_map(pod)):
            return True
        await self._tell(
            pod, "Invalid", f"ConfigMap {pod.config_map!r} is somebody else's; name another in {CONFIG_MAP}"
        )
        return False

    def config_map(self, pod: SharePod) -> KubeObject | None:
        """Return the ConfigMap of a pod, as far as it is known."""
        return self._config_maps.objects.get(ObjectKey(pod.key.namespace, pod.config_map))

    async def _tell(self, pod: SharePod | BrokenPod, reason: str, message: str) -> None:
        """Write why a pod has no share into its status."""
        now = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        present = self._pods.objects.get(pod.key)
        change = None if present is None else condition(present, reason, message, now)
        if change is not None:
            await self._client.patch(PODS, pod.key, change, "status")

    async def _cut(self, node: str, device: str, shares: tuple[int, ...]) -> None:
        key = ObjectKey("", node)
        present = self._nodes.objects.get(key)
        change = None if present is None else cuts_for(present, device, shares)
        if change is not None:
            await self._client.patch(NODES, key, change)
            logger.info("%s on %s is to be cut into %s ‰", device, node, ", ".join(map(str, shares)))

    async def _prune(self, uids: set[str]) -> None:
        """Take pods that are gone out of the ConfigMaps that several share."""
        for config_map in list(self._config_maps.objects.values()):
            body = without_gone(config_map, uids)
            if body is not None:
                await self._client.replace(CONFIG_MAPS, body)


async def write_share(client: ApiClient, pod: SharePod, placement: SharePlacement, present: KubeObject | None) -> bool:
    """Write the ConfigMap of a pod's share; return False where one of its name is somebody else's. present: as far as
    it is known. Raises KubernetesError."""
    if present is None:
        try:
            body = config_map_for(pod, placement, None)
            assert body is not None
            await client.create(CONFIG_MAPS, body)
        except KubernetesError as error:
            if error.status != CONFLICT:
                raise
            present = await client.get(CONFIG_MAPS, pod.config_map, pod.key.namespace)
        else:
            return True
    if is_foreign(pod, present):
        return False
    body = config_map_for(pod, placement, present)
    if body is not None:
        await client.replace(CONFIG_MAPS, body)
    return True
