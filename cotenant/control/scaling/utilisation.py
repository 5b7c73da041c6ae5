"""Scaling by utilisation, as the Kubernetes Horizontal Pod Autoscaler does it.

https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/, sections "Algorithm details" and "Default
behavior": every 15 s, ⌈replicas · utilisation / target⌉ are desired, and nothing changes within a tolerance of 10 %.
Replicas that are not ready yet count as idle where that scales up. Downwards, the largest desired number of the last
five minutes holds; upwards at most doubling, or four more, in 15 s. The page leaves the target to the user.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.control.scaling.context import Observation, ScalingContext


class UtilisationScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the utilisation of the devices of one kind at a target. The rest of the fleet stays as it is.

    target: from 0 to 1. tolerance: of the ratio of utilisation to target. stabilisation: seconds for which a scale-down
    waits. least: devices to keep in any case; the Horizontal Pod Autoscaler keeps one. max_growth, max_added: at once,
    whichever is more.
    """

    kind: str
    target: float = 0.8
    tolerance: float = 0.1
    stabilisation: float = 300.0
    least: int = 1
    max_growth: float = 2.0
    max_added: int = 4

    @property
    def horizon(self) -> float:
        return self.stabilisation

    def __call__(self, context: ScalingContext) -> dict[str, int]:
        allocated = context.allocated(self.kind)
        if not context.history:
            return {self.kind: allocated}
        desired = self._desired(context.history[-1], allocated)
        if desired < allocated:
            earlier = (
                self._desired(seen, max(seen.ready.get(self.kind, 0), seen.wanted.get(self.kind, 0)))
                for seen in context.since(self.stabilisation)[:-1]
            )
            desired = min(allocated, max([desired, *earlier]))
        most = max(math.floor(allocated * self.max_growth), allocated + self.max_added)
        return {self.kind: int(max(self.least, min(desired, most, context.limit(self.kind))))}

    def _desired(self, seen: Observation, allocated: int) -> int:
        """Return the number of devices that would have brought an observation's utilisation to the target.

        allocated: ready, or on their way at that time.
        """
        ready = seen.ready.get(self.kind, 0)
        if not ready:
            return allocated
        ratio = seen.utilisation / self.target
        if abs(ratio - 1) <= self.tolerance:
            return allocated
        # Those that are not ready yet count as idle; where that undoes the reason to scale up, nothing changes.
        if ratio > 1 and ratio * ready / max(allocated, ready) <= 1 + self.tolerance:
            return allocated
        return math.ceil(ready * ratio - 1e-9)
