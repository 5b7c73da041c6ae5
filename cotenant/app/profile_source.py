"""Obtain the profiles of models: from a file, an earlier measurement on this machine, or a new one."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Protocol

import msgspec
import numpy as np

from cotenant import __version__
from cotenant.backends import Backend
from cotenant.core.identity import own_kind
from cotenant.core.model import Kind
from cotenant.core.profile import Profile, Profiles
from cotenant.core.tensor import ModelInfo
from cotenant.core.units import show_count
from cotenant.errors import ConfigError, ModelError
from cotenant.live.confinement import Confinement
from cotenant.live.nodes.cluster import Cluster
from cotenant.live.nodes.node import Node
from cotenant.profiling import cache
from cotenant.profiling.grid import Grid, coarse_grid_of, grid_of, profile_model
from cotenant.profiling.machine_load import foreign_load, is_busy, measure_load
from cotenant.worker.repository import Entry, sample_inputs, worker_model

logger = logging.getLogger(__name__)

NETWORK_STEP = 1e-4  # seconds


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
    one = len(busy) == 1
    which = f"{next(iter(busy))} was" if one else f"{show_count(len(busy), 'model')} were"
    return (
        f"{which} profiled while other programs used {low if low == high else f'{low} to {high}'} % of the processors; "
        f"{'it' if one else 'they'} will be profiled again on a quiet machine"
    )


class _Found(msgspec.Struct, frozen=True):
    """Say where in the cache the profile of a model is that was given last. entry: the model that it is of."""

    entry: Entry
    key: str


class ProfileSource:
    """Give profiles of models on the kinds of a backend's devices.

    A kind of a node has the profile of its own kind, which may have been measured anywhere, and every batch takes the
    network's round trip more. One that a node would have to measure while it is cut off is left out.

    kinds: may be set to others between two calls. force: measure again what was measured in an earlier run. full:
    measure every point of the grid; otherwise a few do, where there is no full profile. confinement: of workers that
    are measured. A profile that was measured on a busy machine is measured again on a quiet one.
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
        unkept: Callable[[str], None] | None = None,
    ) -> None:
        self._backend = backend
        self.kinds = kinds
        self._progress = progress
        self._force = force
        self.full = full
        self._confinement = confinement
        self._tell_unkept = unkept
        self._measured: dict[str, Profile] = {}  # by cache key
        self._unkept: dict[str, Profile] = {}  # those of them that could not be cached
        self._found: dict[tuple[str, str], _Found] = {}  # by model and kind
        self._local = backend.local if isinstance(backend, Cluster) else backend
        self._quiet: bool | None = None  # whether the machine was as the first busy profile was read; None before

    async def profiles(self, entry: Entry, info: ModelInfo, given: Profiles) -> list[Profile]:
        """Return a model's profile on every kind. given: profiles to use instead of measurements. Raises ModelError."""
        return await self.measured(entry, info, await self.look_up(entry, given), 1, 1)

    async def look_up(self, entry: Entry, given: Profiles) -> KnownProfiles:
        """Return what is known of a model's profiles, without measuring anything. Raises ModelError."""
        known: dict[str, Profile] = {}
        missing: list[Missing] = []
        for kind in self.kinds:
            profile = given.get((entry.name, kind.name))
            if profile is None and (own := given.get((entry.name, own_kind(kind.name)))) is not None:
                profile = own.on(kind.name, self._network(kind))
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
            kind, node = missing.kind, self._node(missing.kind)
            try:
                profile = await self._measure(entry, info, missing, number, count)
            except ModelError as error:
                if node is None or node.is_up:
                    raise
                logger.warning("%s is not profiled on %s now: %s", entry.name, kind.name, error)
                continue
            here = profile.on(own_kind(kind.name), -self._least_network(kind, profile)) if node is not None else profile
            stored = await self._store(missing.key, here)
            profiles[kind.name] = stored if node is None else stored.on(kind.name, self._network(kind))
            self._found[entry.name, kind.name] = _Found(entry, missing.key)
        return [profiles[kind.name] for kind in self.kinds if kind.name in profiles]

    def _node(self, kind: Kind) -> Node | None:
        """Return the node of a kind; None for one of this machine."""
        name = kind.name.rpartition("/")[0]
        return self._backend.nodes.get(name) if name and isinstance(self._backend, Cluster) else None

    def _network(self, kind: Kind) -> float:
        """Return the seconds that a batch takes more on a kind of a node, in steps that small changes leave alone: a
        plan that is kept for the next start is of no use with other profiles."""
        node = self._node(kind)
        return 0.0 if node is None else math.ceil(node.round_trip / NETWORK_STEP) * NETWORK_STEP

    def _least_network(self, kind: Kind, profile: Profile) -> float:
        """Return the seconds of the network that are in what was measured, and never all of it."""
        return min(self._network(kind), min(point.latency for point in profile.points) / 2)

    async def keep(self, entry: Entry, profile: Profile) -> list[tuple[Entry, Profile]]:
        """Keep a profile that has more points now in place of the one that was given, and return it as the next start
        will find it, for every model that has it: the same file may stand under several names. Raises ModelError where
        the model's file cannot be read, or is not the one any more that was profiled."""
        kind = next(kind for kind in self.kinds if kind.name == profile.kind)
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
        """Cache a profile, with those that could not be before, and return it as it will be read."""
        self._measured[key] = self._unkept[key] = profile
        problem = ""
        try:
            for each, known in list(self._unkept.items()):
                self._measured[each] = await asyncio.to_thread(_stored, each, known)
                self._unkept.pop(each, None)
        except ConfigError as error:
            if self._tell_unkept is None:
                raise
            problem = str(error)
            logger.warning("%s", problem)
        if self._tell_unkept is not None:
            self._tell_unkept(problem)
        return self._measured[key]

    async def _look_up(self, entry: Entry, kind: Kind) -> tuple[Profile | None, Missing | None]:
        node = self._node(kind)
        welcome = None if node is None else node.welcome
        if (self._backend.name if welcome is None else welcome.backend) == "fake":
            raise ModelError(f"model {entry.name!r} has no profile; give one with `profiles` in the settings")
        grids = [grid_of(kind), coarse_grid_of(kind)]
        wanted = grids[0] if self.full else grids[1]
        digest = await _digest(entry)
        for grid in grids[:1] if self.full else grids:
            key = self._key(entry, kind, grid, digest)
            profile = self._measured.get(key)
            if profile is None and not self._force:
                profile = await asyncio.to_thread(cache.load_profile, key)
                if profile is not None and await self._outdated(profile):
                    profile = None
            if profile is not None:
                self._measured[key] = profile
                self._found[entry.name, kind.name] = _Found(entry, key)
                # The same file may stand under another name, and the kind may be that of a node.
                return Profile(entry.name, kind.name, profile.points).on(kind.name, self._network(kind)), None
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
        node = self._node(kind)
        if node is not None and node.welcome is not None:
            machine, capacity = node.welcome.machine, node.welcome.capacity
            isolation = node.welcome.isolation_of_profiles
        else:
            machine, capacity = cache.machine_fingerprint(), self._local.capacity_fingerprint()
            isolation = self._local.with_ceilings().isolation()
        own = own_kind(kind.name)
        return cache.cache_key(
            digest,
            str(msgspec.json.encode(entry.config.fields, order="deterministic")),  # protobuf's maps have no order
            machine if own == "cpu" else own,
            isolation,
            capacity,
            f"cotenant {__version__}, {_runtime(entry)}",
            str(grid),
        )

    async def _measure(self, entry: Entry, info: ModelInfo, missing: Missing, number: int, count: int) -> Profile:
        """Measure a model on the first device of a kind."""
        name = entry.name if len(self.kinds) == 1 else f"{entry.name} on {missing.kind.name}"
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
