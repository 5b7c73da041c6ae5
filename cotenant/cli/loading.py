"""Read problems, settings and plans as the command line names them; write results to files."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec

from cotenant.cli.output import print_written, profile_progress
from cotenant.core.plan import Plan
from cotenant.errors import ConfigError


def load_settings(
    settings: Path | None, model_repository: Path | None = None, planner: str | None = None, **overrides: Any
) -> Any:
    """Read settings from a file, or the defaults; options given on the command line override them.

    settings: may be a model repository (a folder) instead. overrides: by name of the setting; None changes nothing.
    """
    from cotenant.config import read_settings
    from cotenant.planners import load_planner

    if settings is not None and settings.is_dir():
        _check_one_repository(settings, model_repository)
        settings, model_repository = None, settings
    if planner is not None:
        load_planner(planner)  # an unknown name is an error here, not after minutes of profiling
    overrides |= {"planner": planner, "model_repository": model_repository}
    given = {name: value for name, value in overrides.items() if value is not None}
    return msgspec.structs.replace(read_settings(settings), **given)


def load_unplanned(settings: Any, *, force: bool = False, full: bool = False) -> Any:
    """Return the deployment that settings ask for, with an empty plan, showing progress of profiling.

    full: profile every point of the grid."""
    from cotenant.app.backend import create_backend
    from cotenant.app.deployment_builder import DeploymentBuilder

    backend = create_backend(settings)
    try:
        with profile_progress() as progress:
            return asyncio.run(DeploymentBuilder(settings, backend, progress, force=force, full=full).describe())
    finally:
        backend.stop()


def load_problem(problem: Path | None, settings: Path | None, model_repository: Path | None) -> Any:
    """Read a problem file, or derive the problem of what a server would serve."""
    from cotenant.config import read_problem

    if problem is None or problem.is_dir():
        return load_unplanned(_served_settings(problem, settings, model_repository)).problem
    _check_no_server_options(settings, model_repository)
    return read_problem(problem)


def load_planned(
    problem: Path | None,
    settings: Path | None,
    model_repository: Path | None,
    planner: str | None,
    current: Plan | None = None,
    time_limit: float | None = None,
    *,
    arrivals: str | None = None,
    portfolio: bool = True,
) -> tuple[Any, Plan]:
    """Plan a problem file, or what a server would serve. current: the plan in force. portfolio: of `plan`."""
    from cotenant.cli.plan import plan_from_current
    from cotenant.config import read_settings
    from cotenant.planning import plan as plan_problem

    if problem is None or problem.is_dir():
        server_settings = _served_settings(problem, settings, model_repository, planner)
        parsed, name = load_unplanned(server_settings).problem, server_settings.planner
    else:
        parsed, name = load_problem(problem, settings, model_repository), planner or read_settings().planner
    parsed = with_planning_options(parsed, time_limit, arrivals)
    if current is not None:
        return plan_from_current(name, parsed, current, portfolio=portfolio)
    return parsed, plan_problem(parsed, name, portfolio=portfolio)


def load_plan(
    file: Path | None, problem: Path | None, settings: Path | None, model_repository: Path | None, planner: str | None
) -> tuple[Any, Plan]:
    """Read a problem and its plan from a file where one is given, else plan it."""
    if file is None:
        return load_planned(problem, settings, model_repository, planner)
    plan = Plan.from_json(read_bytes(file), str(file))
    return load_problem(problem, settings, model_repository), plan


def with_planning_options(problem: Any, time_limit: float | None, arrivals: str | None) -> Any:
    """Return the problem with what the command line says of it. Raises ConfigError for unknown arrivals."""
    from typing import get_args

    from cotenant.planners import Arrivals

    if arrivals not in (None, *get_args(Arrivals)):
        raise ConfigError(f"--arrivals {arrivals!r} is unknown; use {' or '.join(get_args(Arrivals))}")
    given = {"time_limit": time_limit, "arrivals": arrivals}
    return msgspec.structs.replace(problem, **{name: value for name, value in given.items() if value is not None})


def _served_settings(
    folder: Path | None, settings: Path | None, model_repository: Path | None, planner: str | None = None
) -> Any:
    """Return settings for planning without a problem file. folder: a model repository given in its place."""
    if folder is not None:
        _check_one_repository(folder, model_repository)
    return load_settings(settings, folder or model_repository, planner)


def _check_one_repository(folder: Path, model_repository: Path | None) -> None:
    if model_repository is not None:
        raise ConfigError(f"two model repositories, {str(folder)!r} and {str(model_repository)!r}; leave out one")


def _check_no_server_options(settings: Path | None, model_repository: Path | None) -> None:
    if model_repository is not None or settings is not None:
        raise ConfigError(
            "--model-repository and --settings replace PROBLEM, which names its own models and profiles; leave out one"
        )


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def write_file(path: Path, text: str, *, quiet: bool = False) -> None:
    """Write a file atomically: the previous content stays until the new one is complete."""
    part = path.parent / f".{path.name}.new"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() or not path.exists():
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        else:
            path.write_text(text, encoding="utf-8")  # a device or a pipe, or a folder, which says so
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    if not quiet:
        print_written(path)
