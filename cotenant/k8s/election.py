"""Decide who leads, by a Lease that each of several front ends tries to hold. Pure.

A lease has run out once its holder was not seen to renew it for as long as it lasts, by the watcher's own clock: the
times that stand in it are other machines', and are never compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from cotenant.k8s.resource import KubeObject

LONGEST = 300.0  # seconds that any lease counts for: as long as settings allow, whatever somebody writes into one


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in a Lease. holder: empty where it was released. duration: seconds. renewed: as it is written.
    version: of the object."""

    holder: str
    duration: float
    renewed: str
    acquired: str
    transitions: int
    version: str


def read_lease(body: Mapping[str, Any]) -> LeaseRecord:
    """Read a Lease, whatever somebody has made of it by hand."""
    spec = body.get("spec") or {}
    return LeaseRecord(
        holder=spec.get("holderIdentity") or "",
        duration=float(spec.get("leaseDurationSeconds") or 0),
        renewed=spec.get("renewTime") or "",
        acquired=spec.get("acquireTime") or "",
        transitions=int(spec.get("leaseTransitions") or 0),
        version=body["metadata"].get("resourceVersion", ""),
    )


class Election:
    """Hold a lease, or wait for it. identity: of this front end. duration: seconds that the lease lasts. All times are
    seconds of one clock."""

    def __init__(self, identity: str, duration: float) -> None:
        self.identity = identity
        self.duration = duration
        self._seen: LeaseRecord | None = None
        self._seen_at = 0.0
        self._renewed_at: float | None = None  # when this one last held it for sure

    @property
    def holder(self) -> str:
        """Return who holds the lease, as last seen; empty where nobody does."""
        return "" if self._seen is None else self._seen.holder

    def observe(self, record: LeaseRecord | None, now: float) -> None:
        """See the lease as it is; None: there is none. Anything that changes in it counts as a renewal."""
        if record is None or self._seen is None or record != self._seen:
            self._seen, self._seen_at = record, now

    def held(self, record: LeaseRecord, asked_at: float) -> None:
        """See the lease as this front end has written it. asked_at: when the write began."""
        self._seen, self._seen_at = record, asked_at
        self._renewed_at = asked_at

    def may_take(self, now: float) -> bool:
        """Whether to write the lease now: it is this one's, nobody's, or has run out."""
        seen = self._seen
        if seen is None or seen.holder in ("", self.identity):
            return True
        return now - self._seen_at >= min(seen.duration or self.duration, LONGEST)

    def leads(self, now: float) -> bool:
        """Whether nobody else can hold the lease: this one renewed it, and it has not run out."""
        return self._renewed_at is not None and not self.is_lost and now - self._renewed_at < self.duration

    @property
    def is_lost(self) -> bool:
        """Whether this one held the lease, and another one does now."""
        return self._renewed_at is not None and self.holder not in ("", self.identity)

    def body(self, before: KubeObject | None, name: str, namespace: str, wall: float) -> KubeObject:
        """Return the lease as this one writes it. before: the object as it is. wall: seconds since 1970, for people."""
        seen, now = self._seen, datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = seen is not None and seen.holder == self.identity
        transitions = 0 if seen is None else seen.transitions + (0 if mine else 1)
        acquired = seen.acquired if seen is not None and mine and seen.acquired else now
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": math.ceil(self.duration),
            "acquireTime": acquired,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        metadata = {"name": name, "namespace": namespace} if before is None else before["metadata"]
        return {"metadata": metadata, "spec": spec}

    def released(self, before: KubeObject) -> KubeObject:
        """Return the lease as this one leaves it for others to take at once."""
        return {"metadata": before["metadata"], "spec": {**before["spec"], "holderIdentity": ""}}
