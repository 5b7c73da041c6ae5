"""Build a controller from a problem, in the same way for the server, simulated runs and replays of either."""

from __future__ import annotations

import msgspec

from cotenant.control.controller import Controller
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.provider import DeviceOffer
from cotenant.core.identity import DeviceId
from cotenant.core.plan import Plan
from cotenant.planners import Problem


class ControllerBuilt(msgspec.Struct, frozen=True, kw_only=True, tag="controller"):
    """What a controller is built from; see `Controller`."""

    devices: tuple[DeviceId, ...]
    targets: dict[str, float]
    options: ControllerOptions = ControllerOptions()
    offers: tuple[DeviceOffer, ...] = ()

    @classmethod
    def of(
        cls,
        problem: Problem,
        plan: Plan,
        options: ControllerOptions | None = None,
        offers: tuple[DeviceOffer, ...] = (),
    ) -> ControllerBuilt:
        """Return what the controller of a problem's models needs, where a plan is in force."""
        return cls(
            devices=known_devices(problem, plan),
            targets=slo_targets(problem),
            options=options or ControllerOptions(),
            offers=offers,
        )

    def controller(self) -> Controller:
        """Build it."""
        return Controller(self.devices, dict(self.targets), self.options, self.offers)


def slo_targets(problem: Problem) -> dict[str, float]:
    """Return the fraction of requests that must meet their target, by model or application."""
    targets = {model.name: model.attainment for model in problem.models}
    return targets | {application.name: application.attainment for application in problem.applications}


def known_devices(problem: Problem, plan: Plan | None = None) -> tuple[DeviceId, ...]:
    """Return all devices of kinds of which there is a number, and those of others that a plan uses."""
    there = {DeviceId(kind.name, index) for kind in problem.fleet for index in range(kind.count or 0)}
    used = set() if plan is None else {device.id for device in plan.devices}
    return tuple(sorted(there | used))
