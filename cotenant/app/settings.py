"""Read the settings of a server from a file, a model repository, or the defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from cotenant.config import Settings, read_settings
from cotenant.config.settings import mirror_of
from cotenant.control.controller_options import ControllerOptions
from cotenant.errors import ConfigError

Source = Settings | Path | str | None

# What can change while a server runs; anything else needs a restart.
RELOADABLE = frozenset(
    {
        "devices",
        "interference",
        "load_models",
        "log_level",
        "max_queue_delay",
        "model_repository",
        "models",
        "objective",
        "planner",
        "profiles",
    }
)


def settings_from(source: Source) -> Settings:
    """Return the settings that `source` stands for: those of a TOML file; for a folder or the URL of an object store,
    the default settings with that model repository and with free ports; for None, the default settings. Raises
    ConfigError."""
    if isinstance(source, Settings):
        return source
    if isinstance(source, str) and "://" in source:
        place = {"remote_repository": source, "model_repository": mirror_of(source)}
    elif source is not None and Path(source).is_dir():
        place = {"model_repository": Path(source)}
    else:
        return read_settings(source)
    return msgspec.structs.replace(read_settings(), **place, http_port=0, grpc_port=0, metrics_port=0)


def controller_options(settings: Settings) -> ControllerOptions:
    """Return how quickly the controller of a server with these settings follows."""
    return ControllerOptions(headroom=settings.headroom, forecast=settings.forecast)


def check_reloadable(current: Settings, wanted: Settings) -> None:
    """Raise ConfigError where other settings need a restart of the server."""
    changed = [name for name in Settings.__struct_fields__ if getattr(current, name) != getattr(wanted, name)]
    if fixed := [name for name in changed if name not in RELOADABLE]:
        raise ConfigError(f"cannot change while the server runs: {', '.join(fixed)}; restart the server")


def reading_again(source: Source, read: Callable[[], Settings]) -> Callable[[], Settings]:
    """Return `read` for a reload: it raises ConfigError for a file that has become a folder since this call, which
    would be taken for a model repository. source: what is read."""
    file = None if source is None or isinstance(source, Settings) or Path(source).is_dir() else Path(source)

    def read_again() -> Settings:
        if file is not None and file.is_dir():
            raise ConfigError(f"{file}: is a folder now; put the settings file back")
        return read()

    return read_again
