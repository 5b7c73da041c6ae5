"""Prepare and unprepare claims: ask the API server what they have, decide, write the files that containers start by.

What is prepared stands in a checkpoint, so a claim that is prepared again gets the same answer, whether or not the
driver was restarted in between and the API server can be reached.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from cotenant.errors import ClaimError, KubernetesError
from cotenant.k8s.client import NOT_FOUND, ApiClient
from cotenant.k8s.dra.allocation import is_allocated, read_allocation
from cotenant.k8s.dra.checkpoint import Checkpoint, write_atomically
from cotenant.k8s.dra.container_edits import PREFIX, ContainerOptions, cdi_specification, file_name
from cotenant.k8s.dra.devices import NodeDevice
from cotenant.k8s.dra.preparation import PreparedClaim, prepare
from cotenant.k8s.resource import RESOURCE_CLAIMS, KubeObject

logger = logging.getLogger(__name__)

_UID = re.compile(r"[0-9A-Za-z]([0-9A-Za-z-]{0,61}[0-9A-Za-z])?")  # as it becomes part of a file's name


class ClaimReference(msgspec.Struct, frozen=True, kw_only=True):
    """A claim as the kubelet names it."""

    uid: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Driver:
    """Have the claims of one node. state: the folder of the checkpoint. cdi: the folder where the container runtime
    looks for specifications. devices: returns those of the node, by name."""

    def __init__(
        self,
        client: ApiClient,
        node: str,
        state: Path,
        cdi: Path,
        options: ContainerOptions,
        devices: Callable[[], Mapping[str, NodeDevice]],
    ) -> None:
        self._client = client
        self._node = node
        self._checkpoint = Checkpoint(state)
        self._cdi = cdi
        self._options = options
        self._devices = devices
        self._claims: dict[str, PreparedClaim] = {}
        self._lock = asyncio.Lock()

    @property
    def claims(self) -> Mapping[str, PreparedClaim]:
        """Return the claims that are prepared, by uid."""
        return self._claims

    @property
    def options(self) -> ContainerOptions:
        """Return what containers get besides their share."""
        return self._options

    def recover(self) -> None:
        """Go on from the checkpoint: write the files that are missing, which are lost with a restart of the machine,
        and delete those of no claim. Raises ConfigError, OSError."""
        self._claims = self._checkpoint.read()
        for claim in self._claims.values():
            try:
                self._write_specification(claim)
            except ClaimError as error:  # prepared under other options; its containers run
                logger.error("no CDI file is written: %s", error)
        known = {file_name(uid) for uid in self._claims}
        for path in self._cdi.glob(f"{PREFIX}*.json"):
            if path.name not in known:
                path.unlink(missing_ok=True)
        for path in self._cdi.glob(f".{PREFIX}*.json.new"):  # of a driver that was killed as it wrote
            path.unlink(missing_ok=True)

    async def prepare(self, references: Sequence[ClaimReference]) -> dict[str, PreparedClaim | ClaimError]:
        """Prepare claims; return by uid what each has got, or why it cannot be prepared."""
        async with self._lock:
            # Together, since a kubelet waits for all of them.
            bodies = await asyncio.gather(*(self._fetch(each) for each in references))
            return {
                reference.uid: await self._prepare(reference, body)
                for reference, body in zip(references, bodies, strict=True)
            }

    async def unprepare(self, references: Sequence[ClaimReference]) -> dict[str, ClaimError | None]:
        """Unprepare claims, also those that never were; return by uid why one could not be."""
        async with self._lock:
            return {each.uid: self._unprepare(each) for each in references}

    async def _fetch(self, reference: ClaimReference) -> KubeObject | ClaimError | None:
        """Return a claim as the API server has it; None where that need not be asked."""
        if not _UID.fullmatch(reference.uid):
            return ClaimError(f"claim {reference}: {reference.uid!r} is not a uid")
        if reference.uid in self._claims:
            return None
        try:
            return await self._client.get(RESOURCE_CLAIMS, reference.name, reference.namespace)
        except KubernetesError as error:
            if error.status == NOT_FOUND:
                return ClaimError(f"claim {reference} is gone")
            return ClaimError(f"claim {reference}: {error}")

    async def _prepare(
        self, reference: ClaimReference, body: KubeObject | ClaimError | None
    ) -> PreparedClaim | ClaimError:
        try:
            if isinstance(body, ClaimError):
                raise body
            claim = self._claims.get(reference.uid)
            if claim is not None:
                self._write_specification(claim)
                return claim
            if body is None:  # released for another claim of this call
                raise ClaimError(f"claim {reference} is gone")
            claim = await self._decide(body, reference.uid)
            self._write_specification(claim)
            self._keep({**self._claims, claim.uid: claim})
        except ClaimError as error:
            logger.warning("not prepared: %s", error)
            return error
        except OSError as error:
            logger.error("claim %s cannot be prepared: %s", reference, error)
            return ClaimError(f"claim {reference}: its files cannot be written: {error}")
        logger.info("prepared claim %s", reference)
        return claim

    async def _decide(self, body: KubeObject, uid: str) -> PreparedClaim:
        allocation = read_allocation(body, uid)
        try:
            return prepare(allocation, self._node, self._devices(), self._claims.values())
        except ClaimError as error:
            if not await self._release(error.holders):
                raise
        return prepare(allocation, self._node, self._devices(), self._claims.values())

    async def _release(self, uids: Sequence[str]) -> bool:
        """Unprepare those of some claims that nobody can use any more: gone from the API server, or without an
        allocation, which either has only after its pods have ended. Returns whether there were any."""
        released = False
        for claim in [self._claims[uid] for uid in dict.fromkeys(uids) if uid in self._claims]:
            reference = ClaimReference(uid=claim.uid, namespace=claim.namespace, name=claim.name)
            try:
                body = await self._client.get(RESOURCE_CLAIMS, claim.name, claim.namespace)
                gone = body["metadata"].get("uid") != claim.uid or not is_allocated(body)
            except KubernetesError as error:
                gone = error.status == NOT_FOUND
            if gone and self._unprepare(reference) is None:
                logger.warning("claim %s is gone without a word from the kubelet; its share is free again", reference)
                released = True
        return released

    def _unprepare(self, reference: ClaimReference) -> ClaimError | None:
        if not _UID.fullmatch(reference.uid):
            return ClaimError(f"claim {reference}: {reference.uid!r} is not a uid")
        try:
            (self._cdi / file_name(reference.uid)).unlink(missing_ok=True)
            if reference.uid in self._claims:
                self._keep({uid: each for uid, each in self._claims.items() if uid != reference.uid})
                logger.info("unprepared claim %s", reference)
        except OSError as error:
            logger.error("claim %s cannot be unprepared: %s", reference, error)
            return ClaimError(f"claim {reference}: its files cannot be changed: {error}")
        return None

    def _keep(self, claims: dict[str, PreparedClaim]) -> None:
        self._checkpoint.write(claims)
        self._claims = claims

    def _write_specification(self, claim: PreparedClaim) -> None:
        """Write the specification of a claim where it is missing or not as it is now."""
        path = self._cdi / file_name(claim.uid)
        content = msgspec.json.format(msgspec.json.encode(cdi_specification(claim, self._options))) + b"\n"
        try:
            if path.read_bytes() == content:
                return
        except FileNotFoundError:
            pass
        write_atomically(path, content)
