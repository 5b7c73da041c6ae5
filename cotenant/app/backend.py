"""Create what runs a server's partitions, as its settings say."""

from __future__ import annotations

from cotenant.backends import Backend, nvidia
from cotenant.backends.cpu import Cpu
from cotenant.backends.fake import Fake
from cotenant.backends.mig import Mig
from cotenant.backends.none import NoDevices
from cotenant.config import Settings
from cotenant.errors import DeviceError
from cotenant.live.confinement import Confinement


def create_backend(settings: Settings) -> Backend:
    """Return the backend that settings name. Raises DeviceError for a GPU that is missing or cannot be partitioned that
    way."""
    if settings.backend == "cpu":
        return Cpu(enforcement=settings.enforcement, reserve=settings.reserve, lend=settings.lend)
    if settings.backend == "fake":
        return Fake()
    if settings.backend == "none":
        return NoDevices()
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


def worker_confinement(settings: Settings, *, background: bool = False) -> Confinement:
    """Return how worker processes are confined, those included that are profiled. background: see `Confinement`."""
    return Confinement(memory=settings.worker_memory, environment=settings.worker_environment, background=background)
