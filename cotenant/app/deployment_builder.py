"""From a repository and settings to what a server serves: describe the models, profile what was not, plan."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import msgspec
import numpy as np

from cotenant import __version__
from cotenant.backends import Backend, nvidia
from cotenant.backends.cpu import Cpu
from cotenant.backends.fake import Fake
from cotenant.backends.mig import Mig
from cotenant.config import ModelSettings, Settings, read_profiles_file
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Profile, Profiles
from cotenant.core.tensor import ModelInfo
from cotenant.core.units import show_seconds
from cotenant.errors import ConfigError, DeviceError, ModelError, NotFoundError
from cotenant.live.deployment import Deployment, ServableModel
from cotenant.planners import Problem
from cotenant.planning import plan as plan_problem
from cotenant.predictors.fitting import with_observations
from cotenant.predictors.samples import Sample
from cotenant.profiling import cache
from cotenant.profiling.grid import Grid, grid_of, profile_model
from cotenant.worker.ensemble import NESTED, Ensemble, describe_ensemble
from cotenant.worker.repository import ENSEMBLE, Entry, describe, sample_inputs, scan_repository, worker_model

# A model without a target gets twice the latency of 8 rows (or the most that were worth measuring) on half a device.
# The papers' rule takes 32 rows on a whole one, which is long where the device is a processor. Below the least target,
# what a busy machine adds would be most of it.
DEFAULT_ROWS = 8
DEFAULT_SHARE = 500
LEAST_SLO = 0.05


class Progress(Protocol):
    """Told of each point that was profiled."""

    def __call__(self, model: str, done: int, total: int) -> None: ...


def ignore_progress(model: str, done: int, total: int) -> None:
    """Show nothing."""


def check_serves_something(deployment: Deployment) -> None:
    """Raise ConfigError for a plan that serves nothing."""
    if not any(deployment.plan.placements()):
        wanted = ", ".join(
            f"{name} within {show_seconds(offered.model.slo)}" for name, offered in deployment.offered.items()
        )
        raise ConfigError(f"no model can be served within its target ({wanted}); give them more time with `slo`")


def backend_of(settings: Settings) -> Backend:
    """Raises DeviceError where a GPU is asked for that is not there, or cannot be cut in that way."""
    if settings.backend == "cpu":
        return Cpu(enforcement=settings.enforcement, reserve=settings.reserve)
    if settings.backend == "fake":
        return Fake()
    gpus = nvidia.select_gpus(nvidia.list_gpus(), settings.gpus)
    if not gpus:
        raise DeviceError(
            f'backend = "{settings.backend}": the driver shows no GPU; in a container, start that with `--gpus all`'
        )
    if settings.backend == "mig":
        return Mig(gpus, create=settings.create)
    if not settings.gpus:  # else each has to do
        gpus = nvidia.select_shareable(gpus, settings.backend)
    if settings.backend == "mps":
        from cotenant.backends.mps import Mps

        mps = settings.mps
        return Mps(
            gpus,
            directory=mps.directory,
            memory_limits=mps.memory_limits,
            static=mps.static,
            protocol=mps.protocol,
        )
    from cotenant.backends.green import Green

    return Green(gpus)


class DeploymentBuilder:
    """Knows the repository and the profiles measured so far; makes sites for any of its models."""

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        progress: Progress = ignore_progress,
        *,
        again: bool = False,
    ) -> None:
        """again: measure what was measured in an earlier run, too."""
        self._settings = settings
        self._backend = backend
        self._progress = progress
        self._again = again
        self._kinds = {kind.name: kind for kind in backend.fleet()}
        if (cuts := settings.cuts) is not None:
            self._kinds = {name: msgspec.structs.replace(kind, cuts=cuts) for name, kind in self._kinds.items()}
        self._measured: dict[str, Profile] = {}
        self._given = _given(settings)

    @asynccontextmanager
    async def instead(self, settings: Settings) -> AsyncIterator[Deployment]:
        """The site by other settings, which count from now on unless the block fails. The backend is as it was."""
        before = self._settings, self._given
        self._settings, self._given = settings, _given(settings)
        try:
            yield await self.site()
        except BaseException:
            self._settings, self._given = before
            raise

    async def site(
        self, names: Collection[str] | None = None, seen: Sequence[Sample] = (), *, planned: bool = True
    ) -> Deployment:
        """Of the models with these names, by default all of the repository. A model that cannot be served is `broken`.

        seen: what neighbours were seen to cost, which predictors learn from that do. planned: else its plan is empty,
        and no time goes into one.

        Raises NotFoundError for a name that is not there, ConfigError for what settings say of models that are not
        there, and where no model is left.
        """
        offered, broken = await asyncio.to_thread(self._look)
        unknown = [model.name for model in self._settings.models if model.name not in offered | broken]
        if unknown:
            raise ConfigError(
                f"model {unknown[0]!r} has settings, but is not in {self._settings.model_repository}; it holds "
                f"{', '.join(sorted(offered | broken)) or 'none'}"
            )
        for name in names or ():
            if name not in offered | broken:
                raise NotFoundError(
                    f"no model {name!r} in {str(self._settings.model_repository)!r}; a model is one of its folders"
                )
        wanted = {name: entry for name, entry in offered.items() if names is None or name in names}
        steps = {name for entry in wanted.values() for name in _steps(entry)}
        wanted |= {name: offered[name] for name in sorted(steps - wanted.keys()) if name in offered}
        settings = {model.name: model for model in self._settings.models}
        served: dict[str, ServableModel] = {}
        profiles: dict[tuple[str, str], Profile] = {}
        ensembles = {name: entry for name, entry in wanted.items() if entry.platform == ENSEMBLE}
        for name, entry in wanted.items():
            if name in ensembles:
                continue
            try:
                info = await asyncio.to_thread(describe, entry)
                measured = [await self.profile(entry, info, kind) for kind in self._kinds.values()]
                given = settings.get(name, ModelSettings(name=name))
                model = _model(given, entry, info, measured, self._settings.max_queue_delay or 0.0)
            except ModelError as error:
                broken[name] = str(error)
            else:
                served[name] = ServableModel(entry=entry, info=info, model=model)
                profiles |= {(name, profile.kind): profile for profile in measured}
        infos = {name: offer.info for name, offer in served.items()}
        for name, entry in ensembles.items():
            try:
                ensemble = describe_ensemble(entry, infos, broken | dict.fromkeys(ensembles, NESTED))
            except ModelError as error:
                broken[name] = str(error)
            else:
                model = _ensemble(settings.get(name, ModelSettings(name=name)), ensemble, served)
                served[name] = ServableModel(entry=entry, info=ensemble.info, model=model, ensemble=ensemble)
        if not served:
            reasons = "".join(f"; {name}: {reason}" for name, reason in broken.items())
            raise ConfigError(
                f"no model in {str(self._settings.model_repository)!r} can be served; build some with"
                f" `cotenant examples`{reasons}"
            )
        problem = self._problem(served, profiles, seen)
        plan = Plan(planner=self._settings.planner)
        if planned:  # in a thread: a server goes on meanwhile
            plan = await asyncio.to_thread(plan_problem, problem, self._settings.planner)
        return Deployment(offered=served, problem=problem, plan=plan, broken=broken)

    def _look(self) -> tuple[dict[str, Entry], dict[str, str]]:
        entries = scan_repository(self._settings.model_repository)
        # Of several versions the last that can be is served.
        offered = {entry.name: entry for entry in entries if not entry.reason}
        return offered, {entry.name: entry.reason for entry in entries if entry.name not in offered}

    async def profile(self, entry: Entry, info: ModelInfo, kind: Kind) -> Profile:
        """As given in a file, as measured before on this machine, or measured now on its first device of that kind."""
        given = self._given.get((entry.name, kind.name))
        if given is not None:
            return given
        if self._backend.name == "fake":
            raise ModelError(f"model {entry.name!r} has no profile; give one with `profiles` in the settings")
        grid = grid_of(kind)
        key = await asyncio.to_thread(
            cache.cache_key,
            entry.path,
            str(msgspec.json.encode(entry.config.fields)),
            cache.machine_fingerprint() if kind.name == "cpu" else kind.name,
            self._backend.isolation(),
            self._backend.capacity_fingerprint(),
            f"cotenant {__version__}, {_runtime(entry)}",
            str(grid),
        )
        known = self._measured.get(key) or (None if self._again else cache.load_profile(key))
        if known is None:
            known = await self._measure(entry, info, kind, grid)
            cache.store_profile(key, known)
        self._measured[key] = known
        return Profile(entry.name, kind.name, known.points)  # the same file may stand under another name

    async def _measure(self, entry: Entry, info: ModelInfo, kind: Kind, grid: Grid) -> Profile:
        name = entry.name if len(self._kinds) == 1 else f"{entry.name} on {kind.name}"
        done = 0

        def measured(points: int) -> None:
            nonlocal done
            done += points
            self._progress(name, done, grid.points)

        rng = np.random.default_rng(0)
        return await profile_model(
            self._backend,
            worker_model(entry, info),
            lambda rows: sample_inputs(entry, info, rows, rng),
            kind=kind.name,
            grid=grid,
            measured=measured,
        )

    def _problem(self, served: Mapping[str, ServableModel], profiles: Profiles, seen: Sequence[Sample]) -> Problem:
        given = {model.name: model for model in self._settings.models}
        wholes = [
            offer.ensemble.application(offer.model.slo, offer.model.attainment)
            for offer in served.values()
            if offer.ensemble is not None
        ]
        stages = {name for whole in wholes for name in whole.models()}
        rates = {name: given[name].rate if name in given else None for name in served}
        # What only ensembles need is asked for by them; its target is theirs.
        rates |= {name: 0.0 for name in stages if rates[name] is None}
        models = []
        for name, offer in served.items():
            model = offer.model
            if name in stages and (name not in given or given[name].slo is None):
                loosest = max(whole.slo for whole in wholes if name in whole.models())
                model = msgspec.structs.replace(model, slo=max(model.slo, loosest))
            if offer.ensemble is None:
                models.append(model)
        known = {name: rate for name, rate in rates.items() if rate is not None}
        return Problem(
            models=tuple(models),
            # A model without a rate is to be served as often as any other of them.
            rates={name: known.get(name, 1.0) for name in rates},
            fleet=tuple(self._kinds.values()),
            profiles=profiles,
            objective=self._settings.objective or ("devices" if len(known) == len(rates) else "rate"),
            interference=with_observations(self._settings.interference.predictor(profiles), seen),
            applications=tuple(wholes),
        )


def _given(settings: Settings) -> Profiles:
    return {} if settings.profiles is None else read_profiles_file(settings.profiles)


def _runtime(entry: Entry) -> str:
    """The library that runs it, with its version. Raises ModelError where it is not installed."""
    if not entry.platform.startswith("pytorch"):
        import onnxruntime  # as it is called in all of its distributions; `describe` has opened the model with it

        return f"onnxruntime {onnxruntime.__version__}"
    try:
        return f"torch {version('torch')}"  # which takes seconds to import
    except PackageNotFoundError:
        raise ModelError(f"{entry.path}: PyTorch is not installed; run `pip install 'cotenant[torch]'`") from None


def _model(
    settings: ModelSettings, entry: Entry, info: ModelInfo, measured: Sequence[Profile], max_queue_delay: float
) -> Model:
    """max_queue_delay: seconds, where neither the model's settings nor its config.pbtxt give one."""
    limit = info.max_batch_size or 1
    batching = entry.config.dynamic_batching
    if batching and batching.max_queue_delay_microseconds:
        max_queue_delay = batching.max_queue_delay_microseconds / 1e6
    slo = settings.slo
    if slo is None:
        usual = [latency for profile in measured if (latency := _usual(profile)) is not None]
        if not usual:
            raise ModelError(f"model {entry.name!r} takes too long for half a device; give it a target with `slo`")
        slo = max(LEAST_SLO, 2 * max(usual))
    return Model(
        name=entry.name,
        slo=slo,
        attainment=settings.attainment,
        max_batch=min(limit, settings.max_batch or limit),
        max_queue_delay=max_queue_delay if settings.max_queue_delay is None else settings.max_queue_delay,
    )


