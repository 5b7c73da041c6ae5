"""Scale at intervals: read what there is and what Prometheus has, decide, and send the requests.

Everything is decided anew from what there is, so a request that was not answered is decided again, under the same name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from cotenant.control.scaling.provisioning import Instance, InstanceScaler, Provision, Release
from cotenant.core.units import show_rate, show_seconds
from cotenant.errors import InstanceError, PrometheusError
from cotenant.k8s.scaling.observed import Observed

logger = logging.getLogger(__name__)

INTERVAL = 15.0  # seconds between two decisions


class Metrics(Protocol):
    """Read what is known now. Raises PrometheusError."""

    async def read(self) -> Observed: ...


class Instances(Protocol):
    """List, provision and release instances. Each raises InstanceError."""

    async def list(self) -> list[Instance]: ...

    async def provision(self, wanted: Provision) -> bool: ...

    async def release(self, name: str) -> bool: ...


class ScalingController:
    """Keep as many instances as the scaler decides. clock: seconds that never go back."""

    def __init__(
        self,
        scaler: InstanceScaler,
        metrics: Metrics,
        instances: Instances,
        clock: Callable[[], float],
        interval: float = INTERVAL,
    ) -> None:
        self._scaler = scaler
        self._metrics = metrics
        self._instances = instances
        self._clock = clock
        self._interval = interval
        self._told: dict[str, str] = {}

    async def run(self) -> None:
        """Decide until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(self._interval)

    async def step(self) -> list[Provision | Release]:
        """Decide once, and send the requests; return them. While the instance controller does not tell what there is,
        nothing is decided; while Prometheus does not answer, no rate is known, and what there is stays."""
        try:
            there = await self._instances.list()
        except InstanceError as error:
            self._tell("instances", f"instances are unknown: {error}")
            return []
        self._tell("instances", "")
        try:
            observed = await self._metrics.read()
        except PrometheusError as error:
            self._tell("metrics", f"rates are not known, instances stay as they are: {error}")
            observed = Observed()
        else:
            self._tell("metrics", "")
        self._tell_state(there, observed)
        requests = self._scaler.step(self._clock(), self._interval, observed.rates, there)
        self._forget({each.name for each in there}, {each.name for each in requests})
        await asyncio.gather(*(self._send(each, observed) for each in requests))  # one that hangs holds up no other
        return requests

    async def _send(self, request: Provision | Release, observed: Observed) -> None:
        try:
            if isinstance(request, Provision):
                if await self._instances.provision(request):  # rather than was there, after an answer that was lost
                    rate = observed.rates.get(request.model)
                    at = "an unknown rate" if rate is None else f"{show_rate(rate)} requests/s"
                    logger.info("%s: one more on %s, %s, at %s", request.model, request.kind, request.name, at)
            elif await self._instances.release(request.name):
                logger.info("%s: released", request.name)
        except InstanceError as error:
            self._tell(f"request {request.name}", f"{request.name}: {error}")
        else:
            self._tell(f"request {request.name}", "")

    def _tell_state(self, there: Sequence[Instance], observed: Observed) -> None:
        """Log what is known, and whatever keeps an instance from serving, once."""
        for each in there:
            failed = each.state in ("stuck", "ended")
            self._tell(
                f"instance {each.name}", f"instance {each.name} is {each.state}: {each.reason}" if failed else ""
            )
        ready = sum(each.state == "ready" for each in there)
        used = observed.utilisation
        logger.debug(
            "%d instances, %d ready; devices %s; %s",
            len(there),
            ready,
            "not known" if used is None else f"{used:.0%} busy",
            "; ".join(
                f"{model} {show_rate(rate)} requests/s"
                + (f", p99 {show_seconds(observed.latencies[model])}" if model in observed.latencies else "")
                for model, rate in sorted(observed.rates.items())
            )
            or "no rate is known",
        )

    def _forget(self, there: Collection[str], asked: Collection[str]) -> None:
        """Drop what was said of instances that are gone, and of requests that are not made any more."""
        still = (
            {"instances", "metrics"} | {f"instance {name}" for name in there} | {f"request {name}" for name in asked}
        )
        self._told = {about: text for about, text in self._told.items() if about in still}

    def _tell(self, about: str, text: str) -> None:
        """Log what is wrong with something when it changes. text: "" where nothing is."""
        if text and self._told.get(about) != text:
            logger.warning("%s", text)
        if text:
            self._told[about] = text
        else:
            self._told.pop(about, None)
