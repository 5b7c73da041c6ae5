"""Obtain the profiles of models: from a file, an earlier measurement on this machine, or a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Protocol

import msgspec
import numpy as np

from cotenant import __version__
from cotenant.backends import Backend
from cotenant.core.model import Kind
from cotenant.core.profile import Profile, Profiles
from cotenant.core.tensor import ModelInfo
from cotenant.core.units import show_count
from cotenant.errors import ModelError
from cotenant.live.confinement import Confinement
from cotenant.profiling import cache
from cotenant.profiling.grid import Grid, coarse_grid_of, grid_of, profile_model
from cotenant.profiling.machine_load import foreign_load, is_busy, measure_load
from cotenant.worker.repository import Entry, sample_inputs, worker_model


class Progress(Protocol):
    """Receive each point that was profiled. done, total: points of a model, which is the `number`-th of `count` that
    are profiled."""

    def __call__(self, model: str, done: int, total: int, number: int, count: int) -> None: ...


def ignore_progress(model: str, done: int, total: int, number: int, count: int) -> None:
    """Show nothing."""


class Missing(msgspec.Struct, frozen=True):
    """Describe a profile that has to be measured. key: in the cache."""

    kind: Kind
    grid: Grid
    key: str


class KnownProfiles(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what is known of a model's profiles, by kind, and what is not."""

    known: dict[str, Profile]
    missing: tuple[Missing, ...]


def describe_busy(profiles: Iterable[Profile]) -> str:
    """Say which profiles were measured on a busy machine; empty where none was."""
    busy = {profile.model: foreign_load(profile) for profile in profiles if is_busy(profile)}
    if not busy:
        return ""
    low, high = (f"{100 * part:.0f}" for part in (min(busy.values()), max(busy.values())))
    which = f"{next(iter(busy))} was" if len(busy) == 1 else f"{show_count(len(busy), 'model')} were"
    return (
        f"{which} profiled while other programs used {low if low == high else f'{low} to {high}'} % of the processors; "
        "that is done again on a quiet machine"
    )


class _Found(msgspec.Struct, frozen=True):
    """Say where in the cache the profile of a model is that was given last. entry: the model that it is of."""

    entry: Entry
    key: str


