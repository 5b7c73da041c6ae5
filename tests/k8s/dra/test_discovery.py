"""GPUs of a node as the driver finds them, over the real bindings and a fake driver below."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cotenant.k8s.dra.devices import NodeDevice
from cotenant.k8s.dra.discovery import GpuDiscovery
from cotenant.k8s.dra.resource_slice import slice_change
from tests.backends.test_nvidia import GIB, uuid
from tests.driver.build import loaded
from tests.k8s.dra.published import check_slice

Finder = Callable[[str], GpuDiscovery]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def finder(state: Path) -> Iterator[Finder]:
    """Gives this process some GPUs, and what looks for them."""
    with ExitStack() as stack:

        def find(gpus: str) -> GpuDiscovery:
            stack.enter_context(loaded(gpus, state=state))
            discovery = GpuDiscovery()
            stack.callback(discovery.close)
            return discovery

        yield find


def names(devices: tuple[NodeDevice, ...]) -> list[str]:
    return [each.name for each in devices]


def test_gpus_are_found_with_kind_index_and_instances(finder: Finder) -> None:
    first, second, third = finder("h200,h200,a100-80gb-mig=3g.40gb+2g.20gb").look()
    assert (first.uuid, first.kind, first.index, first.product) == (uuid(0), "h200", 0, "NVIDIA H200")
    assert (second.uuid, second.kind, second.index, second.minor) == (uuid(1), "h200", 1, 1)
    assert (first.memory, first.mig, first.instances) == (143771 << 20, False, ())
    assert (third.kind, third.index, third.mig, third.modes) == ("a100-sxm4-80gb-mig", 0, True, ("mig",))
    assert [(each.profile, each.share) for each in third.instances] == [("3g.40gb", 428), ("2g.20gb", 285)]
    assert third.instances[1].memory < 20 * GIB
    change = slice_change("node-a", "uid", [first, second, third], {})
    assert change.create is not None
    check_slice({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", **change.create})


def test_gpu_that_needs_a_reset_is_left_out_until_it_is_back(
    finder: Finder, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    discovery = finder("h200,h200")
    both = discovery.look()
    state.write_text("reset 0\n")
    assert until(discovery.look, 1) == both[1:]  # with the index that it had
    for _ in range(3):
        discovery.look()
    assert caplog.text.count("GPU 0 is left out: it needs a reset") == 1
    state.write_text("")
    assert until(discovery.look, 2) == both


def test_gpu_with_a_fatal_error_stays_lost_while_another_vanishes(
    finder: Finder, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    discovery = finder("h200,h200,h200")
    every = discovery.look()
    state.write_text("xid 1 79\n")
    assert until(discovery.look, 2) == (every[0], every[2])
    assert f"GPU {uuid(1)} is left out: " in caplog.text
    state.write_text("xid 1 79\nreset 2\n")
    assert until(discovery.look, 1) == every[:1]
    state.write_text("")
    assert until(discovery.look, 2) == (every[0], every[2])


def until(look: Callable[[], tuple[NodeDevice, ...]], count: int) -> tuple[NodeDevice, ...]:
    """Look until there are so many GPUs."""
    end = time.monotonic() + 20
    while True:
        found = look()
        if len(found) == count:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.02)
