"""Decide what to ask of the server, so that all is served that can be, and what cannot be keeps back nothing else.

Pure: wants and outcomes in, the next attempt out. The server takes a whole set of models or none of it. Where it
rejects a set, its changes are tried one by one; a change that is rejected alone waits, and what was in force stays.
"""

from __future__ import annotations

import msgspec

from cotenant.config import DeviceSettings, ModelSettings

FIRST_WAIT, LONGEST_WAIT = 15.0, 600.0  # seconds until what was rejected is tried again: twice as long each time
SOON = 1.0  # seconds until what another revision overtook is tried again

Change = ModelSettings | tuple[DeviceSettings, ...]


class DesiredState(msgspec.Struct, frozen=True):
    """What is to be served, by name, and what plans may make of devices."""

    models: tuple[ModelSettings, ...] = ()
    devices: tuple[DeviceSettings, ...] = ()


class Rejection(msgspec.Struct, frozen=True):
    """Why a change was rejected, until when it waits, and how long that was."""

    reason: str
    until: float
    wait: float


class Reconciler:
    """Lead a server to what is wanted. All times are seconds of one clock."""

    def __init__(self) -> None:
        self.in_force = DesiredState()
        self._rejected: dict[Change, Rejection] = {}
        self._one_by_one = False
        self._not_before = 0.0

    def next(self, wanted: DesiredState, now: float) -> DesiredState | None:
        """Return the state to apply now; None where there is nothing to do, or not yet."""
        known: set[Change] = {*wanted.models, wanted.devices}
        self._rejected = {change: each for change, each in self._rejected.items() if change in known}
        if now < self._not_before:
            return None
        target = self._target(wanted, now)
        changes = self._changes(target)
        if not changes:
            self._one_by_one = False
            return None if target == self.in_force else target  # what is deleted leaves
        if not self._one_by_one or len(changes) == 1:
            return target
        return self._with(target, changes[0])

    def applied(self, state: DesiredState) -> None:
        """Hear that the server has taken a state."""
        taken: set[Change] = {*state.models, state.devices}
        self._rejected = {change: each for change, each in self._rejected.items() if change not in taken}
        self.in_force = state

    def rejected(self, state: DesiredState, reason: str, now: float) -> None:
        """Hear that the server has rejected a state, and serves what it did before."""
        changes = self._changes(state)
        if len(changes) > 1:
            self._one_by_one = True
            return
        for change in changes:
            before = self._rejected.get(change)
            wait = FIRST_WAIT if before is None else min(2 * before.wait, LONGEST_WAIT)
            self._rejected[change] = Rejection(reason, now + wait, wait)
        if not changes:
            self._not_before = now + FIRST_WAIT

    def overtaken(self, now: float) -> None:
        """Hear that another revision came in between; the state is tried again soon."""
        self._not_before = now + SOON

    def forgive(self) -> None:
        """Let all that was rejected be tried again at once: there are other devices now."""
        self._rejected = {
            change: msgspec.structs.replace(each, until=0.0, wait=FIRST_WAIT / 2)
            for change, each in self._rejected.items()
        }
        self._not_before = 0.0

    def reason(self, change: Change) -> str:
        """Return why a change was rejected last; empty where it was not."""
        each = self._rejected.get(change)
        return "" if each is None else each.reason

    def due(self, now: float) -> float | None:
        """Return the seconds until something is to be tried again; None where nothing is."""
        times = [each.until for each in self._rejected.values() if each.until > now]
        times += [self._not_before] if self._not_before > now else []
        return min(times) - now if times else None

    def _target(self, wanted: DesiredState, now: float) -> DesiredState:
        """Return what is wanted without what waits: of that, what is in force stays."""
        before = {model.name: model for model in self.in_force.models}
        models = []
        for model in wanted.models:
            if not self._waits(model, now):
                models.append(model)
            elif model.name in before:
                models.append(before[model.name])
        devices = self.in_force.devices if self._waits(wanted.devices, now) else wanted.devices
        return DesiredState(tuple(models), devices)

    def _waits(self, change: Change, now: float) -> bool:
        each = self._rejected.get(change)
        return each is not None and now < each.until

    def _changes(self, state: DesiredState) -> list[Change]:
        """Return what a state has that is not in force; what it lacks is none."""
        devices: list[Change] = [] if state.devices == self.in_force.devices else [state.devices]
        before = set(self.in_force.models)
        return devices + [model for model in state.models if model not in before]

    def _with(self, target: DesiredState, change: Change) -> DesiredState:
        """Return what is in force, without what is deleted, and with one change."""
        before = {model.name: model for model in self.in_force.models}
        models = []
        for model in target.models:
            if model == change:
                models.append(model)
            elif model.name in before:
                models.append(before[model.name])
        devices = target.devices if change == target.devices else self.in_force.devices
        return DesiredState(tuple(models), devices)
