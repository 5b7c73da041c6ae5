"""Create the ResourceClaims that stand for the placements of pods.

Level-triggered and idempotent: a second controller writes the same, or conflicts with the first and does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time

from cotenant.errors import ConfigError, KubernetesError
from cotenant.k8s.background import beside
from cotenant.k8s.client import CONFLICT, NOT_FOUND, ApiClient
from cotenant.k8s.dra.planned_claims import (
    LABELS,
    PlannedClaim,
    claim_body,
    claim_status,
    is_foreign,
    is_stale,
    read_planned,
)
from cotenant.k8s.informer import Informer
from cotenant.k8s.pods.kept import kept_of_pod
from cotenant.k8s.resource import PODS, RESOURCE_CLAIMS, KubeObject, ObjectKey, key_of, version_of

logger = logging.getLogger(__name__)

RETRY = 1.0  # seconds until what failed is tried again, where nothing changes before
AGAIN = 15.0  # seconds until what is wrong with a pod or a claim of its name is looked at again: claims of others are
# not followed
QUIET = 0.02  # seconds for which changes may come together


class ClaimController:
    """Follow the pods and claims of a cluster, from one event loop."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._changed = asyncio.Event()
        self._pods = Informer(client, PODS, self._changed.set, everywhere=True, keep=kept_of_pod)
        self._claims = Informer(client, RESOURCE_CLAIMS, self._changed.set, everywhere=True, labels=LABELS)
        self._told: dict[ObjectKey, str] = {}
        self._refused: dict[ObjectKey, tuple[str, float]] = {}  # by pod: its version, and when to look at it again
        # By pod: its version, its claim, and the version of that, where nothing was left to write.
        self._done: dict[ObjectKey, tuple[str, ObjectKey | None, str]] = {}

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with beside(self._pods.run(), self._claims.run()):
            await self._pods.synced()
            await self._claims.synced()
            while True:
                self._changed.clear()
                complete = await self.reconcile()
                try:
                    async with asyncio.timeout(RETRY if not complete else AGAIN if self._refused else None):
                        await self._changed.wait()
                        await asyncio.sleep(QUIET)
                except TimeoutError:
                    pass

    async def reconcile(self) -> bool:
        """Write what is missing for all pods; return whether all of it could be written."""
        complete = True
        for key, pod in list(self._pods.objects.items()):
            if self._is_done(key, pod) or self._is_refused(key, pod):
                continue
            try:
                planned = read_planned(pod)
                if planned is None:
                    self._done[key] = version_of(pod), None, ""
                else:
                    complete &= await self._write(planned)
            except ConfigError as error:
                self._tell(key, str(error))
                self._refused[key] = version_of(pod), time.monotonic() + AGAIN
            except KubernetesError as error:
                complete = False
                if error.status not in (CONFLICT, NOT_FOUND):  # else what has changed is seen soon
                    logger.warning("claims: %s", error)
                    break
            else:
                self._told.pop(key, None)
                self._refused.pop(key, None)
        for known in (self._told, self._refused, self._done):
            for key in known.keys() - self._pods.objects.keys():
                known.pop(key)
        return complete

    def _is_done(self, key: ObjectKey, pod: KubeObject) -> bool:
        """Return whether neither a pod nor its claim has changed since nothing was left to write."""
        version, name, seen = self._done.get(key, ("", None, ""))
        if version != version_of(pod):
            return False
        claim = None if name is None else self._claims.objects.get(name)
        return name is None or (claim is not None and version_of(claim) == seen)

    def _is_refused(self, key: ObjectKey, pod: KubeObject) -> bool:
        """Return whether a pod that can have no claim is the same as before, and is not yet to be looked at again."""
        version, until = self._refused.get(key, ("", 0.0))
        return version == version_of(pod) and time.monotonic() < until

    async def _write(self, planned: PlannedClaim) -> bool:
        """Write the claim of a pod; return whether it stands."""
        seen = claim = self._claims.objects.get(planned.key)
        if claim is None:
            claim = await self._create(planned)
        if is_foreign(claim):
            raise ConfigError(f"claim {planned.key} is somebody else's; name another in the pod")
        if is_stale(planned, claim):
            await self._client.delete(RESOURCE_CLAIMS, planned.key, claim["metadata"]["uid"])
            claim = await self._create(planned)
            if is_stale(planned, claim):
                return False  # it is there until its pod has ended
        status = claim_status(planned, claim)
        if status is not None:
            body = {"metadata": claim["metadata"], "spec": claim["spec"], "status": status}
            await self._client.replace(RESOURCE_CLAIMS, body, "status")
        elif claim is seen:
            self._done[key_of(planned.pod)] = version_of(planned.pod), planned.key, version_of(claim)
        return True

    async def _create(self, planned: PlannedClaim) -> KubeObject:
        try:
            return await self._client.create(RESOURCE_CLAIMS, claim_body(planned))
        except KubernetesError as error:
            if error.status != CONFLICT:
                raise
        # Not seen yet, or without our label.
        return await self._client.get(RESOURCE_CLAIMS, planned.key.name, planned.key.namespace)

    def _tell(self, key: ObjectKey, what: str) -> None:
        if self._told.get(key) != what:
            logger.warning("%s", what)
            self._told[key] = what