def _usual(profile: Profile) -> float | None:
    """Seconds that the usual batch takes on half a device, or on the largest part that it can be cut into."""
    share = min(DEFAULT_SHARE, max((point.share for point in profile.points), default=DEFAULT_SHARE))
    known = [latency for latency in profile.curve(share)[:DEFAULT_ROWS] if latency < math.inf]
    return known[-1] if known else None


def _ensemble(settings: ModelSettings, ensemble: Ensemble, served: Mapping[str, ServableModel]) -> Model:
    """An ensemble's promise; without a target of its own, its steps together get what each of their models has.
    Raises ConfigError for settings that only models have."""
    for key in ("max_batch", "max_queue_delay"):
        if getattr(settings, key) is not None:
            raise ConfigError(
                f"model {settings.name!r} is an ensemble and has no {key}; give it to the models of its steps"
            )
    seconds = {step.name: served[step.model].model.slo for step in ensemble.steps}
    slo = ensemble.application(1.0).length(seconds) if settings.slo is None else settings.slo
    return Model(name=ensemble.info.name, slo=slo, attainment=settings.attainment)


def _steps(entry: Entry) -> list[str]:
    scheduling = entry.config.ensemble_scheduling
    return [] if scheduling is None else [step.model_name for step in scheduling.step]
