"""Keep a copy of a collection of objects up to date: list, then watch, and begin again where that breaks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from cotenant.errors import KubernetesError
from cotenant.k8s.client import GONE, WATCH_SECONDS, ApiClient
from cotenant.k8s.resource import KubeObject, ObjectKey, Resource, key_of, version_of

logger = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.2, 15.0  # seconds until what failed is tried again: twice as long each time
SHORT_WATCH = 1.0  # seconds; a watch that ends within them without an event counts as failed


class Informer:
    """Follow the objects of a namespace, or of all. changed: called after each change of them, and when contact to the
    server is lost or found. labels, fields: selectors. keep: returns the fields of an object that are remembered, its
    name, namespace and version among them; None: the object is passed over. seconds: how long one watch lasts.

    While the server is away, `objects` stay as they were last seen.
    """

    def __init__(
        self,
        client: ApiClient,
        resource: Resource,
        changed: Callable[[], None] = lambda: None,
        *,
        namespace: str | None = None,
        everywhere: bool = False,
        labels: str = "",
        fields: str = "",
        keep: Callable[[KubeObject], KubeObject | None] = lambda each: each,
        seconds: int = WATCH_SECONDS,
    ) -> None:
        self._client = client
        self._resource = resource
        self._changed = changed
        self._namespace = namespace
        self._everywhere = everywhere
        self._labels = labels
        self._fields = fields
        self._keep = keep
        self._seconds = seconds
        self._objects: dict[ObjectKey, KubeObject] = {}
        self._version: str | None = None  # None: to be listed anew
        self._synced = asyncio.Event()
        self.error = ""

    @property
    def objects(self) -> Mapping[ObjectKey, KubeObject]:
        """Return what is kept of the objects as they were last seen, by key. Not to be changed."""
        return self._objects

    @property
    def is_synced(self) -> bool:
        """Whether all objects have been listed once."""
        return self._synced.is_set()

    async def synced(self) -> None:
        """Wait until all objects have been listed once."""
        await self._synced.wait()

    async def run(self) -> None:
        """Follow the collection until cancelled."""
        delay = FIRST_DELAY
        while True:
            begun = time.monotonic()
            try:
                progress = await self._follow()
            except KubernetesError as error:
                progress = time.monotonic() - begun >= SHORT_WATCH
                if error.status == GONE:
                    self._version = None
                else:
                    self._lost(str(error))
            delay = FIRST_DELAY if progress else min(2 * delay, LONGEST_DELAY)
            await asyncio.sleep(delay)

    async def _follow(self) -> bool:
        """List where needed, and watch until that ends. Returns whether anything came of it."""
        begun = time.monotonic()
        listed = self._version is None
        if self._version is None:
            listing = await self._client.list(
                self._resource,
                namespace=self._namespace,
                everywhere=self._everywhere,
                labels=self._labels,
                fields=self._fields,
            )
            found = {key_of(each): kept for each in listing.objects if (kept := self._keep(each)) is not None}
            different = found != self._objects or not self.is_synced
            self._objects, self._version = found, listing.version
            self._synced.set()
            self._found()
            if different:
                self._changed()
        events = 0
        async for event in self._client.watch(
            self._resource,
            self._version,
            namespace=self._namespace,
            everywhere=self._everywhere,
            labels=self._labels,
            fields=self._fields,
            seconds=self._seconds,
        ):
            events += 1
            self._found()
            self._version = version_of(event.object)
            if event.type == "BOOKMARK":
                continue
            key = key_of(event.object)
            kept = None if event.type == "DELETED" else self._keep(event.object)
            if kept is not None:
                self._objects[key] = kept
            elif self._objects.pop(key, None) is None:
                continue
            self._changed()
        self._found()
        return bool(events) or listed or time.monotonic() - begun >= SHORT_WATCH

    def _lost(self, error: str) -> None:
        if not self.error:
            logger.warning("%s cannot be followed, and stay as last seen: %s", self._resource.plural, error)
        lost, self.error = not self.error, error
        if lost:
            self._changed()

    def _found(self) -> None:
        if self.error:
            logger.info("%s are followed again", self._resource.plural)
            self.error = ""
            self._changed()
