"""Lead a server to what the cluster's ServedModels and DevicePools say, and say in their status what has become of it.

Level-triggered: each turn looks at all that there is, decides by `desired_state` and `status`, and writes what differs.
Serving never waits for the API server: while that is away, all stays as it was last seen.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import msgspec

from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.running_server import RunningServer
from cotenant.app.startup import Prepared
from cotenant.config import Settings
from cotenant.control.revision import RolloutOutcome
from cotenant.core.model import Kind
from cotenant.errors import ConfigError, CotenantError, KubernetesError, RolloutError
from cotenant.k8s.client import CONFLICT, INVALID_OBJECT, NOT_FOUND, ApiClient
from cotenant.k8s.desired_state import DesiredState, Reconciler
from cotenant.k8s.elector import Elector
from cotenant.k8s.endpoints import differs, endpoint_slice
from cotenant.k8s.informer import Informer
from cotenant.k8s.resource import (
    DEVICE_POOLS,
    ENDPOINT_SLICES,
    PODS,
    SERVED_MODELS,
    KubeObject,
    ObjectKey,
    Resource,
    key_of,
    version_of,
)
from cotenant.k8s.specs import (
    INVALID,
    Found,
    FoundModel,
    FoundPool,
    agents_of,
    read_device_pools,
    read_served_models,
    refused_agents,
)
from cotenant.k8s.status import ServerView, model_error, model_status, pool_status, worth_writing
from cotenant.live.nodes.registry import Nodes
from cotenant.worker.repository import scan_repository

logger = logging.getLogger(__name__)

PERIOD = 5.0  # seconds between two turns where nothing happens
ADVERTISE_SECONDS = 30.0  # between two looks at where the Service leads


class Controller:
    """Follow the resources of one namespace, from one event loop.

    settings: those that the server was started with; models and limits of devices come from the resources. clock:
    monotonic seconds. wall: seconds since 1970, which stand in conditions for people to read.
    """

    def __init__(
        self,
        client: ApiClient,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,  # noqa: TID251  # for people; nothing is decided by it
    ) -> None:
        options = settings.kubernetes
        self._client = client
        self._base = settings
        self._read_base: Settings | None = None  # as the file was read last; not in force, and may never be
        self._nodes: Nodes | None = None
        self._clock = clock
        self._wall = wall
        self._changed = asyncio.Event()
        self._elector = Elector(
            client, options.lease, options.own_identity, options.lease_duration, self._changed.set, clock, wall
        )
        self._models = Informer(client, SERVED_MODELS, self._changed.set)
        self._pools = Informer(client, DEVICE_POOLS, self._changed.set)
        self._pods = Informer(client, PODS, self._changed.set, labels=options.agents)
        self._reconciler = Reconciler()
        self._builder: DeploymentBuilder | None = None
        self._available: frozenset[str] | None = None
        self._looked = -float("inf")  # when the repository was looked at
        self._applying: asyncio.Task[None] | None = None
        self._agents: dict[str, str] = {}
        self._fleet: tuple[Kind, ...] = ()  # what can be planned for
        # By object: the version that a status was written over last, and when. Until the watch brings a newer version,
        # there is nothing to write that could last.
        self._written: dict[tuple[str, ObjectKey], tuple[str, float]] = {}
        self._failure = ""
        self._ready = False  # whether all models of the start are served that can be
        self._advertised = -float("inf")
        self._unadvertised = ""
        self._crash: BaseException | None = None  # of a task that ought to go on for ever

    # Before the server serves

    async def prepare(self, builder: DeploymentBuilder) -> Prepared:
        """Wait until this front end leads and has seen all resources; then begin with no model.

        The models come once workers can run: one that does not start is rejected by itself, and told in its status.
        """
        said = ""
        while not (self._elector.leads and self._synced):
            if (text := self._waiting()) != said:
                builder.say(text)
                logger.info("%s", text)
                said = text
            self._check_leads()
            await self._turn(PERIOD)
        self._builder = builder
        await self._look_at_repository()
        self._follow_agents(self._read()[1])
        if self._nodes is not None and self._agents:
            builder.say("waiting for the nodes")
            await self._nodes.heard(self._base.cluster.patience)
        builder.say("waiting for the models of the cluster")
        return Prepared(await builder.describe(()))

    def _waiting(self) -> str:
        """Say what a front end that does not lead yet waits for. Whoever asks for readiness is told, so why the API
        server cannot be asked stands in the log alone."""
        if self._elector.error or any(each.error for each in (self._models, self._pools, self._pods)):
            return "waiting for the API server"
        if not self._elector.leads and self._elector.election.holder:
            return f"standing by: {self._elector.election.holder} leads"
        return "waiting for the cluster's resources"

    def settings(self, base: Settings) -> Settings:
        """Return settings that were read again, with the models and limits in force."""
        check_base(base)
        self._read_base = base
        return combined(base, self._reconciler.in_force)

    def on_reload(self, settings: Settings) -> None:
        """Hear which settings are in force."""
        if self._read_base is not None and settings == combined(self._read_base, self._reconciler.in_force):
            self._base = self._read_base

    # While it serves

    async def run(self, server: RunningServer) -> None:
        """Lead a server until cancelled. Raises KubernetesError where another front end has taken the lease."""
        try:
            while True:
                self._check_leads()
                await self._reconcile(server)
                due = self._reconciler.due(self._clock())
                await self._turn(PERIOD if due is None else min(PERIOD, max(due, 0.05)))
        finally:
            if self._applying is not None:
                self._applying.cancel()
                await asyncio.gather(self._applying, return_exceptions=True)

    async def _reconcile(self, server: RunningServer) -> None:
        models, pools = self._read()
        await self._look_at_repository()
        self._follow_agents(pools)
        self._look_at_devices()
        if self._applying is None and self._fleet:
            wanted = self._wanted(models, pools)
            state = self._reconciler.next(wanted, self._clock())
            if state is not None:
                self._applying = asyncio.create_task(self._apply(server, state))
                self._applying.add_done_callback(self._applied)
            else:
                server.release_readiness()
                self._ready = True
        if self._elector.leads:
            await self._write(server, models, pools)
            if self._ready:
                await self._advertise(server)

    async def _apply(self, server: RunningServer, state: DesiredState) -> None:
        try:
            await server.reload(combined(self._base, state))
        except RolloutError as error:
            if error.outcome in (RolloutOutcome.SUPERSEDED, RolloutOutcome.OUTDATED):
                self._reconciler.overtaken(self._clock())
            else:
                self._reconciler.rejected(state, str(error), self._clock())
        except CotenantError as error:
            self._reconciler.rejected(state, str(error), self._clock())
        else:
            self._reconciler.applied(state)

    def _applied(self, task: asyncio.Task[None]) -> None:
        self._applying = None
        self._ended(task)

    def _read(self) -> tuple[list[FoundModel], list[FoundPool]]:
        return read_served_models(self._models.objects.values()), read_device_pools(self._pools.objects.values())

    def _wanted(self, models: Collection[FoundModel], pools: Collection[FoundPool]) -> DesiredState:
        repository, before = str(self._base.model_repository), self._reconciler.in_force.models
        usable = [
            model.settings
            for model in models
            if model.settings is not None and not model_error(model, self._available, repository)[0]
        ]
        # A change that makes no sense leaves the model as it is.
        invalid = {model.name for model in models if model.reason == INVALID} - {model.name for model in usable}
        usable += [model for model in before if model.name in invalid]
        limits = [pool.settings for pool in pools if pool.settings is not None]
        return DesiredState(
            tuple(sorted(usable, key=lambda model: model.name)), tuple(sorted(limits, key=lambda pool: pool.kind))
        )

    async def _look_at_repository(self) -> None:
        """Note which models there are, as often as the repository is to be looked at."""
        builder, now = self._builder, self._clock()
        if builder is None or now - self._looked < self._base.repository_poll_interval:
            return
        first, self._looked = self._available is None, now

        def names() -> frozenset[str]:
            return frozenset(entry.name for entry in scan_repository(builder.repository(), {}))

        try:
            self._available = await asyncio.to_thread(names)
        except ConfigError as error:
            if first:
                raise
            logger.warning("the repository cannot be read, assuming no change: %s", error)

    def _look_at_devices(self) -> None:
        """Note what can be planned for; with other devices, what was rejected is worth another attempt."""
        if self._builder is None:
            return
        fleet = self._builder.available()
        if fleet != self._fleet:
            self._fleet = fleet
            self._reconciler.forgive()

    @asynccontextmanager
    async def discover(self, nodes: Nodes) -> AsyncIterator[None]:
        """Add the nodes of agents, within the block, once this front end leads: an agent has one at a time."""
        self._nodes = nodes
        try:
            yield
        finally:
            self._nodes = None

    def _follow_agents(self, pools: Collection[FoundPool]) -> None:
        if self._nodes is None:
            return
        agents = agents_of(self._pods.objects.values(), pools)
        for node in self._agents.keys() - agents.keys():
            self._nodes.remove(node)
        for node, address in agents.items():
            if self._agents.get(node) != address:
                try:
                    self._nodes.add(node, address)
                except ConfigError as error:
                    logger.error("the agent of node %s cannot be used: %s", node, error)
        self._agents = agents

    async def _write(self, server: RunningServer, models: Collection[FoundModel], pools: Collection[FoundPool]) -> None:
        now = datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        view = ServerView(
            status=await server.status(),
            plan=server.deployment.plan,
            fleet=self._fleet,
            available=self._available,
            repository=str(self._base.model_repository),
            changing=self._applying is not None,
        )
        limits = self._wanted(models, pools).devices
        statuses: list[tuple[Resource, Found, KubeObject]] = [
            (SERVED_MODELS, model, model_status(model, view, self._rejection(model), now)) for model in models
        ]
        rejection, refused = self._reconciler.reason(limits), refused_agents(self._pods.objects.values(), pools)
        statuses += [
            (DEVICE_POOLS, pool, pool_status(pool, view, rejection, now, refused.get(pool.key, {}))) for pool in pools
        ]
        failure = ""
        for resource, found, status in statuses:
            try:
                await self._write_status(resource, found, status)
            except KubernetesError as error:
                failure = failure or str(error)
                if error.status != INVALID_OBJECT:  # else it is about this object, and keeps back no other
                    break
        if failure and not self._failure:
            logger.warning("status cannot be written: %s", failure)
        self._failure = failure
        keys = {(resource.plural, found.key) for resource, found, _ in statuses}
        self._written = {key: each for key, each in self._written.items() if key in keys}

    def _rejection(self, model: FoundModel) -> str:
        return "" if model.settings is None else self._reconciler.reason(model.settings)

    async def _write_status(self, resource: Resource, found: Found, status: KubeObject) -> None:
        key, now, version = (resource.plural, found.key), self._clock(), version_of(found.body)
        before: Mapping[str, object] = found.body.get("status") or {}
        over, at = self._written.get(key, ("", -float("inf")))
        if version == over or not worth_writing(before, status, now - at):
            return
        body = {"metadata": found.body["metadata"], "spec": found.body.get("spec", {}), "status": status}
        try:
            await self._client.replace(resource, body, "status")
        except KubernetesError as error:
            if error.status not in (CONFLICT, NOT_FOUND):  # a newer one is on its way here
                raise
        self._written[key] = version, now

    async def _advertise(self, server: RunningServer) -> None:
        """Lead the Service here."""
        options, now = self._base.kubernetes, self._clock()
        if options.service is None or now - self._advertised < ADVERTISE_SECONDS:
            return
        ports = {"http": server.addresses.http, "grpc": server.addresses.grpc}
        try:
            address = await asyncio.to_thread(options.own_address)
            wanted = endpoint_slice(
                options.service, address, {name: int(each.rpartition(":")[2]) for name, each in ports.items()}
            )
            try:
                found = await self._client.get(ENDPOINT_SLICES, options.service)
            except KubernetesError as error:
                if error.status != NOT_FOUND:
                    raise
                await self._client.create(ENDPOINT_SLICES, wanted)
            else:
                if not self._elector.leads:
                    return  # what another one has written before must stay; what it writes later is a conflict
                if found.get("addressType") != wanted["addressType"]:  # which no write may change
                    await self._client.delete(ENDPOINT_SLICES, key_of(found), found["metadata"]["uid"])
                    await self._client.create(ENDPOINT_SLICES, wanted)
                elif differs(found, wanted):
                    await self._client.replace(
                        ENDPOINT_SLICES, {**wanted, "metadata": {**found["metadata"], **wanted["metadata"]}}
                    )
        except CotenantError as error:
            if not self._unadvertised:
                logger.warning("Service %s does not lead here: %s", options.service, error)
            self._unadvertised = str(error)
        else:
            self._advertised, self._unadvertised = now, ""

    # All the time

    @property
    def _synced(self) -> bool:
        return all(informer.is_synced for informer in (self._models, self._pools, self._pods))

    def _check_leads(self) -> None:
        if self._crash is not None:
            raise self._crash
        if self._elector.election.is_lost:
            raise KubernetesError(
                f"{self._elector.election.holder} has taken the lease; this front end stops, to stand by once it is "
                "started again",
                CONFLICT,
            )

    async def _turn(self, seconds: float) -> None:
        """Wait for a change, for `seconds` at most."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the cluster within the block; at its end, leave the lease to others."""
        work = [self._models.run(), self._pools.run(), self._pods.run(), self._elector.run()]
        tasks = [asyncio.create_task(each) for each in work]
        for task in tasks:
            task.add_done_callback(self._ended)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._elector.release()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._crash = self._crash or task.exception()
            self._changed.set()


def combined(base: Settings, state: DesiredState) -> Settings:
    """Return the settings of a server whose models, and limits of devices, are the cluster's. base: all else, and the
    limits of other devices."""
    pooled = {devices.kind for devices in state.devices}
    return msgspec.structs.replace(
        base,
        load_models=tuple(model.name for model in state.models),
        models=state.models,
        devices=(*state.devices, *(devices for devices in base.devices if devices.kind not in pooled)),
    )


def check_base(settings: Settings) -> None:
    """Raise ConfigError for models in the settings of a server whose models are the cluster's."""
    if settings.models or settings.load_models is not None:
        raise ConfigError(
            'models, load_models: with model_control_mode = "kubernetes" models are ServedModel resources; leave both '
            'out, or use "explicit"'
        )
