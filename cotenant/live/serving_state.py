"""Hold what is served now: written by the deployment manager, read by the other parts of the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from cotenant.core.identity import LaneId
from cotenant.core.job import JobStatus
from cotenant.live.deployment import Deployment
from cotenant.runtime.lane_assignment import LaneAssignment


class FoundModels(msgspec.Struct, frozen=True):
    """Hold what a server that starts has found in its repository. models: names; broken: those among them that cannot
    be served, with the reason."""

    models: tuple[str, ...] = ()
    broken: dict[str, str] = {}


class ServingState:
    """Hold the deployment in force and its lanes. Each attribute is replaced as a whole, never changed in place;
    `deployment` by `deploy`.

    lanes: by name, as the dispatcher has them. transitions: models that are being loaded (LOADING) or unloaded
    (UNLOADING). repeated_change: what is done again as another plan came into force before it; empty where nothing is.
    accepting: whether requests are admitted; the inference service writes it. startup: how far the start of the server
    is, in words; empty once it has started. found: meanwhile. failures: why the last load of a model failed, be it by a
    reload; gone: models that have left the repository. reload_error: why the last reload of the settings was rejected;
    empty where it was not. file_errors: by file, why it cannot be written. refinement: how far the refinement of
    profiles is, in words; empty where there is none. jobs: returns the best-effort jobs as they stand.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self._on_change: list[Callable[[], None]] = []
        self.lanes: Mapping[LaneId, LaneAssignment] = {}
        self.transitions: Mapping[str, str] = {}
        self.repeated_change = ""
        self.accepting = False
        self.startup = ""
        self.found = FoundModels()
        self.failures: Mapping[str, str] = {}
        self.gone: frozenset[str] = frozenset()
        self.reload_error = ""
        self.file_errors: Mapping[str, str] = {}
        self.refinement = ""
        self.jobs: Callable[[], Sequence[JobStatus]] = tuple

    def deploy(self, deployment: Deployment) -> None:
        """Put a deployment into force."""
        self.deployment = deployment
        for changed in self._on_change:
            changed()

    def set_file_error(self, file: str, why: str) -> None:
        """Hear why a file cannot be written; with an empty reason, that it can be."""
        others = {name: known for name, known in self.file_errors.items() if name != file}
        self.file_errors = {**others, file: why} if why else others

    def watch(self, changed: Callable[[], None]) -> None:
        """Call back whenever another deployment is in force."""
        self._on_change.append(changed)

    def lanes_of(self, model: str) -> dict[LaneId, LaneAssignment]:
        """Return the lanes that hold a model, by name."""
        return {
            name: lane for name, lane in self.lanes.items() if any(held.model == model for held in lane.spec.models)
        }
