from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.backends import cgroup
from cotenant.backends.cgroup import Cgroup, Quotas
from cotenant.backends.cpu import Cpu
from cotenant.core.identity import DeviceId, LaneId
from cotenant.errors import ConfigError

LANE_A, LANE_B, LANE_C, LANE_D, LANE_E = (LaneId(DeviceId("cpu"), slot) for slot in range(5))


def machine(cores: int, *, reserve: float = 0.0) -> Cpu:
    backend = Cpu(reserve=reserve)
    backend.cores = tuple(range(cores))  # whatever this one has
    backend.capacity = cores * (1 - reserve)
    return backend


def test_cpu_partitions_that_fit_get_cores_of_their_own() -> None:
    backend = machine(2)
    assert backend.open(LANE_A, 300).cores == (0,)
    assert backend.open(LANE_B, 250).cores == (1,)
    assert backend.open(LANE_C, 250).cores == (1,)
    assert backend.open(LANE_D, 200).cores == (0,)
    backend.close(LANE_A)
    assert backend.open(LANE_E, 250).cores == (0,)


def test_small_partitions_share_no_core_while_another_has_more_room() -> None:
    backend = machine(4)
    cores = [backend.open(lane, share).cores for lane, share in ((LANE_A, 300), (LANE_B, 50), (LANE_C, 50))]
    assert cores == [(0, 1), (2,), (3,)]


def test_cpu_partition_that_fits_no_core_is_not_pinned() -> None:
    backend = machine(2)
    backend.open(LANE_A, 400)
    backend.open(LANE_B, 400)
    assert backend.open(LANE_C, 200).cores == (0, 1)


@pytest.mark.parametrize(("share", "threads"), [(50, 1), (500, 1), (550, 2), (1000, 2)])
def test_cpu_batch_threads_equal_the_cores_of_the_share(share: int, threads: int) -> None:
    launch = machine(2).open(LANE_A, share)
    assert (launch.threads, launch.cpu_limit, launch.budget) == (threads, share / 500, share / 500)


def test_shares_that_are_lent_are_limits_with_a_way_out() -> None:
    lending = Cpu(lend=True)
    launch = lending.open(LANE_A, 500)
    assert (launch.lend, launch.lent_by_kernel) == (True, False)
    assert launch.cpu_limit == launch.budget == pytest.approx(lending.capacity / 2)
    assert "lent" in lending.isolation()


def test_profiles_are_measured_on_ceilings() -> None:
    lending, ceilings = Cpu(lend=True, reserve=0.1), Cpu(reserve=0.1)
    measured = lending.with_ceilings()
    assert not measured.open(LANE_A, 500).lend
    assert measured.isolation() == ceilings.isolation()
    assert measured.capacity_fingerprint() == lending.capacity_fingerprint()
    assert ceilings.with_ceilings() is ceilings


def test_cpu_reserve_is_left_unallocated() -> None:
    assert machine(2, reserve=0.1).open(LANE_A, 500).cpu_limit == pytest.approx(0.9)
    with pytest.raises(
        ConfigError, match=r"^reserve: 1 is not a fraction of the cores; give 0 or more, and less than 1$"
    ):
        Cpu(reserve=1.0)


@given(shares=st.lists(st.integers(1, 20).map(lambda n: 50 * n), max_size=12), cores=st.integers(1, 8))
def test_cpu_cores_are_never_allocated_twice(shares: list[int], cores: int) -> None:
    backend = machine(cores)
    busy = [0.0] * cores
    for index, share in enumerate(shares):
        lane = LaneId(DeviceId("cpu"), index)
        launch = backend.open(lane, share)
        if lane in backend._pins.lanes:
            assert launch.threads == len(set(launch.cores))
            for core in launch.cores:
                busy[core] += share * cores / 1000 / launch.threads
    assert max(busy) <= 1 + 1e-6


@given(cores=st.integers(1, 8), reserve=st.sampled_from([0.0, 0.15, 0.5]), old=st.integers(1, 1000))
def test_share_changes_in_place_as_long_as_its_threads_stay(cores: int, reserve: float, old: int) -> None:
    backend = machine(cores, reserve=reserve)
    (kind,) = backend.fleet()
    for new in range(10, 1001, 10):
        threads = backend.open(LANE_A, old).threads, backend.open(LANE_B, new).threads
        assert kind.keeps_worker(old, new) == (threads[0] == threads[1])


