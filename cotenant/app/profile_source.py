"""Obtain the profiles of models: from a file, an earlier measurement on this machine, or a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import msgspec
import numpy as np

from cotenant import __version__
from cotenant.backends import Backend
from cotenant.core.model import Kind
from cotenant.core.profile import Profile, Profiles
from cotenant.core.tensor import ModelInfo
from cotenant.errors import ModelError
from cotenant.profiling import cache
from cotenant.profiling.grid import Grid, grid_of, profile_model
from cotenant.worker.repository import Entry, sample_inputs, worker_model


class Progress(Protocol):
    """Receive each point that was profiled."""

    def __call__(self, model: str, done: int, total: int) -> None: ...


def ignore_progress(model: str, done: int, total: int) -> None:
    """Show nothing."""


class ProfileSource:
    """Give profiles of models on the kinds of a backend's devices.

    force: measure again what was measured in an earlier run.
    """

    def __init__(self, backend: Backend, kinds: Collection[Kind], progress: Progress, *, force: bool) -> None:
        self._backend = backend
        self._kinds = kinds
        self._progress = progress
        self._force = force
        self._measured: dict[str, Profile] = {}  # by cache key

    async def profiles(self, entry: Entry, info: ModelInfo, given: Profiles) -> list[Profile]:
        """Return a model's profile on every kind. given: profiles to use instead of measurements. Raises ModelError."""
        profiles = []
        for kind in self._kinds:
            known = given.get((entry.name, kind.name))
            profiles.append(await self._profile(entry, info, kind) if known is None else known)
        return profiles

    async def _profile(self, entry: Entry, info: ModelInfo, kind: Kind) -> Profile:
        if self._backend.name == "fake":
            raise ModelError(f"model {entry.name!r} has no profile; give one with `profiles` in the settings")
        grid = grid_of(kind)
        key = await asyncio.to_thread(
            cache.cache_key,
            entry.path,
            str(msgspec.json.encode(entry.config.fields)),
            cache.machine_fingerprint() if kind.name == "cpu" else kind.name,
            self._backend.with_ceilings().isolation(),
            self._backend.capacity_fingerprint(),
            f"cotenant {__version__}, {_runtime(entry)}",
            str(grid),
        )
        known = self._measured.get(key) or (None if self._force else cache.load_profile(key))
        if known is None:
            known = await self._measure(entry, info, kind, grid)
            cache.store_profile(key, known)
        self._measured[key] = known
        return Profile(entry.name, kind.name, known.points)  # the same file may stand under another name

    async def _measure(self, entry: Entry, info: ModelInfo, kind: Kind, grid: Grid) -> Profile:
        """Measure a model on the first device of a kind."""
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


def _runtime(entry: Entry) -> str:
    """Return the library that runs a model, with its version. Raises ModelError where it is not installed."""
    if not entry.platform.startswith("pytorch"):
        import onnxruntime  # named the same in all of its distributions; `describe` has opened the model with it

        return f"onnxruntime {onnxruntime.__version__}"
    try:
        return f"torch {version('torch')}"  # which takes seconds to import
    except PackageNotFoundError:
        raise ModelError(f"{entry.path}: PyTorch is not installed; run `pip install 'cotenant[torch]'`") from None
