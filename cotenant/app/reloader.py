"""Reload a server's configuration while it runs, on SIGHUP, over HTTP or from Python."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from cotenant.app.deployment_builder import NOTHING_KEPT, DeploymentBuilder, check_serves_something
from cotenant.app.settings import check_reloadable
from cotenant.config import Settings
from cotenant.errors import ConfigError, CotenantError, InvalidError
from cotenant.live.deployment import (
    NOT_LOADED,
    Deployment,
    KeptModels,
    kept_models,
    loaded_models,
    with_models_of,
)
from cotenant.live.server import Server
from cotenant.worker.repository import scan_repository

logger = logging.getLogger(__name__)

REJECTED = "reload rejected; keeping the current configuration"


class Reloader:
    """Plan for changed settings and roll out that plan, one reload at a time.

    settings: those that the server was started with. read: returns the current settings. on_reload: called with the
    settings that a reload has put in force.
    """

    def __init__(
        self,
        server: Server,
        builder: DeploymentBuilder,
        settings: Settings,
        read: Callable[[], Settings] | None = None,
        on_reload: Callable[[Settings], None] | None = None,
    ) -> None:
        self._server = server
        self._builder = builder
        self._settings = settings
        self._read = read or (lambda: settings)
        self._on_reload = on_reload
        self._lock = asyncio.Lock()

    async def reload(self, settings: Settings | None = None) -> None:
        """Apply other settings; None: read them again.

        Raises CotenantError, with nothing changed: ConfigError for settings that need a restart.
        """
        async with self._lock:
            try:
                if settings is None:
                    settings = self._read()
                check_reloadable(self._settings, settings)
                known = self._learnt(settings)
                async with self._builder.switched(settings, self._server.deployment, known) as (deployment, failures):
                    check_serves_something(deployment)
                    await self._server.apply(deployment)
            except CotenantError as error:
                self._server.reloaded(f"{REJECTED}: {error}")
                logger.error("%s: %s", REJECTED, error)
                raise
            except Exception as error:  # such as a planner's fault, which is no reason for the server to end
                reason = f"{type(error).__name__}: {error}"
                self._server.reloaded(f"{REJECTED}: {reason}")
                logger.exception("%s", REJECTED)
                raise ConfigError(reason) from error
            self._server.reloaded(failures=failures)
            for name, why in failures.items():
                logger.error("model %s could not be loaded again, and stays as it is: %s", name, why)
            logger.info("configuration reloaded")
            if self._on_reload is not None:
                try:
                    self._on_reload(settings)
                except Exception:  # the settings are in force whatever those who are told make of it
                    logger.exception("configuration reloaded, but not everything that follows it was told")

    async def replan(self, reason: str) -> None:
        """Plan for the models and settings in force with the devices that there are now, and roll out that plan. Raises
        CotenantError, with nothing changed."""
        async with self._lock:
            await self._server.change(self._replanned, reason)

    async def _replanned(self, current: Deployment) -> Deployment:
        """Return a deployment of the models that are served now, whatever has changed in the repository since they were
        loaded, and of those that could not be served."""
        builder, settings = self._builder, self._builder.settings
        failed = {name for name, reason in current.broken.items() if reason != NOT_LOADED}
        failed &= failed if settings.load_models is None else set(settings.load_models)
        entries = await asyncio.to_thread(lambda: scan_repository(builder.repository(), current.configs))
        loaded, usable = loaded_models(current), {entry.name: entry for entry in entries if not entry.reason}
        # Not what has other files, or none: these are for a load or the next start, and may be half of a copy.
        stay = {name for name in loaded if current.offered[name].entry != usable.get(name)}
        kept, learnt = kept_models(current, stay), self._learnt(settings)
        learnt = KeptModels(kept.models, kept.profiles, learnt.rates, learnt.slowdowns)
        if stay:  # a slowdown that all of these have is none of the others'
            learnt = msgspec.structs.replace(learnt, slowdowns=dict.fromkeys(loaded, 1.0) | learnt.slowdowns)
        names = loaded | (failed & {entry.name for entry in entries})
        deployment = await builder.build(names, configs=current.configs, kept=learnt)
        check_serves_something(deployment)
        return with_models_of(current, deployment)

    def _learnt(self, settings: Settings) -> KeptModels:
        """Return what the server has learnt of its load and still counts: the rates of models whose settings keep
        theirs, and how much longer batches take. Without it a plan would be made for rates that are not offered any
        more, and another rollout would follow."""
        learnt = self._server.learnt()
        if learnt is None:
            return NOTHING_KEPT
        before, now = ({each.name: each.rate for each in it.models} for it in (self._builder.settings, settings))
        assumed = self._server.deployment.problem.assumed
        rates = {
            name: rate
            for name, rate in learnt.rates.items()
            if before.get(name) == now.get(name) and name not in assumed
        }
        return KeptModels(rates=rates, slowdowns=learnt.slowdowns)

    async def reload_for_caller(self) -> None:
        """Reload as the HTTP front end asks for it. Raises InvalidError with the reason where that is rejected."""
        try:
            await self.reload()
        except CotenantError as error:
            raise InvalidError(f"{REJECTED}: {error}") from None
