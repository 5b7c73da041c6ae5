"""Build a deployment from a model repository and settings: describe the models, profile them where needed, plan."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from cotenant.app.backend import worker_confinement
from cotenant.app.front_end_source import request_seconds
from cotenant.app.problem import build_problem, ensemble_model, model_of
from cotenant.app.profile_source import KnownProfiles, ProfileSource, Progress, describe_busy, ignore_progress
from cotenant.app.remote_repository import RemoteRepository
from cotenant.backends import Backend
from cotenant.config import ModelSettings, Settings, read_profiles_file
from cotenant.config.devices import limited
from cotenant.control.controller_built import known_devices
from cotenant.core.identity import DeviceId, own_kind
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.plan_diff import renumber_devices
from cotenant.core.profile import Profile, Profiles, slowed_profiles
from cotenant.core.tensor import ModelInfo
from cotenant.core.units import show_count, show_seconds
from cotenant.errors import ConfigError, ModelError, NotFoundError
from cotenant.live.deployment import (
    NOT_LOADED,
    Deployment,
    KeptModels,
    ServableModel,
    kept_models,
    loaded_models,
    request_policy,
)
from cotenant.live.foreign_load import available_cores
from cotenant.live.profile_corrections import ProfileCorrections
from cotenant.live.serving_state import FoundModels
from cotenant.planners import Problem
from cotenant.planning import plan as plan_problem
from cotenant.planning.replan import with_devices
from cotenant.predictors.samples import Sample
from cotenant.worker.ensemble import NESTED, describe_ensemble
from cotenant.worker.repository import ENSEMBLE, Config, Entry, Use, describe, scan_repository, uses_of

logger = logging.getLogger(__name__)

NOTHING_KEPT = KeptModels()
MAX_REASONS = 5  # of an error that names the models that cannot be served
Entries = dict[str, Entry]  # of the repository, by the model's name
Broken = dict[str, str]  # models that cannot be served, with the reason


class Switched(NamedTuple):
    """A deployment of other settings. failures: by model that stays as it is served, why it cannot be loaded again."""

    deployment: Deployment
    failures: dict[str, str]


class DeploymentBuilder:
    """Build deployments of any of the models in a repository. Models are profiled once, on the backend's devices.

    force: measure again what was measured in an earlier run. full: profile every point of the grid, not only a few.
    corrections: of profiles, that plans count with. found: hears which models there are as soon as that is known, and
    again once all have been described. say: hears what is done next, in words. unkept: see `ProfileSource`.
    """

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        progress: Progress = ignore_progress,
        *,
        force: bool = False,
        full: bool = False,
        corrections: ProfileCorrections | None = None,
        found: Callable[[FoundModels], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
        unkept: Callable[[str], None] | None = None,
    ) -> None:
        self._settings = settings
        self._backend = backend
        self.progress = progress
        confinement = worker_confinement(settings)
        self._profiles = ProfileSource(
            backend, self.available(), progress, force=force, full=full, confinement=confinement, unkept=unkept
        )
        self._given = _given_profiles(settings)
        self._found = found
        self.say = say
        self._allowed: dict[str, list[str]] = {}  # the versions that each model's configuration selects
        self._mirroring = Lock()  # one thread copies at a time
        self._mirrored = False
        self._told: dict[str, str] = {}  # by model: what of its configuration was said to be ignored
        self.corrections = ProfileCorrections() if corrections is None else corrections

    def available(self) -> tuple[Kind, ...]:
        """Return the kinds of devices that can be planned for now: not those of nodes that are cut off."""
        lost = self._backend.lost()
        return tuple(
            kind if kind.name != own_kind(kind.name) else self._with_cuts(kind)
            for kind in self._backend.fleet()
            if kind.name == own_kind(kind.name)
            or any(DeviceId(kind.name, index) not in lost for index in range(kind.count or 0))
        )

    def _with_cuts(self, kind: Kind) -> Kind:
        cuts = self._settings.cuts
        return kind if cuts is None else msgspec.structs.replace(kind, cuts=cuts)

    @asynccontextmanager
    async def switched(
        self, settings: Settings, current: Deployment, kept: KeptModels = NOTHING_KEPT
    ) -> AsyncIterator[Switched]:
        """Build the deployment of other settings, which apply once the block is over, unless it fails: models that are
        loaded meanwhile must not get settings that are rejected. The backend stays the same.

        current: that is in force; a model that it serves, and whose files in the same repository cannot be served any
        more, such as a version that is half copied, stays as it is served. kept: see `build`.
        """
        other = copy.copy(self)
        other._settings, other._given = settings, _given_profiles(settings)
        deployment = await other.build(settings.load_models, kept=kept)
        places = {(each.model_repository, each.remote_repository) for each in (self._settings, settings)}
        served = loaded_models(current) if len(places) == 1 else set()
        failed: dict[str, str] = {}
        while broken := {
            name: why
            for name, why in deployment.broken.items()
            if name in served and name not in failed and why != NOT_LOADED
        }:
            models = {name: why for name, why in broken.items() if current.offered[name].ensemble is None}
            failed |= models or broken  # an ensemble may be broken for its models' sake alone
            deployment = await other.build(settings.load_models, kept=other._as_served(current, failed, kept))
        yield Switched(deployment, {name: why for name, why in failed.items() if name in deployment.offered})
        self._settings, self._given = other._settings, other._given
        self._allowed, self._mirrored = other._allowed, other._mirrored

    def _as_served(self, current: Deployment, names: Collection[str], kept: KeptModels) -> KeptModels:
        """Return what is kept, and these models with the files that they are served from and the settings of now."""
        served = kept_models(current, names)
        models = dict(served.models)
        for name, each in served.models.items():
            if each.ensemble is None:
                profiles = [profile for profile in served.profiles.values() if profile.model == name]
                model = self._model(each.entry, each.info, profiles)
                models[name] = msgspec.structs.replace(each, model=model)
        # A slowdown that all of these have is none of the others'.
        slowdowns = dict.fromkeys(loaded_models(current), 1.0) | kept.slowdowns
        return KeptModels(models, served.profiles, kept.rates, slowdowns)

    async def build(
        self,
        names: Collection[str] | None = None,
        samples: Sequence[Sample] = (),
        configs: Mapping[str, Config] = MappingProxyType({}),
        kept: KeptModels = NOTHING_KEPT,
    ) -> Deployment:
        """Return a deployment with its plan. Arguments and errors are those of `describe`.

        Batches are as slow as those of models that are kept, unless that leaves a model unserved which would be served
        otherwise.
        """
        described = await self.describe(names, samples, configs, kept)
        slowdowns = {name: slowdown for name, slowdown in kept.slowdowns.items() if name in described.offered}
        if kept.slowdown_of_all > 1.0:
            slowdowns = dict.fromkeys(described.offered, kept.slowdown_of_all) | slowdowns
        planned = await self.planned(described, slowdowns)
        return await self.planned(described) if slowdowns and planned.plan.unserved else planned

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._settings

    def measured_profiles(self, deployment: Deployment) -> Profiles:
        """Return those profiles of a deployment that were measured, not given by the settings."""
        return {key: profile for key, profile in deployment.problem.profiles.items() if key not in self._given}

    async def keep_profile(self, entry: Entry, profile: Profile) -> list[tuple[Entry, Profile]]:
        """Keep a profile that has more points now, as `ProfileSource.keep` does."""
        return await self._profiles.keep(entry, profile)

    async def planned(self, deployment: Deployment, slowdowns: Mapping[str, float] | None = None) -> Deployment:
        """Return a deployment with a plan for its problem. slowdowns: of batches, by model, that the plan counts
        with."""
        problem = deployment.problem
        counted = self.corrections.factors(problem)
        for model, slowdown in (slowdowns or {}).items():
            counted[model] = max(slowdown, counted.get(model, 1.0))
        self.say("planning")
        # In a thread: a server goes on meanwhile.
        slowed = msgspec.structs.replace(problem, profiles=slowed_profiles(problem.profiles, counted))
        left = self._left(problem)
        if left:
            slowed = with_devices(slowed, Counter(device.kind for device in left))
        # Somebody waits for it: by the time that passes, however busy the machine is.
        plan = await asyncio.to_thread(plan_problem, slowed, self._settings.planner, clock=time.monotonic)
        if left:
            plan = renumber_devices(plan, plan, left)
        return msgspec.structs.replace(deployment, plan=plan, slowdowns=counted)

    def _left(self, problem: Problem) -> list[DeviceId]:
        """Return the devices of a problem that are left where some are lost; none where none is, or all are: that the
        workers do not start says why."""
        devices, lost = known_devices(problem), self._backend.lost()
        left = [device for device in devices if device not in lost]
        return left if len(left) < len(devices) else []

    async def describe(
        self,
        names: Collection[str] | None = None,
        samples: Sequence[Sample] = (),
        configs: Mapping[str, Config] = MappingProxyType({}),
        kept: KeptModels = NOTHING_KEPT,
    ) -> Deployment:
        """Return a deployment, with an empty plan, of the models with these names; None: of all in the repository. A
        model that cannot be served, or is not to be, is `broken`.

        samples: of interference, as observed while serving; predictors learn from them. configs: in place of the
        repository's, by model. kept: models that are not looked at again, and keep their rates; ensembles
        are, as their models may have changed.

        Raises NotFoundError for a name that the repository does not have, ConfigError for settings of a model that it
        does not have, and where none of the models that are asked for can be served.
        """
        self.say("reading the models")
        entries, broken = await asyncio.to_thread(self._scan, configs)
        entries |= {name: servable.entry for name, servable in kept.models.items()}
        broken = {name: reason for name, reason in broken.items() if name not in kept.models}
        self._check_names(names, entries.keys() | broken.keys())
        wanted = _with_steps(entries, names)
        self._found(FoundModels(tuple(wanted), dict(broken)))
        models = {name: servable for name, servable in kept.models.items() if servable.ensemble is None}
        new = {name: entry for name, entry in wanted.items() if name not in models}
        fleet = self._profiles.kinds = self.available()
        described, measured = await self._describe_models(new, broken)
        served = {name: each for name in wanted if (each := models.get(name) or described.get(name)) is not None}
        profiles = {**kept.profiles, **measured}
        self._add_ensembles(wanted, served, broken)
        if not served and (names is None or names):
            reasons = "".join(f"; {name}: {reason}" for name, reason in itertools.islice(broken.items(), MAX_REASONS))
            if len(broken) > MAX_REASONS:
                reasons += f"; and {len(broken) - MAX_REASONS} more"
            raise ConfigError(
                f"no model in {str(self._settings.model_repository)!r} can be served; build some with"
                f" `cotenant examples`{reasons}"
            )
        seconds = await asyncio.to_thread(request_seconds)
        profiled = {kind for _, kind in profiles}
        # Where nodes are cut off before they are profiled, the others serve.
        fleet = tuple(kind for kind in fleet if kind.name in profiled or kind.name == own_kind(kind.name))
        planned_for = limited(fleet, self._settings.devices)
        problem = build_problem(self._settings, planned_for, served, profiles, samples, seconds)
        known = {name: rate for name, rate in kept.rates.items() if name in problem.rates}
        problem = msgspec.structs.replace(problem, rates=problem.rates | known, assumed=problem.assumed - known.keys())
        others = {name: NOT_LOADED for name in entries if name not in served and name not in broken}
        return Deployment(
            offered=served,
            problem=problem,
            plan=Plan(planner=self._settings.planner),
            broken=broken | others,
            configs=dict(configs),
            available=fleet,
        )

    def _scan(self, configs: Mapping[str, Config]) -> tuple[Entries, Broken]:
        entries = scan_repository(self.repository(), configs)
        # Of several versions the last that can be is served.
        usable = {entry.name: entry for entry in entries if not entry.reason}
        self._allowed = {name: [entry.version for entry in entries if entry.name == name] for name in usable}
        return usable, {entry.name: entry.reason for entry in entries if entry.name not in usable}

    def repository(self) -> Path:
        """Return the folder of the models, as it is in its object store if it has one. Raises ConfigError."""
        settings = self._settings
        if settings.remote_repository is not None:
            remote = RemoteRepository(settings.remote_repository, settings.model_repository, settings.remote_options)
            with self._mirroring:
                remote.synchronise(first=not self._mirrored)
            self._mirrored = True
        return settings.model_repository

    def _check_names(self, names: Collection[str] | None, known: Collection[str]) -> None:
        """Raise ConfigError or NotFoundError for names that are not `known`. A model with settings that has left the
        repository keeps no other from being loaded."""
        repository = self._settings.model_repository
        for model in self._settings.models:
            if model.name not in known and (names is None or model.name in names):
                raise ConfigError(
                    f"model {model.name!r} has settings, but is not in {repository}; it holds "
                    f"{', '.join(sorted(known)) or 'none'}"
                )
        for name in names or ():
            if name not in known:
                raise NotFoundError(f"no model {name!r} in {str(repository)!r}; a model is one of its folders")

    async def _describe_models(self, wanted: Entries, broken: Broken) -> tuple[dict[str, ServableModel], Profiles]:
        """Return those models that can be served, with their profiles; note the others in `broken`.

        All are described before any is measured: what is wrong with one is known at once.
        """
        infos = await _describe({name: each for name, each in wanted.items() if each.platform != ENSEMBLE}, broken)
        described: dict[str, tuple[ModelInfo, KnownProfiles]] = {}
        for name, info in infos.items():
            with _noted(name, broken):
                described[name] = info, await self._profiles.look_up(wanted[name], self._given)
                self._say_what_is_ignored(wanted[name])
        self._found(FoundModels(tuple(wanted), dict(broken)))
        served: dict[str, ServableModel] = {}
        profiles: dict[tuple[str, str], Profile] = {}
        unmeasured = [name for name, (_, known) in described.items() if known.missing]
        for name, (info, known) in described.items():
            entry = wanted[name]
            with _noted(name, broken):
                number = unmeasured.index(name) + 1 if name in unmeasured else 0
                measured = await self._profiles.measured(entry, info, known, number, len(unmeasured))
                model = self._model(entry, info, measured)
                served[name] = ServableModel(entry=entry, info=info, model=model, policy=request_policy(entry.config))
                profiles |= {(name, profile.kind): profile for profile in measured}
        if busy := describe_busy(profile for (name, _), profile in profiles.items() if name in unmeasured):
            logger.warning("%s", busy)
        if unmeasured and not self._profiles.full:
            logger.info(
                "%s profiled at a few points each; a server that adapts measures more once the machine is quiet, "
                "`cotenant profile` at once, for the next start or `cotenant reload`",
                show_count(len(unmeasured), "model"),
            )
        return served, profiles

    def _say_what_is_ignored(self, entry: Entry) -> None:
        """Log, once for each configuration, which of its fields and versions change nothing here."""
        uses = uses_of(entry.config.fields)
        ignored = [f"{field}: {use.why}" for field, use in uses.items() if use.use is Use.IGNORED]
        if others := [version for version in self._allowed.get(entry.name, ()) if version != entry.version]:
            ignored.append(
                f"version_policy: one version is served at a time, {entry.version}; {', '.join(others)} could be too"
            )
        said = "; ".join(ignored)
        if said and self._told.get(entry.name) != said:
            logger.warning("%s: ignored in its configuration: %s", entry.name, said)
        self._told[entry.name] = said

    def _add_ensembles(self, wanted: Mapping[str, Entry], served: dict[str, ServableModel], broken: Broken) -> None:
        """Add the ensembles whose models are served; note the others in `broken`."""
        infos = {name: servable.info for name, servable in served.items()}
        ensembles = {name: entry for name, entry in wanted.items() if entry.platform == ENSEMBLE}
        for name, entry in ensembles.items():
            try:
                ensemble = describe_ensemble(entry, infos, broken | dict.fromkeys(ensembles, NESTED))
            except ModelError as error:
                broken[name] = str(error)
            else:
                model = ensemble_model(self._model_settings(name), ensemble, served)
                served[name] = ServableModel(entry=entry, info=ensemble.info, model=model, ensemble=ensemble)

    def _model(self, entry: Entry, info: ModelInfo, profiles: Sequence[Profile]) -> Model:
        delay = self._settings.max_queue_delay or 0.0
        return model_of(self._model_settings(entry.name), entry, info, profiles, delay)

    def _model_settings(self, name: str) -> ModelSettings:
        return next((model for model in self._settings.models if model.name == name), ModelSettings(name=name))


async def _describe(entries: Entries, broken: Broken) -> dict[str, ModelInfo]:
    """Describe models, as many at once as there are processors, since each is in memory meanwhile; note in `broken`
    those that cannot be."""
    few = asyncio.Semaphore(len(available_cores()))

    async def one(entry: Entry) -> ModelInfo | ModelError:
        async with few:
            try:
                return await asyncio.to_thread(describe, entry)
            except ModelError as error:
                return error

    infos: dict[str, ModelInfo] = {}
    for name, found in zip(entries, await asyncio.gather(*map(one, entries.values())), strict=True):
        if isinstance(found, ModelError):
            broken[name] = str(found)
        else:
            infos[name] = found
    return infos


@contextmanager
def _noted(name: str, broken: Broken) -> Iterator[None]:
    """Note in `broken` why a model cannot be served, where the block finds out."""
    try:
        yield
    except ModelError as error:
        broken[name] = str(error)


def check_serves_something(deployment: Deployment) -> None:
    """Raise ConfigError for a plan that serves nothing."""
    if deployment.offered and not any(deployment.plan.placements()):
        wanted = ", ".join(
            f"{name} within {show_seconds(servable.model.slo)}" for name, servable in deployment.offered.items()
        )
        raise ConfigError(f"no model can be served within its target ({wanted}); raise their `slo`")


def _given_profiles(settings: Settings) -> Profiles:
    return {} if settings.profiles is None else read_profiles_file(settings.profiles)


def _with_steps(entries: Entries, names: Collection[str] | None) -> Entries:
    """Return the entries of these names (None: all), and of the models that the ensembles among them need."""
    wanted = {name: entry for name, entry in entries.items() if names is None or name in names}
    steps = {step for entry in wanted.values() for step in _step_models(entry)}
    return wanted | {name: entries[name] for name in sorted(steps - wanted.keys()) if name in entries}


def _step_models(entry: Entry) -> list[str]:
    scheduling = entry.config.ensemble_scheduling
    return [] if scheduling is None else [step.model_name for step in scheduling.step]
