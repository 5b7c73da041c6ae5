"""Run a server whose models are the cluster's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from cotenant.app.lifecycle import running
from cotenant.app.profile_source import Progress, ignore_progress
from cotenant.app.running_server import RunningServer
from cotenant.backends import Backend
from cotenant.config import Settings
from cotenant.k8s.background import beside
from cotenant.k8s.client import connected
from cotenant.k8s.controller import Controller, check_base


@asynccontextmanager
async def on_kubernetes(
    settings: Settings,
    backend: Backend,
    *,
    progress: Progress = ignore_progress,
    read: Callable[[], Settings] | None = None,
    on_reload: Callable[[Settings], None] | None = None,
    kubeconfig: Path | None = None,
) -> AsyncIterator[RunningServer]:
    """Run a server within the block, as `running` does, once this front end leads; until then it stands by, with its
    ports open. kubeconfig: None: the pod's service account, or that of the environment.

    Raises CotenantError, also within the block: KubernetesError where another front end has taken the lease.
    """
    check_base(settings)
    options = settings.kubernetes
    async with connected(options.namespace, kubeconfig) as client:
        controller = Controller(client, settings)

        def read_again() -> Settings:
            return controller.settings(settings if read is None else read())

        def reloaded(current: Settings) -> None:
            controller.on_reload(current)
            if on_reload is not None:
                on_reload(current)

        async with (
            controller.following(),
            running(
                msgspec.structs.replace(settings, load_models=()),
                backend,
                controller.prepare,
                progress=progress,
                read=read_again,
                on_reload=reloaded,
                discovery=controller.discover,
            ) as server,
            beside(controller.run(server)),
        ):
            yield server
