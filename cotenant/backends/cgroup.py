"""Linux control groups, versions 1 and 2: what limits this process, and a quota of processor time for others."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from cotenant.core.identity import LaneId
from cotenant.errors import ConfigError

PERIOD = 10_000  # µs: the shorter, the smoother
_LEAST = 1_000  # µs of quota, the least that the kernel takes


class Cgroup:
    """The control group of this process for one controller. `mount` is the root as far as we can see."""

    def __init__(self, folder: Path, mount: Path, version: int) -> None:
        self.folder = folder
        self.version = version
        self._mount = mount

    def limits(self, v1: str, v2: str) -> list[str]:
        """The contents of a file, by its name in either version, in this group and all above."""
        found = []
        for folder in (self.folder, *self.folder.parents):
            with contextlib.suppress(OSError):
                found.append((folder / (v1 if self.version == 1 else v2)).read_text())
            if folder == self._mount:
                break
        return found


def own_cgroup(controller: str) -> Cgroup | None:
    """Where this process is; None where this system has no such controller."""
    try:
        memberships = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in sorted(memberships, reverse=True):  # version 2 is numbered 0: where both are, it is 1
        version = 1 if controllers else 2
        if version == 1 and controller not in controllers.split(","):
            continue
        for fields in mounts:
            kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
            if kind == ("cgroup" if version == 1 else "cgroup2") and (version == 2 or controller in options):
                mount = Path(fields[4])
                # A container sees the hierarchy from its own group downwards.
                inside = os.path.relpath(path, fields[3])
                return Cgroup(mount if inside.startswith("..") else mount / inside, mount, version)
    return None


def cpu_limit() -> float:
    """Processor seconds per second that this process is limited to; infinite where it is not."""
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
    """Bytes that this process is limited to; infinite where it is not."""
    group = own_cgroup("memory")
    texts = group.limits("memory.limit_in_bytes", "memory.max") if group else []
    return min((int(text) for text in texts if text.strip() != "max"), default=math.inf)


class Quotas:
    """A control group for each lane, below `parent`, each with a quota. They are named by our process, so that the next
    server can tell what a dead one left behind."""

    def __init__(self, parent: Cgroup) -> None:
        self._parent = parent
        self._prefix = f"cotenant-{os.getpid()}-"

    def prepare(self) -> None:
        """Raises ConfigError where this user may not do this here."""
        for folder in self._parent.folder.glob("cotenant-*-*"):
            pid = folder.name.split("-")[1]
            if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(OSError):  # it is not ours, or not empty yet
                    folder.rmdir()
        if self._parent.version == 2:
            self._enable()

    def make(self, lane: LaneId, budget: float) -> None:
        """A group that gets `budget` processor seconds per second."""
        period = max(PERIOD, math.ceil(_LEAST / budget))
        quota = round(budget * period)
        folder = self._folder(lane)
        try:
            folder.mkdir(exist_ok=True)
            if self._parent.version == 2:
                (folder / "cpu.max").write_text(f"{quota} {period}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(period))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            raise quota_unavailable(folder, error) from None

    def put(self, lane: LaneId, pid: int) -> None:
        """Move a process with all its threads there. Raises ConfigError."""
        folder = self._folder(lane)
        try:
            (folder / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            pass  # it died meanwhile
        except OSError as error:
            raise quota_unavailable(folder, error) from None

    def remove(self, lane: LaneId) -> None:
        """Once its processes are gone."""
        with contextlib.suppress(OSError):  # it never was, or a process is still leaving: the next server sweeps it up
            self._folder(lane).rmdir()

    def _folder(self, lane: LaneId) -> Path:
        return self._parent.folder / (self._prefix + lane.replace("/", "."))

    def _enable(self) -> None:
        """Version 2 gives a group's processor time to its children only if the group itself holds no process: so this
        process moves into a child of its own first."""
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
