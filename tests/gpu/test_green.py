"""Green contexts on a real GPU: partitions lie apart, and compute as much as their multiprocessors say."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cotenant.worker.green import Groups, Multiprocessors
from tests.gpu.kernels import SOURCE, Kernels

CLOSE = 0.10  # how far a throughput may be from what multiprocessors say
SOON = math.inf if "COTENANT_FAKE_GPUS" in os.environ else 0.05  # seconds; a fake driver's prove nothing

Streams = Callable[[Groups], int]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels()


@pytest.fixture(scope="module")
def processors() -> Multiprocessors:
    return Multiprocessors()


@pytest.fixture
def stream(processors: Multiprocessors) -> Iterator[Streams]:
    with ExitStack() as held:
        yield lambda groups: held.enter_context(processors.stream(groups))


@pytest.fixture(scope="module")
def sizes(processors: Multiprocessors) -> tuple[int, ...]:
    return processors.sizes


def equal(sizes: tuple[int, ...]) -> int:
    return sizes.count(sizes[0])


@pytest.mark.gpu
def test_green_groups_cover_all_multiprocessors(
    kernels: Kernels, sizes: tuple[int, ...], figure: Callable[..., None]
) -> None:
    figure(sizes=sizes)
    assert sum(sizes) == kernels.multiprocessors
    # The remainder is what the GPCs have beyond whole groups: on one H100 12 multiprocessors beside 15 groups.
    assert sizes[:-1] == (sizes[0],) * (len(sizes) - 1) and sizes[-1] < sum(sizes[:-1]) / 4


@pytest.mark.gpu
def test_green_partitions_are_disjoint(kernels: Kernels, sizes: tuple[int, ...], stream: Streams) -> None:
    count = equal(sizes)
    for cut in (1, count // 4, count // 2, count - 1):
        left, right = kernels.where(stream(tuple(range(cut))), stream(tuple(range(cut, count))))
        assert (len(left), len(right)) == (cut * sizes[0], (count - cut) * sizes[0])
        assert not left & right
    each = kernels.where(*[stream((group,)) for group in range(count)])
    assert [len(one) for one in each] == [sizes[0]] * count
    assert len(set().union(*each)) == count * sizes[0]
    # Any set of groups is the multiprocessors of these groups, neighbours or not.
    (some,) = kernels.where(stream((0, count // 2, count - 1)))
    assert some == each[0] | each[count // 2] | each[count - 1]
    (whole,) = kernels.where(stream(tuple(range(len(sizes)))))
    assert len(whole) == kernels.multiprocessors


@pytest.mark.gpu
def test_green_throughput_is_proportional_to_multiprocessors(
    kernels: Kernels, sizes: tuple[int, ...], stream: Streams, figure: Callable[..., None]
) -> None:
    def taken(groups: Groups) -> float:
        on = stream(groups)
        kernels.start_compute(on, times=3)  # clocks are up by then
        return statistics.median(kernels.seconds(on) for _ in range(7))

    everything = tuple(range(len(sizes)))
    whole = taken(everything)
    curve = {}
    for count in range(1, equal(sizes) + 1):
        groups = tuple(range(count))
        share = sum(sizes[group] for group in groups) / sum(sizes)
        curve[count] = whole / taken(groups) / share
    figure(share_kept={count: round(value, 4) for count, value in curve.items()})
    assert {count: value for count, value in curve.items() if abs(value - 1) > CLOSE} == {}


@pytest.mark.gpu
def test_green_co_located_compute_costs_nothing(
    kernels: Kernels, sizes: tuple[int, ...], stream: Streams, figure: Callable[..., None]
) -> None:
    half = equal(sizes) // 2
    one, other = stream(tuple(range(half))), stream(tuple(range(half, 2 * half)))
    kernels.start_compute(one, times=3)
    alone = statistics.median(kernels.seconds(one) for _ in range(7))
    beside = [kernels.seconds(one, lambda: kernels.start_compute(other, times=2)) for _ in range(7)]
    kernels.wait(other)
    figure(alone=alone, beside=beside)
    assert statistics.median(beside) < alone * (1 + CLOSE)


@pytest.mark.gpu
def test_green_cuda_graph_runs_where_it_was_recorded(kernels: Kernels, sizes: tuple[int, ...], stream: Streams) -> None:
    small, whole = stream((0,)), stream(tuple(range(len(sizes))))
    (there,) = kernels.where(small)
    assert kernels.recorded_where(small, small) == there
    assert kernels.recorded_where(small, whole) == there


@pytest.mark.gpu
def test_green_further_streams_are_available_at_once(kernels: Kernels, figure: Callable[..., None]) -> None:
    """Seconds, and bytes of the device, that contexts and streams take."""

    def cost(action: Callable[[], object]) -> tuple[float, int]:
        free, begun = kernels.free(), time.perf_counter()
        action()
        return time.perf_counter() - begun, free - kernels.free()

    processors = Multiprocessors()
    with ExitStack() as held:
        costs = {
            "the first stream, with the contexts that are made ahead": cost(
                lambda: held.enter_context(processors.stream((0,)))
            ),
            "a stream of a context that is there": cost(lambda: held.enter_context(processors.stream((0, 1)))),
            "a context that was not foreseen": cost(lambda: held.enter_context(processors.stream((0, 2)))),
        }
        with processors.stream((0, 1, 2)):
            pass
        costs["a stream that was used before"] = cost(lambda: held.enter_context(processors.stream((0, 1, 2))))
    figure(seconds_and_bytes=costs)
    assert all(seconds < SOON for name, (seconds, _) in costs.items() if not name.startswith("the first"))


def test_green_test_kernels_compile(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    command = ["nvcc", "-arch=sm_90", "-cubin", "-o", str(tmp_path / "kernels"), str(SOURCE)]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""
