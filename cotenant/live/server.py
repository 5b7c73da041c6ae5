"""The server: a plan made real, and what the front ends ask of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, BinaryIO, Literal

import msgspec

from cotenant.backends import Backend
from cotenant.core.plan import Device, Partition
from cotenant.core.tensor import ModelInfo
from cotenant.errors import (
    CotenantError,
    FailedError,
    ModelError,
    NotFoundError,
    RequestError,
    UnavailableError,
    UnsupportedError,
    WorkerError,
)
from cotenant.live.deployment import Deployment, Prepare, applications_of, serves, with_planned_batches
from cotenant.live.driver import Driver, Tensors
from cotenant.live.ensemble import EnsembleTensors
from cotenant.live.interference_observer import InterferenceObserver
from cotenant.live.metrics import LaneReading, render_metrics
from cotenant.live.oip import Done, IndexEntry, InferRequest, InferResponse
from cotenant.live.pool import Pool
from cotenant.live.statistics import ModelStatistics
from cotenant.live.status import ModelStatus, Status
from cotenant.live.triton import LOG, TRACE, model_config, updated_settings
from cotenant.measure.report import ModelReport, Report
from cotenant.planners.applications import carried_rates
from cotenant.predictors import Load
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Reply
from cotenant.runtime.lane_assignment import LaneAssignment, LaneMatcher
from cotenant.runtime.lane_specs import lane_specs
from cotenant.worker.arena import Arena, Block
from cotenant.worker.ensemble import Ensemble
from cotenant.worker.repository import worker_model
from cotenant.worker.wire import Timing, WorkerModel

EPOCH = time.time() - time.monotonic()  # noqa: TID251  # what the driver's clock calls 0, in seconds since 1970
ARENA = 4 << 30  # bytes of address space; memory is taken as bodies need it
GLANCE = 0.001  # seconds between two looks at the workers while callers keep the event loop busy


class Server:
    """Owns the dispatcher, its driver and the pool of workers. The front ends see it as `oip.Core`."""

    def __init__(
        self,
        site: Deployment,
        backend: Backend,
        prepare: Prepare,
        *,
        warm_workers: int = 0,
        log: BinaryIO | None = None,
    ) -> None:
        self._site = with_planned_batches(site)
        self._backend = backend
        self._prepare = prepare
        self._layout = LaneMatcher()
        self._moving: dict[str, str] = {}  # models on their way in or out: LOADING or UNLOADING
        self._changing = asyncio.Lock()
        self._stopping: set[asyncio.Task[None]] = set()
        self._open = False
        self._arena = Arena(ARENA)
        self._driver = Driver(Dispatcher(), self._run, self, clock=time.monotonic, drained=self._drained, log=log)
        self._pool = Pool(backend, self._arena, self._driver, warm_workers=warm_workers)
        self._statistics: dict[str, ModelStatistics] = {}
        self._busy: defaultdict[str, float] = defaultdict(float)  # seconds in batches, by lane
        self._beside = InterferenceObserver()
        self._glanced = 0.0  # when the workers were last looked at on behalf of a request

    @property
    def site(self) -> Deployment:
        return self._site

    async def start(self) -> None:
        """Start the workers. Raises WorkerError where one does not come up, with nothing left behind."""
        try:
            await self.apply(self._site)
        except WorkerError:
            await self._pool.close(grace=0.0)
            raise
        self._open = True

    async def drain(self, grace: float) -> None:
        """Take nothing new in, and wait for what is under way, for `grace` seconds at most."""
        self._open = False
        until = time.monotonic() + grace
        while self._driver.open and time.monotonic() < until:
            await asyncio.sleep(0.01)

    async def stop(self, grace: float) -> None:
        await self._pool.close(grace)
        await asyncio.gather(*self._stopping, return_exceptions=True)

    # Plans

    async def apply(self, site: Deployment) -> None:
        """Go over to another plan: its new partitions start and warm up, take over, and only then the old ones stop.

        A partition that both plans have goes on as it is. Raises WorkerError where a new one does not come up; then
        nothing has changed.
        """
        async with self._changing:
            await self._apply(site)

    async def _apply(self, site: Deployment) -> None:
        site = with_planned_batches(site)
        models = {name: offered.model for name, offered in site.offered.items()}
        specs = lane_specs(site.plan, models, site.problem.profiles)
        wanted = self._layout.match(site.plan, specs, lambda model: self._unchanged(model, site))
        fresh = {name: lane for name, lane in wanted.items() if name not in self._layout.lanes}
        await self._start(fresh, site, leaving=[it.lane for it in self._pool.status() if it.lane not in wanted])
        for name, offered in site.offered.items():
            self._statistics.setdefault(name, ModelStatistics(name, offered.info.version, EPOCH))
        self._site = site
        self._driver.apply(tuple(lane.spec for lane in (self._layout.lanes | fresh).values()), applications_of(site))
        for name in fresh:
            if self._pool.is_ready(name):  # it may have died while the others started
                self._driver.ready(name)
        self._driver.apply(tuple(lane.spec for lane in wanted.values()), applications_of(site))
        self._layout.lanes = wanted

    def _unchanged(self, model: str, site: Deployment) -> bool:
        """Whether a model's file is the one that is being served."""
        return model in self._site.offered and self._site.offered[model].entry == site.offered[model].entry

    async def _start(self, lanes: Mapping[str, LaneAssignment], site: Deployment, leaving: Collection[str]) -> None:
        # The largest first, so that the backend can give them cores of their own.
        order = sorted(lanes, key=lambda name: -lanes[name].partition.share)
        starting = [
            self._pool.start(
                name,
                share=lanes[name].partition.share,
                models=self._worker_models(lanes[name], site),
                leaving=leaving,
            )
            for name in order
        ]
        results = await asyncio.gather(*starting, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await asyncio.gather(*(self._pool.stop(name, grace=0.0) for name in order))
            raise failures[0]

    def _worker_models(self, lane: LaneAssignment, site: Deployment) -> list[WorkerModel]:
        return [
            msgspec.structs.replace(
                worker_model(site.offered[model.model].entry, site.offered[model.model].info),
                max_batch=len(model.latencies),
                latencies=model.latencies,
            )
            for model in lane.spec.models
        ]

    def _run(self, lane: str, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        self._pool.run(lane, batch, model, payloads)

    def _drained(self, lane: str) -> None:
        task = asyncio.get_running_loop().create_task(self._pool.stop(lane, grace=1.0))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    # What the driver tells

    def ended(self, reply: Reply, now: float) -> None:
        self._statistics[reply.requests[0].model].ended(reply, now)

    def ran(self, lane: str, model: str, rows: int, seconds: float, timing: Timing) -> None:
        self._busy[lane] += seconds
        served = self._layout.lanes.get(lane)
        predicted = next((m.latencies for m in served.spec.models if m.model == model), ()) if served else ()
        expected = predicted[rows - 1] if rows <= len(predicted) else seconds
        alone = self._alone(served, model, rows, expected)
        self._statistics[model].ran(lane, rows, expected, seconds, timing, alone=alone)
        if served is not None:
            now, load = time.monotonic(), Load(model, served.device.kind, rows, served.partition.share)
            others = {
                name: self._driver.busy_since(name)
                for name, other in self._layout.lanes.items()
                if other.device.name == served.device.name and name != lane
            }
            self._beside.ran(lane, load, since=now - seconds, now=now, alone=alone, others=others)

    def _alone(self, lane: LaneAssignment | None, model: str, rows: int, expected: float) -> float:
        """Seconds that a batch was profiled to take on that share without neighbours; as expected, where it was not."""
        if lane is None or (profile := self._site.problem.profiles.get((model, lane.device.kind))) is None:
            return expected
        seconds = profile.latency(rows, lane.partition.share)
        return seconds if seconds < math.inf else expected

    # What the front ends ask

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return self._open

    def model(self, name: str, version: str = "") -> ModelInfo:
        offered = self._site.offered.get(name)
        if offered is None:
            if name in self._site.broken:
                raise NotFoundError(f"model '{name}' cannot be served: {self._site.broken[name]}")
            known = ", ".join(sorted(self._site.offered)) or "none"
            raise NotFoundError(f"unknown model '{name}'; there are: {known}")
        info = offered.info
        if version not in ("", info.version):
            raise NotFoundError(
                f"unknown version '{version}' of model '{name}'; it is served in version {info.version}"
            )
        return info

    def model_ready(self, name: str, version: str = "") -> bool:
        offered = self._site.offered.get(name)
        return offered is not None and version in ("", offered.info.version) and self._state(name)[0] == "READY"

    def _state(self, model: str) -> tuple[str, str]:
        """As the repository index calls it, and the reason where it is not READY."""
        if model in self._moving:
            return self._moving[model], ""
        offered = self._site.offered.get(model)
        if offered is not None and offered.ensemble is not None:
            return self._state_of_ensemble(model, offered.ensemble)
        lanes = {name for name, lane in self._layout.lanes.items() if any(m.model == model for m in lane.spec.models)}
        if not lanes:
            return "UNAVAILABLE", self._absent(model)
        states = {status.lane: status for status in self._pool.status()}
        if self._open and any(states[lane].state == "ready" for lane in lanes if lane in states):
            return "READY", ""
        return "UNAVAILABLE", next((states[lane].reason for lane in lanes if lane in states), "")

    def _state_of_ensemble(self, name: str, ensemble: Ensemble) -> tuple[str, str]:
        if name not in self._site.plan.split:
            return "UNAVAILABLE", "unloaded"
        states = {model: self._state(model) for model in sorted(ensemble.models)}
        reasons = [f"{model}: {reason or state}" for model, (state, reason) in states.items() if state != "READY"]
        return ("UNAVAILABLE", reasons[0]) if reasons else ("READY", "")

    def _absent(self, model: str) -> str:
        """Why no lane has a model."""
        if model in self._site.plan.unserved:
            return "no share of the devices can serve it within its target; give it more time, or plan for less"
        return "unloaded"

    def config(self, name: str, version: str = "") -> dict[str, Any]:
        info = self.model(name, version)
        lanes = {
            lane: held.device.kind
            for lane, held in self._layout.lanes.items()
            if any(placement.model == name for placement in held.partition.placements)
        }
        return model_config(info, self._site.offered[name], lanes)

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        if name:
            self.model(name, version)
        return [counts.to_json() for model, counts in self._statistics.items() if name in ("", model)]

    def index(self, *, ready: bool = False) -> list[IndexEntry]:
        entries = []
        for name, offered in self._site.offered.items():
            state, reason = self._state(name)
            if not ready or state == "READY":
                entries.append(IndexEntry(name=name, version=offered.info.version, state=state, reason=reason))
        if not ready:
            entries += [
                IndexEntry(name=name, state="UNAVAILABLE", reason=reason) for name, reason in self._site.broken.items()
            ]
        return entries

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Serve a model beside the others: plan again with it, and go over to that plan. Where one of the others would
        have to leave, nothing changes."""
        if "config" in parameters or any(key.startswith("file:") for key in parameters):
            raise UnsupportedError(
                f"model '{name}': load takes no configuration or files; put them into the repository"
            )
        async with self._change("load", name):
            placed = {*self._site.plan.rates(), *self._site.plan.split}
            site = await self._prepare(placed | {name}, self._beside.samples())
            for wanted in (name, *sorted(placed)):
                if wanted in site.broken:
                    raise ModelError(site.broken[wanted])
                if not serves(site, wanted):
                    raise ModelError(
                        f"no share of the devices is free that serves '{wanted}' within its target; "
                        "unload another model, or give it more time"
                    )
            # What was unloaded before stays in the index, and can be loaded again.
            await self._apply(msgspec.structs.replace(site, offered=self._site.offered | site.offered))

    async def unload(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Take a model out of its partitions; the others stay where they are. Harmless where it is not served."""
        if name not in self._site.offered:
            return
        async with self._change("unload", name):
            devices = []
            for device in self._site.plan.devices:
                partitions = [
                    Partition(share=partition.share, placements=kept)
                    for partition in device.partitions
                    if (kept := tuple(p for p in partition.placements if p.model != name))
                ]
                if partitions:
                    devices.append(Device(kind=device.kind, id=device.id, partitions=tuple(partitions)))
            split = {whole: parts for whole, parts in self._site.plan.split.items() if whole != name}
            plan = msgspec.structs.replace(self._site.plan, devices=tuple(devices), split=split)
            await self._apply(msgspec.structs.replace(self._site, plan=plan))

    @asynccontextmanager
    async def _change(self, verb: Literal["load", "unload"], name: str) -> AsyncIterator[None]:
        """A model on its way in or out. One change at a time, each made from what the one before it left."""
        async with self._changing:
            self._moving[name] = f"{verb.upper()}ING"
            try:
                yield
            except CotenantError as error:
                raise FailedError(f"failed to {verb} '{name}': {error}") from None
            finally:
                del self._moving[name]

    def trace_setting(self, model: str = "", update: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if model:
            self.model(model)
        return updated_settings(TRACE, update, "trace setting")

    def log_settings(self, update: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return updated_settings(LOG, update, "log setting")

    def metrics(self) -> str:
        return render_metrics(
            self._statistics.values(), self.readings(), backend=self._backend.name, isolation=self._backend.isolation()
        )

    def readings(self) -> list[LaneReading]:
        """The partitions at this moment."""
        return [
            LaneReading(
                lane=status.lane,
                up=status.state == "ready",
                lost=status.state == "lost",
                share=status.share,
                used_share=status.used_share,
                over_share=status.over_share,
                busy=self._busy[status.lane],
                restarts=status.restarts,
                waiting=self._driver.waiting(status.lane),
            )
            for status in self._pool.status()
        ]

    def allocate(self, size: int) -> Block | None:
        return self._arena.allocate(size)

    def infer(self, request: InferRequest, done: Done) -> int:
        if not self._open:
            raise UnavailableError("the server is starting, or shutting down", retry_after=1.0)
        now = time.monotonic()
        if now - self._glanced > GLANCE:
            self._glanced = now
            self._pool.poll()
        offered = self._site.offered[request.model]
        info, model = offered.info, offered.model

        def answered(result: Tensors | RequestError) -> None:
            if isinstance(result, RequestError):
                done(result)
            else:
                done(InferResponse(model=info.name, version=info.version, id=request.id, outputs=result))

        return self._driver.submit(
            request.model,
            request.inputs if offered.ensemble is None else EnsembleTensors(offered.ensemble, request.inputs),
            answered,
            within=min(
                model.slo if request.timeout is None else request.timeout,
                math.inf if request.patience is None else request.patience,
            ),
            size=request.inputs[0].shape[0] if info.max_batch_size else 1,
            priority=request.priority,
        )

    def cancel(self, ticket: int) -> None:
        self._driver.cancel(ticket)

    def with_batches(self, report: Report) -> Report:
        """A report of what callers saw, with what its batches were to take and took: means over all since the start."""

        def row(seen: ModelReport) -> ModelReport:
            counts = self._statistics[seen.model]
            batches = counts.executions
            if not counts.predicted:
                return seen
            return msgspec.structs.replace(
                seen,
                batch=counts.rows / batches,
                predicted=sum(total.seconds for total in counts.predicted.values()) / batches,
                observed=sum(total.seconds for total in counts.observed.values()) / batches,
            )

        return msgspec.structs.replace(report, models=tuple(row(seen) for seen in report.models))

    def status(self) -> Status:
        """All that `cotenant status` shows."""
        return Status(
            backend=self._backend.name,
            isolation=self._backend.isolation(),
            ready=self._open,
            plan=msgspec.Raw(self._site.plan.to_json()),
            targets={name: offered.model.slo for name, offered in self._site.offered.items()},
            planned=carried_rates(self._site.plan, self._site.problem),
            models=self.index(),
            statistics={
                name: ModelStatus(
                    outcomes={outcome.value: count for outcome, count in counts.outcomes.items()},
                    attainment=counts.attainment,
                    mean=counts.success.seconds / counts.success.count if counts.success.count else 0.0,
                )
                for name, counts in self._statistics.items()
            },
            workers=self._pool.status(),
        )
