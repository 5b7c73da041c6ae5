"""Compose a server of its parts, and present it to the front ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, BinaryIO

from cotenant.backends import Backend
from cotenant.control.orchestrator import Orchestrator
from cotenant.control.revision import MemoryPolicy
from cotenant.control.rollout import Rollout, RolloutOptions
from cotenant.core.identity import LaneId
from cotenant.core.job import JobState, JobStatus
from cotenant.core.profile import Profile
from cotenant.core.tensor import ModelInfo
from cotenant.errors import ForbiddenError
from cotenant.live.adaptation import Adaptation, AdaptationOptions, Learnt
from cotenant.live.confinement import Confinement
from cotenant.live.deployment import Deployment, Prepare
from cotenant.live.deployment_manager import DeploymentManager
from cotenant.live.driver import TOGETHER, Driver, Tensors, Tracer
from cotenant.live.event_log import EventLog
from cotenant.live.inference import InferenceService
from cotenant.live.jobs.serving import ServingView
from cotenant.live.limits import MemoryBudget
from cotenant.live.metrics import ServerCollector
from cotenant.live.model_repository import ModelRepository
from cotenant.live.oip import Done, IndexEntry, InferRequest
from cotenant.live.page import PageFeed
from cotenant.live.response_cache import ResponseCache
from cotenant.live.rollout_driver import RolloutDriver
from cotenant.live.serving_observer import ServingObserver
from cotenant.live.serving_state import FoundModels, ServingState
from cotenant.live.shared_memory import SharedMemory
from cotenant.live.status import Status
from cotenant.live.status_reporter import StatusReporter
from cotenant.live.triton import LOG, TRACE, updated_settings
from cotenant.measure.report import Report
from cotenant.runtime.admission_state import AdmissionState
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.worker.arena import Arena, Block

ClientMemory = tuple[int, MemoryBudget]  # bytes of one tensor, and what counts all of them

ARENA = 4 << 30  # bytes of address space; memory is taken as bodies need it


class Server:
    """Compose the parts of a server: the models, the deployment, inference and status. It is the front ends'
    `oip.Core`, and forwards each call to the part that answers it.

    prepare: plans a deployment for models to be loaded. warm_workers: pre-started processes per worker template.
    confinement: of worker processes. page: feeds the web page. memory_policy: where a device cannot hold the workers of
    two revisions at once. adaptation: None: the plan stays as it is made. log: where the event log goes. tracer: what
    makes traces of requests. no_loads: why callers may not load and unload models; "" where they may. client_memory:
    limits of callers' shared memory; None: there is none. response_cache: bytes of the response cache; None: there is
    none. beyond: bytes of the arena for HTTP processes.
    """

    def __init__(
        self,
        deployment: Deployment,
        backend: Backend,
        prepare: Prepare,
        *,
        warm_workers: int = 0,
        standby_workers: int = 0,
        confinement: Confinement | None = None,
        memory_policy: MemoryPolicy = MemoryPolicy.REFUSE,
        adaptation: AdaptationOptions | None = None,
        log: BinaryIO | None = None,
        tracer: Tracer | None = None,
        no_loads: str = "",
        client_memory: ClientMemory | None = None,
        response_cache: int | None = None,
        beyond: int = 0,
    ) -> None:
        # The driver gives the pool batches, and the pool tells the driver what came of them: one has to be named
        # before it is there.
        def run(lane: LaneId, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
            rollouts.run(lane, batch, model, payloads)

        state = ServingState(deployment)
        events = None if log is None else EventLog(log, partial(state.set_file_error, "event log"))
        observer = ServingObserver(state, busy_since=lambda lane: driver.busy_since(lane))
        driver = Driver(
            Dispatcher(),
            run,
            observer,
            clock=time.monotonic,
            drained=lambda lane: rollouts.drained(lane),
            log=events,
            tracer=tracer,
            together=TOGETHER,
        )
        self.arena = Arena(ARENA, beyond=beyond)
        self.shared_memory = SharedMemory()
        if client_memory is not None:
            tensor, budget = client_memory
            self.shared_memory = SharedMemory(
                enabled=True,
                allocate=self.arena.allocate,
                tensor=tensor,
                budget=budget,
                loop=asyncio.get_running_loop(),
            )
        orchestrator = Orchestrator(Rollout(RolloutOptions(memory=memory_policy)), standbys=standby_workers)
        rollouts = RolloutDriver(
            orchestrator,
            state,
            driver,
            observer,
            backend,
            self.arena,
            warm_workers=warm_workers,
            confinement=confinement,
        )
        deployments = DeploymentManager(state, rollouts, observer, prepare)
        self._state = state
        self._backend = backend
        self._observer = observer
        self._driver = driver
        self._rollouts = rollouts
        self._deployments = deployments
        self._repository = ModelRepository(state, rollouts)
        cache = None if response_cache is None else ResponseCache(response_cache)
        self._inference = InferenceService(state, driver, rollouts, observer, cache)
        self._first = deployment
        self._has_started = False
        self._held_back = False
        self._no_loads = no_loads
        self._adaptation = (
            None if adaptation is None else Adaptation(adaptation, state, driver, observer, rollouts, backend, events)
        )
        self._reporter = StatusReporter(
            state, self._repository, observer, driver, rollouts, backend, adaptation=self._adaptation
        )
        self.page = PageFeed(self._reporter)

    # Its life

    def starting(self, how_far: str) -> None:
        """Hear how far the start of the server is, in words; what is prepared later is no start."""
        if not self._has_started:
            self._state.startup = how_far

    def found(self, models: FoundModels) -> None:
        """Hear which models the server will serve once it has started, and which it cannot."""
        self._state.found = models

    def startup(self) -> str:
        """Return how far the start of the server is, in words; empty once it has started."""
        return self._state.startup

    def hold_readiness(self, held: bool = True) -> None:
        """Tell probes that the server is not ready, whatever it serves; or, with False, as soon as it can serve."""
        self._held_back = held

    async def start(self, deployment: Deployment | None = None, learnt: Learnt | None = None) -> None:
        """Start the workers, then accept requests. Raises WorkerError, with nothing left behind, where one does not
        become ready.

        deployment: the first one; None: that which the server was made with. learnt: what adaptation begins with.
        """
        first = self._first if deployment is None else deployment
        self._state.deploy(first)
        self.starting("starting the workers")
        self.page.start()
        await self._deployments.start(first)
        self._inference.open()
        self.starting("")
        self._has_started = True
        if self._adaptation is not None:
            self._adaptation.start(learnt)

    async def drain(self, grace: float) -> None:
        """Accept no further requests, and wait for those in flight, for `grace` seconds at most."""
        if self._adaptation is not None:
            await self._adaptation.stop()
        await self._inference.drain(grace)

    async def stop(self, grace: float) -> None:
        """Stop all workers, each after its batch in flight, within `grace` seconds."""
        self.page.stop()
        await self._deployments.stop(grace)

    # The deployment

    @property
    def deployment(self) -> Deployment:
        """The deployment in force."""
        return self._state.deployment

    def isolation(self) -> str:
        """Return what isolates partitions, in a few words for people."""
        return self._backend.isolation()

    def learnt(self) -> Learnt | None:
        """Return what adaptation has learnt; None where there is none."""
        return None if self._adaptation is None else self._adaptation.learnt()

    async def apply(self, deployment: Deployment, reason: str = "reload") -> None:
        """Switch to another deployment, as `DeploymentManager.apply` does."""
        await self._deployments.apply(deployment, reason)

    async def change(self, changed: Callable[[Deployment], Awaitable[Deployment]], reason: str) -> None:
        """Apply a change to the deployment in force, as `DeploymentManager.change` does."""
        await self._deployments.change(changed, reason)

    def reloaded(self, error: str = "", failures: Mapping[str, str] = MappingProxyType({})) -> None:
        """Hear that the settings were read again, or why that was rejected. failures: by model that stays as it was
        served, why it could not be loaded again."""
        self._state.reload_error = error
        if not error:
            self._state.failures = dict(failures)  # the other models were all looked at anew

    def stored(self, error: str = "") -> None:
        """Hear that what is kept over a restart was stored, or why it cannot be."""
        self._state.set_file_error("state", error)

    def profiles_kept(self, error: str = "") -> None:
        """Hear that profiles were kept for the next start, or why they cannot be."""
        self._state.set_file_error("profiles", error)

    def replace_profile(self, profile: Profile) -> None:
        """Let plans to come count with another profile of a model."""
        self._rollouts.replace_profile(profile)

    def refining(self, how_far: str) -> None:
        """Hear how far the refinement of profiles is, in words."""
        self._state.refinement = how_far

    def show_jobs(self, jobs: Callable[[], Sequence[JobStatus]]) -> None:
        """Show best-effort jobs in status, metrics and on the page. jobs: returns them as they stand."""
        self._state.jobs = jobs

    def busy_seconds(self) -> float:
        """Return the seconds that batches have taken since the start."""
        return self._observer.busy_seconds(time.monotonic())

    def serving_view(self) -> ServingView:
        """Return what best-effort jobs see of this server."""
        return ServingView(self._state, self._driver, self._observer, self._rollouts)

    @property
    def runs_jobs(self) -> bool:
        """Whether a best-effort job has a process."""
        return any(status.state is JobState.RUNNING for status in self._state.jobs())

    @property
    def is_changing(self) -> bool:
        """Whether a rollout, a load or an unload is in progress."""
        return bool(self._state.transitions) or not self._rollouts.is_idle

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Load a model as a caller asks for it. Raises ForbiddenError where callers load none."""
        self._check_loads(name)
        await self._deployments.load(name, parameters)

    async def unload(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Unload a model as a caller asks for it. Raises ForbiddenError where callers unload none."""
        self._check_loads(name)
        await self._deployments.unload(name, parameters)

    async def follow_repository(self, changed: str, *, gone: bool) -> None:
        """Load a model whose files have changed, or unload one whose files are gone. Raises FailedError."""
        if gone:
            await self._deployments.unload(changed, {})
            self._state.gone |= {changed}
        else:
            self._state.gone -= {changed}
            await self._deployments.load(changed, {})

    def _check_loads(self, name: str) -> None:
        if self._no_loads:
            raise ForbiddenError(f"model '{name}': {self._no_loads}")

    # The models

    def model(self, name: str, version: str = "") -> ModelInfo:
        return self._repository.model(name, version)

    def model_ready(self, name: str, version: str = "") -> bool:
        return self._repository.ready(name, version)

    def config(self, name: str, version: str = "") -> dict[str, Any]:
        return self._repository.config(name, version)

    def index(self, *, ready: bool = False) -> list[IndexEntry]:
        return self._repository.index(ready=ready)

    # Inference

    def allocate(self, size: int) -> Block | None:
        return self.arena.allocate(size)

    def infer(self, request: InferRequest, done: Done, *, lost: float = 0.0) -> int:
        return self._inference.infer(request, done, lost=lost)

    @property
    def shortest_target(self) -> float:
        return self._inference.shortest_target

    def would_reject(self, model: str, version: str, lost: float) -> bool:
        return self._inference.would_reject(model, version, lost)

    def room(self, model: str) -> tuple[int, float]:
        """Return how many more requests would be admitted, as `InferenceService.room` does."""
        return self._inference.room(model)

    def watch_models(self, changed: Callable[[], None]) -> None:
        """Call back whenever the models that are offered may have changed."""
        self._state.watch(changed)

    def poll(self) -> None:
        self._inference.poll()

    def reject_unread(self, model: str, waited: float) -> None:
        self._inference.reject_unread(model, waited)

    def cancel(self, handle: int) -> None:
        self._inference.cancel(handle)

    # Status

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        """Return whether requests are taken, and a lane is ready for them, unless there is none to be ready."""
        lanes = self._state.lanes
        return (
            self._state.accepting
            and not self._held_back
            and (not lanes or any(self._rollouts.is_ready(lane) for lane in lanes))
        )

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        if name:
            self._repository.model(name, version)
        return self._reporter.statistics(name)

    def metrics(self) -> ServerCollector:
        return self._reporter.metrics()

    def admission(self) -> AdmissionState:
        """Return what a router needs to predict what would be admitted."""
        return self._inference.admission()

    async def status(self) -> Status:
        """Return all that `cotenant status` shows."""
        return await self._reporter.status()

    def with_batch_means(self, report: Report) -> Report:
        """Add to a report of what callers saw what is known here of batches, as `StatusReporter` does."""
        return self._reporter.with_batch_means(report)

    def trace_setting(self, model: str = "", update: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if model:
            self._repository.model(model)
        return updated_settings(TRACE, update, "trace setting")

    def log_settings(self, update: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return updated_settings(LOG, update, "log setting")
