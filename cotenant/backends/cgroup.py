"""Read the limits of this process, and set CPU quotas for others, by Linux cgroups, versions 1 and 2."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from cotenant.core.identity import LaneId
from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError

PERIOD = 10_000  # µs; a shorter period is smoother
_MIN_QUOTA = 1_000  # µs, the kernel's minimum


class Cgroup:
    """Locate the cgroup of this process for one controller. mount: the visible root of its hierarchy."""

    def __init__(self, folder: Path, mount: Path, version: int) -> None:
        self.folder = folder
        self.version = version
        self._mount = mount

    def limits(self, v1: str, v2: str) -> list[str]:
        """Read a file, by its name in either version, in this cgroup and all above."""
        texts = []
        for folder in (self.folder, *self.folder.parents):
            with contextlib.suppress(OSError):
                texts.append((folder / (v1 if self.version == 1 else v2)).read_text())
            if folder == self._mount:
                break
        return texts


def own_cgroup(controller: str) -> Cgroup | None:
    """Return the cgroup of this process; None if the system has no such controller."""
    try:
        memberships = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in sorted(
        memberships, reverse=True
    ):  # version 2 has number 0; prefer version 1 if both exist
        version = 1 if controllers else 2
        if version == 1 and controller not in controllers.split(","):
            continue
        for fields in mounts:
            kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
            if kind == ("cgroup" if version == 1 else "cgroup2") and (version == 2 or controller in options):
                mount = Path(fields[4])
                # A container sees the hierarchy from its own cgroup downwards.
                inside = os.path.relpath(path, fields[3])
                return Cgroup(mount if inside.startswith("..") else mount / inside, mount, version)
    return None


def cpu_limit() -> float:
    """Return the CPU limit of this process in CPU seconds per second; infinite if there is none."""
    limits = [math.inf]
    group = own_cgroup("cpu")
    if group is None:
        return math.inf
    if group.version == 2:
        pairs = [text.split() for text in group.limits("", "cpu.max")]
    else:
        quotas, periods = group.limits("cpu.cfs_quota_us", ""), group.limits("cpu.cfs_period_us", "")
        pairs = [[quota, period] for quota, period in zip(quotas, periods, strict=True)]
    limits += [int(quota) / int(period) for quota, period in pairs if quota != "max" and int(quota) > 0]
    return min(limits)


def memory_limit() -> float:
    """Return the memory limit of this process in bytes; infinite if there is none."""
    group = own_cgroup("memory")
    texts = group.limits("memory.limit_in_bytes", "memory.max") if group else []
    return min((int(text) for text in texts if text.strip() != "max"), default=math.inf)


class Quotas:
    """Manage a cgroup with a CPU quota for each lane, below `parent`; named after this process, so that the next server
    recognises what a dead one left."""

    def __init__(self, parent: Cgroup) -> None:
        self._parent = parent
        self._prefix = f"cotenant-{os.getpid()}-"

    def prepare(self) -> None:
        """Remove what dead servers left, and enable the controller. Raises ConfigError if this user may not."""
        for folder in self._parent.folder.glob("cotenant-*-*"):
            pid = folder.name.split("-")[1]
            if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(OSError):  # it is not ours, or not empty yet
                    folder.rmdir()
        if self._parent.version == 2:
            self._enable()

    def make(self, lane: LaneId, budget: float, *, weight: int | None = None) -> None:
        """Create or change a lane's cgroup: a quota of `budget` CPU seconds per second or, with a `weight` (a share in
        ‰), no quota but that weight against the others. Raises ConfigError."""
        period = max(PERIOD, math.ceil(_MIN_QUOTA / budget))
        quota = round(budget * period)
        folder = self._folder(lane)
        second = self._parent.version == 2
        try:
            folder.mkdir(exist_ok=True)
            if weight is not None:
                (folder / ("cpu.weight" if second else "cpu.shares")).write_text(str(weight))
            elif second:
                (folder / "cpu.max").write_text(f"{quota} {period}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(period))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            raise quota_unavailable(folder, error) from None

    def put(self, lane: LaneId, pid: int) -> None:
        """Move a process with all its threads into the lane's cgroup. Raises ConfigError."""
        folder = self._folder(lane)
        try:
            (folder / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            pass  # it died meanwhile
        except OSError as error:
            raise quota_unavailable(folder, error) from None

    def remove(self, lane: LaneId) -> None:
        """Remove the lane's cgroup, once its processes are gone."""
        with contextlib.suppress(OSError):  # absent, or a process is still exiting: the next server removes it
            self._folder(lane).rmdir()

    def _folder(self, lane: LaneId) -> Path:
        return self._parent.folder / (self._prefix + lane.replace("/", "."))

    def _enable(self) -> None:
        """Delegate CPU time to children. Version 2 does so only for a cgroup without processes, so this process moves
        into a child of its own first."""
        folder = self._parent.folder
        switch = folder / "cgroup.subtree_control"
        try:
            if "cpu" in switch.read_text().split():
                return
            leaf = folder / f"{self._prefix}server"
            leaf.mkdir(exist_ok=True)
            (leaf / "cgroup.procs").write_text(str(os.getpid()))
            try:
                switch.write_text("+cpu")
                (leaf / "cpu.weight").write_text(str(WHOLE))  # that of all lanes together, where they have weights
            except OSError:
                (folder / "cgroup.procs").write_text(str(os.getpid()))
                leaf.rmdir()
                raise
        except OSError as error:
            raise quota_unavailable(folder, error) from None


def quota_unavailable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"no cgroup quota can be set at {folder}: {error.strerror}; run as root, or under `systemd-run --user --scope "
        '-p Delegate=yes`, or let workers throttle themselves with enforcement = "throttle"'
    )
