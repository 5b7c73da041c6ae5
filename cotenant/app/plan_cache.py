"""Keep plans beside the profiles that they were made from, by all that they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

import cotenant
from cotenant.planners import Problem
from cotenant.profiling import cache

KEPT = 32  # plans; the oldest are removed
OPAQUE = ("profiles", "assumed", "interference")  # fields of a problem that are no plain values
CODE = ("core", "planners", "planning", "predictors", "runtime", "sim")  # packages that decide a plan


def plan_folder() -> Path:
    """Return the folder beside that of the profiles."""
    return cache.cache_folder().parent / "plans"


def plan_key(problem: Problem, *circumstances: object) -> str:
    """Hash a problem, the code that plans, and whatever else a plan depends on: values, among them those that the
    problem's predictor of interference was made from."""
    profiles = [(*key, profile.points, profile.padding) for key, profile in sorted(problem.profiles.items())]
    asked = {field: getattr(problem, field) for field in problem.__struct_fields__ if field not in OPAQUE}
    depends = (asked, sorted(problem.assumed), profiles, circumstances, cotenant.__version__, _code())
    return hashlib.sha256(msgspec.json.encode(depends, enc_hook=repr, order="sorted")).hexdigest()[:32]


def load_plan(key: str) -> bytes | None:
    """Return what was stored under a key; None where there is nothing."""
    try:
        return (plan_folder() / f"{key}.json").read_bytes()
    except OSError:
        return None


def store_plan(key: str, text: bytes) -> None:
    """Store a plan under a key, atomically. A folder that cannot be written costs no more than the plan's search."""
    folder = plan_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".")
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        Path(temporary).replace(folder / f"{key}.json")
        for old in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()


def _code() -> str:
    """Hash the modules that plans come from: in a checkout they change without a new version."""
    digest = hashlib.sha256()
    for path in _modules():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _modules() -> Iterable[Path]:
    root = Path(cotenant.__file__).parent
    for package in CODE:
        yield from sorted((root / package).rglob("*.py"))
