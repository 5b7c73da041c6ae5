"""Hold the lease of the front end that serves, or wait for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from cotenant.errors import KubernetesError
from cotenant.k8s.client import CONFLICT, NOT_FOUND, ApiClient
from cotenant.k8s.election import Election, read_lease
from cotenant.k8s.resource import LEASES, KubeObject

logger = logging.getLogger(__name__)

ROUNDS = 6  # looks at the lease, or renewals, in the time that it lasts
RELEASE_SECONDS = 2.0  # that a front end which stops waits for the API server


class Elector:
    """Take part in the election by one lease. changed: called after each look at it. wall: seconds since 1970, which
    stand in the lease for people to read."""

    def __init__(
        self,
        client: ApiClient,
        name: str,
        identity: str,
        duration: float,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,  # noqa: TID251  # for people; nothing is decided by it
    ) -> None:
        self.election = Election(identity, duration)
        self.error = ""
        self._client = client.within(duration / 4)  # a round has a few steps
        self._name = name
        self._changed = changed
        self._clock = clock
        self._wall = wall

    @property
    def leads(self) -> bool:
        """Whether this one holds the lease, and nobody else can."""
        return self.election.leads(self._clock())

    async def run(self) -> None:
        """Take part until cancelled, or until another one holds the lease that this one held."""
        period = self.election.duration / ROUNDS
        while not self.election.is_lost:
            try:
                await self._round()
            except KubernetesError as error:
                self._failed(str(error))
            else:
                self.error = ""
            self._changed()
            await asyncio.sleep(period)

    async def release(self) -> None:
        """Leave the lease for others to take at once, where this one holds it."""
        if not self.leads:
            return
        try:
            client = self._client.within(RELEASE_SECONDS)
            body = await client.get(LEASES, self._name)
            if read_lease(body).holder == self.election.identity:
                await client.replace(LEASES, self.election.released(body))
        except KubernetesError as error:
            logger.warning("the lease could not be released, and runs out: %s", error)

    async def _round(self) -> None:
        body = await self._get()
        self.election.observe(None if body is None else read_lease(body), self._clock())
        if self.election.is_lost or not self.election.may_take(self._clock()):
            return
        asked_at = self._clock()
        wanted = self.election.body(body, self._name, self._client.namespace, self._wall())
        try:
            if body is None:
                written = await self._client.create(LEASES, wanted)
            else:
                written = await self._client.replace(LEASES, wanted)
        except KubernetesError as error:
            if error.status != CONFLICT:
                raise
            return  # another one was faster; the next look shows who
        led = self.election.leads(asked_at)
        self.election.held(read_lease(written), asked_at)
        if not led:
            logger.info("%s leads", self.election.identity)

    async def _get(self) -> KubeObject | None:
        try:
            return await self._client.get(LEASES, self._name)
        except KubernetesError as error:
            if error.status != NOT_FOUND:
                raise
            return None

    def _failed(self, error: str) -> None:
        if not self.error:
            logger.warning("the lease cannot be renewed: %s", error)
        self.error = error
