"""Green contexts as a backend, over the fake driver: real processes and the real bindings, but nothing computes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cotenant.backends import Launch, nvidia
from cotenant.backends.green import Green, groups_in, legal_shares
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.units import WHOLE
from cotenant.errors import DeviceError, WorkerError
from cotenant.live import control_driver
from tests.driver.build import loaded
from tests.live.workers import floats, pool_of, sleeper

H200 = (8,) * 16 + (4,)
A100 = (4,) * 27
UNEVEN = (8,) * 12 + (18,)  # of 114 there might be 14 groups, but they do not lie so


class Sleeping(Green):
    """Its workers make their streams, and run nothing on them."""

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        return msgspec.structs.replace(super().open(lane, share, leaving), fake=True)


def sleeping(monkeypatch: pytest.MonkeyPatch, held: ExitStack) -> Sleeping:
    """On a machine with one H200, as long as it is `held`."""
    held.enter_context(loaded("h200"))
    backend = Sleeping(nvidia.list_gpus())
    held.callback(backend.stop)
    return backend


Machine = Callable[..., Sleeping]


@pytest.fixture
def machine(state: Path) -> Iterator[Machine]:
    """A backend on all GPUs of a machine that has these, once."""
    with ExitStack() as stack:

        def made(gpus: str = "h200", driver: str = "") -> Sleeping:
            stack.enter_context(loaded(gpus, driver=driver, state=state))
            backend = Sleeping(nvidia.list_gpus())
            stack.callback(backend.stop)
            return backend

        yield made


def test_green_cuts_are_those_of_sm_groups_and_the_whole_device() -> None:
    assert legal_shares(H200) == (60, 121, 181, 242, 303, 363, 424, 484, 545, 606, 666, 727, 787, 848, 909, 969, WHOLE)
    assert len(legal_shares(A100)) == 27 and legal_shares(A100)[:2] == (37, 74) and legal_shares(A100)[-1] == WHOLE


def test_green_job_is_a_process_of_its_own_that_chooses_groups(machine: Machine) -> None:
    backend = machine()
    launch = backend.open_job(DeviceId("h200"))
    assert launch.cuda and launch.process == "h200-0" and not launch.groups
    assert launch.env["CUDA_VISIBLE_DEVICES"].startswith("GPU-")
    with pytest.raises(DeviceError, match=r"^no device 'h200-3'; available: h200-0"):
        backend.open_job(DeviceId("h200", 3))


@pytest.mark.parametrize("step", [1, 2, 4, 8])
def test_green_partitions_of_a_whole_device_never_need_more_groups_than_exist(step: int) -> None:
    for multiprocessors in range(step, 161):
        for lost in range(min(3, multiprocessors // step)):  # groups that do not lie so
            groups = multiprocessors // step - lost
            rest = multiprocessors - groups * step
            sizes = (step,) * groups + ((rest,) if rest else ())
            shares = [share for share in legal_shares(sizes) if share < WHOLE]
            # The most of one size that add up to a whole device.
            needed = max((count * (WHOLE // share) for count, share in enumerate(shares, 1)), default=0)
            assert needed <= sizes.count(step)


def test_green_share_gets_the_largest_number_of_groups_that_fits() -> None:
    assert [groups_in(H200, share, LaneId.parse("h200-0/0")) for share in (60, 120, 121, 500, 999, WHOLE)] == [
        1,
        1,
        2,
        8,
        16,
        17,
    ]
    assert groups_in(A100, WHOLE, LaneId.parse("a100-0/0")) == 27
    with pytest.raises(DeviceError, match=r"^h200-0/0: a share of 5 % is less than one group, which is 6 %$"):
        groups_in(H200, 50, LaneId.parse("h200-0/0"))


def test_green_fleet_has_the_cuts_of_the_driver(machine: Machine) -> None:
    backend = machine("h200,rtx4090,h200")
    h200, rtx = backend.fleet()
    assert (h200.name, h200.count, h200.cuts, h200.memory) == ("h200", 2, legal_shares(H200), 143771 << 20)
    assert (rtx.count, len(rtx.cuts)) == (1, 32)
    assert backend.capacity_fingerprint().endswith("; groups of 4 or 8")


def test_green_partitions_get_disjoint_groups(machine: Machine) -> None:
    backend = machine("h200,h200")
    one, two = backend.open(LaneId.parse("h200-0/0"), 484), backend.open(LaneId.parse("h200-0/1"), 300)
    assert (one.groups, two.groups) == (tuple(range(8)), (8, 9, 10, 11))
    assert (one.process, one.cuda) == ("h200-0", True)
    first, second = nvidia.list_gpus()
    assert one.env["CUDA_VISIBLE_DEVICES"] == first.uuid
    other = backend.open(LaneId.parse("h200-1/0"), WHOLE)
    assert (other.groups, other.process, other.env["CUDA_VISIBLE_DEVICES"]) == (
        tuple(range(17)),
        "h200-1",
        second.uuid,
    )
    backend.close(LaneId.parse("h200-0/0"))
    assert backend.open(LaneId.parse("h200-0/2"), 606).groups == (*range(8), 12, 13)


def test_green_workers_of_a_partition_share_its_groups(machine: Machine) -> None:
    backend = machine()
    device = DeviceId("h200")
    backend.open(LaneId(device, 0), 242)
    first, second = backend.open(LaneId(device, 1), 242), backend.open(LaneId(device, 1, 1), 242)
    assert not backend.divides
    assert first.groups == second.groups == (4, 5, 6, 7)
    backend.close(LaneId(device, 1))
    assert backend.open(LaneId(device, 1), 242).groups == second.groups


def test_green_new_partitions_take_groups_of_closed_ones(machine: Machine) -> None:
    backend = machine()
    backend.open(LaneId.parse("h200-0/0"), 242)
    backend.open(LaneId.parse("h200-0/1"), 242)
    backend.open(LaneId.parse("h200-0/2"), 424)
    leaving = [LaneId.parse("h200-0/0"), LaneId.parse("h200-0/2")]
    # What stays has 4 to 7; the rest is divided anew, first where nobody is.
    assert backend.open(LaneId.parse("h200-0/3"), 484, leaving).groups == (0, 1, 2, 3, 8, 9, 10, 15)
    assert backend.open(LaneId.parse("h200-0/4"), 242, leaving).groups == (11, 12, 13, 14)
    # Nobody leaves, and there is no room: then partitions overlap, where the fewest are.
    for lane in leaving:
        backend.close(lane)
    assert backend.open(LaneId.parse("h200-0/5"), 121).groups == (0, 1)
    assert backend.open(LaneId.parse("h200-0/6"), 121).groups == (2, 3)


@pytest.mark.parametrize("sizes", [H200, A100, UNEVEN])
@pytest.mark.parametrize("seed", range(20))
def test_green_partitions_of_a_plan_are_disjoint_after_any_other_plan(seed: int, sizes: tuple[int, ...]) -> None:
    gpu = nvidia.Gpu(index=0, uuid="GPU-0", name="", kind="gpu", memory=1, multiprocessors=sum(sizes), capability="9.0")
    backend = Green((gpu,))
    backend._splits[gpu.uuid] = sizes
    rng = np.random.default_rng(seed)
    there: dict[LaneId, tuple[int, int]] = {}  # lane → its share and its groups, one bit each
    for change in range(10):
        kept = {lane: it for lane, it in there.items() if rng.random() < 0.5}
        fresh: dict[LaneId, tuple[int, int]] = {}
        room = WHOLE - sum(share for share, _ in kept.values())
        while fitting := [cut for cut in legal_shares(sizes) if cut <= room]:
            room -= (share := int(rng.choice(fitting)))
            lane = LaneId(DeviceId("gpu"), 100 * change + len(fresh))
            groups = backend.open(lane, share, leaving=there.keys() - kept.keys()).groups
            assert len(groups) == groups_in(sizes, share, lane)
            fresh[lane] = share, sum(1 << group for group in groups)
        for lane in there.keys() - kept.keys():
            backend.close(lane)
        there = kept | fresh
        masks = [mask for _, mask in there.values()]
        assert sum(mask.bit_count() for mask in masks) == sum(masks).bit_count()


@pytest.mark.parametrize(
    ("gpus", "driver", "reason"),
    [
        ("h200", "550.54/12.4", "12.4"),
        ("h200-mig=3g.71gb", "", "MIG is on"),
        ("p100,h200", "535.1/12.2", "12.2"),
    ],
)
def test_green_unsuitable_gpus_are_named(gpus: str, driver: str, reason: str, machine: Machine) -> None:
    backend = machine(gpus, driver)
    gpu = nvidia.list_gpus()[0]
    with pytest.raises(DeviceError, match=rf"^{gpu.name} {gpu.uuid}: .*{reason}"):
        backend.fleet()


def test_green_driver_error_is_named(machine: Machine, state: Path) -> None:
    backend = machine()
    state.write_text("error cuDevSmResourceSplitByCount 801\n")
    with pytest.raises(DeviceError, match=r"^NVIDIA H200 GPU-\S+: cuDevSmResourceSplitByCount: .*NOT_SUPPORTED"):
        backend.fleet()


def test_green_changed_share_keeps_the_process(machine: Machine) -> None:
    backend = machine()

    async def scenario() -> None:
        async with pool_of(backend) as (pool, told, _):
            for lane, share in ((LaneId.parse("h200-0/0"), 303), (LaneId.parse("h200-0/1"), 666)):
                await pool.start(lane, share=share, models=[sleeper(0.0)])
                await told.next()
            pids = {status.pid for status in pool.status()}
            assert len(pids) == 1
            leaving = [LaneId.parse("h200-0/0"), LaneId.parse("h200-0/1")]
            for lane, share in ((LaneId.parse("h200-0/2"), 666), (LaneId.parse("h200-0/3"), 303)):
                await pool.start(lane, share=share, models=[sleeper(0.0)], leaving=leaving)
                await told.next()
            for lane in leaving:
                await pool.stop(lane, grace=5.0)
            for batch, lane in enumerate((LaneId.parse("h200-0/2"), LaneId.parse("h200-0/3"))):
                pool.run(lane, batch, "sleeper", [floats(1, 2)])
                assert (await told.next())[:3] == ("finished", lane, batch)
            assert {status.pid for status in pool.status()} == pids
            assert [status.restarts for status in pool.status()] == [0, 0]

    asyncio.run(scenario())


def test_green_partition_that_the_driver_rejects_costs_no_other(machine: Machine, state: Path) -> None:
    backend = machine()
    backend.fleet()

    async def scenario() -> None:
        async with pool_of(backend) as (pool, told, _):
            await pool.start(LaneId.parse("h200-0/0"), share=484, models=[sleeper(0.0)])
            await told.next()
            state.write_text("error cuGreenCtxStreamCreate 2\n")
            with pytest.raises(
                WorkerError, match=r"^the worker of h200-0/1 did not start: cuGreenCtxStreamCreate: \S+: out of memory$"
            ):
                await pool.start(LaneId.parse("h200-0/1"), share=484, models=[sleeper(0.0)])
            with pytest.raises(WorkerError, match=r"^the worker of h200-0/2 did not start: .* less than one group"):
                await pool.start(LaneId.parse("h200-0/2"), share=10, models=[sleeper(0.0)])
            pool.run(LaneId.parse("h200-0/0"), 1, "sleeper", [floats(1, 2)])
            assert (await told.next())[:3] == ("finished", "h200-0/0", 1)

    asyncio.run(scenario())


def test_green_lost_gpu_costs_only_its_lanes(machine: Machine, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.backends.nvidia.watch.LOOK", 0.03)
    monkeypatch.setattr(control_driver, "TICK", 0.05)
    backend = machine("h200,h200")

    async def scenario() -> None:
        async with pool_of(backend) as (pool, told, _):
            for lane in (LaneId.parse("h200-0/0"), LaneId.parse("h200-0/1"), LaneId.parse("h200-1/0")):
                await pool.start(lane, share=303, models=[sleeper(0.0)])
                await told.next()
            state.write_text("lost 0\n")
            died = [await told.next(), await told.next()]
            assert {it[:2] for it in died} == {("died", "h200-0/0"), ("died", "h200-0/1")}
            assert all(it[2].startswith("h200-0 is lost: it is off the bus") for it in died)
            assert [status.state for status in pool.status()] == ["lost", "lost", "ready"]
            pool.run(LaneId.parse("h200-1/0"), 1, "sleeper", [floats(1, 2)])
            assert (await told.next())[:3] == ("finished", "h200-1/0", 1)
            state.write_text("")
            assert {await told.next(), await told.next()} == {("ready", "h200-0/0"), ("ready", "h200-0/1")}

    asyncio.run(scenario())


def test_green_killed_process_takes_its_lanes_down_and_restarts(machine: Machine) -> None:
    backend = machine()

    async def scenario() -> None:
        async with pool_of(backend) as (pool, told, _):
            for lane in (LaneId.parse("h200-0/0"), LaneId.parse("h200-0/1")):
                await pool.start(lane, share=484, models=[sleeper(0.0)])
                await told.next()
            pid = pool.status()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert {(await told.next())[:2] for _ in range(2)} == {("died", "h200-0/0"), ("died", "h200-0/1")}
            assert {await told.next(), await told.next()} == {("ready", "h200-0/0"), ("ready", "h200-0/1")}

    asyncio.run(scenario())