def test_shares_that_change_together_are_pinned_anew_the_largest_first() -> None:
    backend = machine(2)
    assert [backend.open(lane, 250).cores for lane in (LANE_A, LANE_B, LANE_C, LANE_D)] == [(0,), (1,), (0,), (1,)]
    changed = backend.resize({LANE_A: 100, LANE_B: 400})
    assert {lane: launch.cores for lane, launch in changed.items()} == {LANE_B: (0, 1), LANE_A: (0,)}
    changed = backend.resize({LANE_C: 100, LANE_B: 400})
    assert {lane: launch.cores for lane, launch in changed.items()} == {LANE_B: (0,), LANE_C: (1,)}
    assert changed[LANE_B].cpu_limit == changed[LANE_B].budget == pytest.approx(0.8)


def test_partition_may_stand_on_cores_of_one_that_leaves() -> None:
    backend = machine(2)
    backend.open(LANE_A, 500)
    backend.open(LANE_B, 500)
    assert backend.open(LANE_C, 400).cores == (0, 1)
    assert backend.open(LANE_D, 400, leaving=[LANE_B]).cores == (1,)


def quotas(folder: Path, version: int) -> Quotas:
    return Quotas(Cgroup(folder, folder, version))


def test_cpu_quota_of_cgroup_v2_is_written(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("memory cpu")
    groups = quotas(tmp_path, 2)
    groups.prepare()
    groups.make(LaneId.parse("cpu-0/1"), 0.4)
    group = tmp_path / f"cotenant-{os.getpid()}-cpu-0.1"
    assert (group / "cpu.max").read_text() == "4000 10000"
    groups.put(LaneId.parse("cpu-0/1"), 123)
    assert (group / "cgroup.procs").read_text() == "123"


def test_cpu_quota_of_cgroup_v1_has_the_minimum_of_the_kernel(tmp_path: Path) -> None:
    groups = quotas(tmp_path, 1)
    groups.prepare()
    groups.make(LANE_A, 0.08)
    group = tmp_path / f"cotenant-{os.getpid()}-cpu-0.0"
    assert (group / "cpu.cfs_quota_us").read_text() == "1000"
    assert (group / "cpu.cfs_period_us").read_text() == "12500"


@pytest.mark.parametrize(("version", "file"), [(1, "cpu.shares"), (2, "cpu.weight")])
def test_cpu_lent_share_is_a_cgroup_weight(tmp_path: Path, version: int, file: str) -> None:
    quotas(tmp_path, version).make(LANE_A, 0.4, weight=200)
    group = tmp_path / f"cotenant-{os.getpid()}-cpu-0.0"
    assert [(path.name, path.read_text()) for path in group.iterdir()] == [(file, "200")]


def test_cpu_server_process_leaves_the_parent_cgroup(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("")
    quotas(tmp_path, 2).prepare()
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (tmp_path / f"cotenant-{os.getpid()}-server" / "cgroup.procs").read_text() == str(os.getpid())


def test_cpu_groups_of_dead_servers_are_removed(tmp_path: Path) -> None:
    (tmp_path / "cotenant-4194305-cpu-0.0").mkdir()  # above the largest process number
    (tmp_path / f"cotenant-{os.getpid()}-cpu-0.0").mkdir()
    (tmp_path / "cotenant-of-somebody").mkdir()
    quotas(tmp_path, 1).prepare()
    assert {path.name for path in tmp_path.iterdir()} == {f"cotenant-{os.getpid()}-cpu-0.0", "cotenant-of-somebody"}


def test_cpu_unwritable_cgroup_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"^no cgroup quota can be set at .*: Not a directory; run as root, or under "
    ):
        quotas(tmp_path / "file", 1).make(LANE_A, 0.5)
    with pytest.raises(ConfigError, match=r"^no cgroup quota can be set at .*-cpu-0\.0: No such file or directory; "):
        quotas(tmp_path, 1).put(LANE_A, os.getpid())
    with pytest.raises(ConfigError, match=r"No such file or directory; .* throttle themselves with enforcement = "):
        quotas(tmp_path, 2).prepare()


def test_cpu_limits_of_all_parent_cgroups_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (inner / "cpu.max").write_text("max 100000\n")
    (tmp_path / "a" / "memory.max").write_text("1000\n")
    (inner / "memory.max").write_text("max\n")
    monkeypatch.setattr(cgroup, "own_cgroup", lambda controller: Cgroup(inner, tmp_path, 2))
    assert (cgroup.cpu_limit(), cgroup.memory_limit()) == (1.5, 1000)


def test_cpu_this_machine_has_capacity() -> None:
    backend = Cpu()
    (kind,) = backend.fleet()
    assert kind.memory > 1 << 20
    assert 0 < backend.capacity <= len(backend.cores)