class ProfileSource:
    """Give profiles of models on the kinds of a backend's devices.

    force: measure again what was measured in an earlier run. full: measure every point of the grid; otherwise a few do,
    where there is no full profile. confinement: of workers that are measured. A profile that was measured on a busy
    machine is measured again on a quiet one.
    """

    def __init__(
        self,
        backend: Backend,
        kinds: Collection[Kind],
        progress: Progress,
        *,
        force: bool,
        full: bool = False,
        confinement: Confinement | None = None,
    ) -> None:
        self._backend = backend
        self._kinds = kinds
        self._progress = progress
        self._force = force
        self.full = full
        self._confinement = confinement
        self._measured: dict[str, Profile] = {}  # by cache key
        self._found: dict[tuple[str, str], _Found] = {}  # by model and kind
        self._quiet: bool | None = None  # whether the machine is; None where it was not looked at

    async def profiles(self, entry: Entry, info: ModelInfo, given: Profiles) -> list[Profile]:
        """Return a model's profile on every kind. given: profiles to use instead of measurements. Raises ModelError."""
        return await self.measured(entry, info, await self.look_up(entry, given), 1, 1)

    async def look_up(self, entry: Entry, given: Profiles) -> KnownProfiles:
        """Return what is known of a model's profiles, without measuring anything. Raises ModelError."""
        known: dict[str, Profile] = {}
        missing: list[Missing] = []
        for kind in self._kinds:
            profile = given.get((entry.name, kind.name))
            if profile is None:
                profile, wanted = await self._look_up(entry, kind)
                missing += [] if wanted is None else [wanted]
            if profile is not None:
                known[kind.name] = profile
        return KnownProfiles(known=known, missing=tuple(missing))

    async def measured(
        self, entry: Entry, info: ModelInfo, known: KnownProfiles, number: int, count: int
    ) -> list[Profile]:
        """Return a model's profile on every kind, once those that are missing are measured. number, count: as progress
        tells them. Raises ModelError."""
        profiles = dict(known.known)
        for missing in known.missing:
            profile = await self._measure(entry, info, missing, number, count)
            profiles[missing.kind.name] = await self._store(missing.key, profile)
            self._found[entry.name, missing.kind.name] = _Found(entry, missing.key)
        return [profiles[kind.name] for kind in self._kinds]

    async def keep(self, entry: Entry, profile: Profile) -> list[tuple[Entry, Profile]]:
        """Keep a profile that has more points now in place of the one that was given, and return it as the next start
        will find it, for every model that has it: the same file may stand under several names. Raises ModelError where
        the model's file cannot be read, or is not the one any more that was profiled, ConfigError where the cache
        cannot be written."""
        kind = next(kind for kind in self._kinds if kind.name == profile.kind)
        digest = await _digest(entry)
        found = self._found.get((entry.name, kind.name))
        keys = [self._key(entry, kind, grid, digest) for grid in (grid_of(kind), coarse_grid_of(kind))]
        if found is None or found.entry != entry or found.key not in keys:
            raise ModelError(f"{entry.path} has changed since the model was loaded")
        points = (await self._store(found.key, profile)).points
        return [
            (each.entry, Profile(name, kind.name, points))
            for (name, of), each in self._found.items()
            if of == kind.name and each.key == found.key
        ]

    async def _store(self, key: str, profile: Profile) -> Profile:
        """Cache a profile, and return it as it will be read."""
        self._measured[key] = profile = await asyncio.to_thread(_stored, key, profile)
        return profile

    async def _look_up(self, entry: Entry, kind: Kind) -> tuple[Profile | None, Missing | None]:
        if self._backend.name == "fake":
            raise ModelError(f"model {entry.name!r} has no profile; give one with `profiles` in the settings")
        grids = [grid_of(kind), coarse_grid_of(kind)]
        wanted = grids[0] if self.full else grids[1]
        digest = await _digest(entry)
        for grid in grids[:1] if self.full else grids:
            key = self._key(entry, kind, grid, digest)
            profile = self._measured.get(key)
            if profile is None and not self._force:
                profile = await asyncio.to_thread(cache.load_profile, key)
            if profile is not None and not await self._outdated(profile):
                self._measured[key] = profile
                self._found[entry.name, kind.name] = _Found(entry, key)
                # The same file may stand under another name.
                return Profile(entry.name, kind.name, profile.points), None
        return None, Missing(kind, wanted, self._key(entry, kind, wanted, digest))

    async def _outdated(self, profile: Profile) -> bool:
        """Return whether a profile was measured on a machine that was busy, and is not any more."""
        if not is_busy(profile):
            return False
        if self._quiet is None:
            load = await asyncio.to_thread(measure_load)
            self._quiet = load is not None and not load.busy
        return self._quiet

    def _key(self, entry: Entry, kind: Kind, grid: Grid, digest: str) -> str:
        return cache.cache_key(
            digest,
            str(msgspec.json.encode(entry.config.fields, order="deterministic")),  # protobuf's maps have no order
            cache.machine_fingerprint() if kind.name == "cpu" else kind.name,
            self._backend.with_ceilings().isolation(),
            self._backend.capacity_fingerprint(),
            f"cotenant {__version__}, {_runtime(entry)}",
            str(grid),
        )

    async def _measure(self, entry: Entry, info: ModelInfo, missing: Missing, number: int, count: int) -> Profile:
        """Measure a model on the first device of a kind."""
        name = entry.name if len(self._kinds) == 1 else f"{entry.name} on {missing.kind.name}"
        done = 0

        def measured(points: int) -> None:
            nonlocal done
            done += points
            self._progress(name, done, missing.grid.points, number, count)

        measured(0)
        rng = np.random.default_rng(0)
        return await profile_model(
            self._backend,
            worker_model(entry, info),
            lambda rows: sample_inputs(entry, info, rows, rng),
            kind=missing.kind.name,
            grid=missing.grid,
            measured=measured,
            confinement=self._confinement,
        )


async def _digest(entry: Entry) -> str:
    """Hash a model's file. Raises ModelError where it cannot be read."""
    try:
        return await asyncio.to_thread(cache.file_digest, entry.path)
    except OSError as error:
        raise ModelError(f"{entry.path}: cannot read the model: {error.strerror}") from None


def _stored(key: str, profile: Profile) -> Profile:
    """Cache a profile, and return it as it will be read: a plan that is kept for the next start is of no use with one
    that differs in the last digit."""
    cache.store_profile(key, profile)
    return cache.load_profile(key) or profile


def _runtime(entry: Entry) -> str:
    """Return the library that runs a model, with its version. Raises ModelError where it is not installed."""
    if entry.platform == "onnxruntime_onnx":
        import onnxruntime  # named the same in all of its distributions; `describe` has opened the model with it

        return f"onnxruntime {onnxruntime.__version__}"
    library = entry.platform.partition("_")[0]
    if library == "python":
        return f"python {python_version()}, numpy {np.__version__}"
    name, extra, distributions = _LIBRARIES[library]
    for distribution in distributions:
        with suppress(PackageNotFoundError):
            return f"{distribution} {version(distribution)}"  # importing it may take seconds
    raise ModelError(f"{entry.path}: {name} is not installed; run `pip install 'cotenant[{extra}]'`")


# By what platforms begin with: the library, our extra that brings it, and the packages that it comes in.
_LIBRARIES = {
    "pytorch": ("PyTorch", "torch", ("torch",)),
    "xgboost": ("XGBoost", "trees", ("xgboost", "xgboost-cpu")),
    "lightgbm": ("LightGBM", "trees", ("lightgbm",)),
}
