"""What the command line asks: problems, settings, sites and plans from their files, and files from results."""

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
    settings: Path | None, repository: Path | None = None, planner: str | None = None, **changes: Any
) -> Any:
    """Settings from a file, or the defaults, with what the command line says instead."""
    from cotenant.config import read_settings
    from cotenant.planners import load_planner

    known = read_settings(settings)
    if planner is not None:
        load_planner(planner)  # an unknown name is an error here, not after minutes of profiling
        changes["planner"] = planner
    if repository is not None:
        changes["repository"] = repository
    return msgspec.structs.replace(known, **changes)


def load_deployment(settings: Any, *, again: bool = False, planned: bool = True) -> Any:
    """The site that settings ask for, profiling with a progress bar what was not profiled yet; `load_planned` or
    not."""
    from cotenant.app.deployment_builder import DeploymentBuilder, backend_of, timed_plan

    backend = backend_of(settings)
    try:
        with profile_progress() as progress:
            site = asyncio.run(DeploymentBuilder(settings, backend, progress, again=again).site(planned=False))
    finally:
        backend.stop()
    # Here, where Ctrl-C ends it at once, and not in the thread that a server has for it.
    return msgspec.structs.replace(site, plan=timed_plan(settings.planner, site.problem)) if planned else site


def load_problem(problem: Path | None, settings: Path | None, repository: Path | None) -> Any:
    """Of a problem file, or of what a server would serve."""
    from cotenant.config import read_problem

    if problem is None:
        return load_deployment(load_settings(settings, repository)).problem
    _alone(settings, repository)
    return read_problem(problem)


def load_planned(
    problem: Path | None,
    settings: Path | None,
    repository: Path | None,
    planner: str | None,
    current: Plan | None = None,
    time_limit: float | None = None,
) -> tuple[Any, Plan]:
    """A problem and its plan: of a problem file, or of what a server would serve. current: the plan in force."""
    from cotenant.app.deployment_builder import timed_plan
    from cotenant.cli.plan import plan_from_current
    from cotenant.config import read_settings

    if problem is None:
        known = load_settings(settings, repository, planner)
        site = load_deployment(known)
        if current is None and time_limit is None:
            return site.problem, site.plan
        asked, name = with_time_limit(time_limit, site.problem), known.planner
    else:
        asked = with_time_limit(time_limit, load_problem(problem, settings, repository))
        name = planner or read_settings().planner
    return (asked, timed_plan(name, asked)) if current is None else plan_from_current(name, asked, current)


def load_plan(
    file: Path | None, problem: Path | None, settings: Path | None, repository: Path | None, planner: str | None
) -> tuple[Any, Plan]:
    """A problem and its plan, which is that of the file where there is one, and is not made then."""
    if file is None:
        return load_planned(problem, settings, repository, planner)
    plan = Plan.from_json(read_bytes(file), str(file))
    return load_problem(problem, settings, repository), plan


def with_time_limit(time_limit: float | None, problem: Any) -> Any:
    return problem if time_limit is None else msgspec.structs.replace(problem, time_limit=time_limit)


def _alone(settings: Path | None, repository: Path | None) -> None:
    if repository is not None or settings is not None:
        raise ConfigError("--repository and --settings go without a PROBLEM: that names its own models and profiles")


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def write_file(path: Path, text: str, *, quiet: bool = False) -> None:
    """All of it or, where that fails, nothing: what was there before stays until then."""
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
