"""What only a real MPS tells: how many multiprocessors a client sees, and what becomes of an error of the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import pytest

from cotenant.backends import nvidia
from cotenant.backends.mps import Mps
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.units import WHOLE
from cotenant.errors import DeviceError
from cotenant.worker.runners import modules_of
from cotenant.worker.wire import WorkerModel

pytestmark = pytest.mark.gpu

Figure = Callable[..., None]

CLOSE = 0.1  # how far a throughput may be from what multiprocessors say
SEEN = 1.0  # seconds until a fault is told
BACK = 60.0  # seconds until MPS takes clients again

# A client says how many multiprocessors it sees. Told to, it has a kernel write where no memory is. One that was
# started ahead has the libraries of its models before it is told, in the first line, what share it has.
PROGRAM = """
import importlib, json, os, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
os.environ.update(json.loads(sys.stdin.readline()))
from tests.gpu.kernels import Kernels
kernels = Kernels()
print(kernels.multiprocessors, flush=True)
word = sys.stdin.readline().strip()
if word == "compute":
    kernels.start_compute(0, times=3)
    print(min(kernels.seconds(0) for _ in range(7)), flush=True)
if word == "fault":
    kernels.start_where(0, 16)
    kernels.wait(0)
"""


class Client:
    """said: the multiprocessors that it sees, or how it failed. ahead: modules that it has imported before it knows its
    environment."""

    def __init__(self, env: Mapping[str, str], ahead: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *ahead],
            env={**os.environ} if ahead else {**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.tell(json.dumps(env))
        assert self.process.stdout
        self.said = self.process.stdout.readline().strip()

    def tell(self, word: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()


@contextmanager
def client(backend: Mps, lane: LaneId, env: Mapping[str, str], ahead: Sequence[str] = ()) -> Iterator[Client]:
    it = Client(env, ahead)
    backend.on_worker_started(lane, it.process.pid)
    try:
        yield it
    finally:
        it.process.kill()
        it.process.communicate()


class Fault(msgspec.Struct, frozen=True):
    """Seconds until it was told, and from the end of the clients until MPS took the next one. log: what the server
    wrote meanwhile. next: what that client said."""

    reason: str
    told: float
    back: float
    log: str
    next: str


def watched(backend: Mps, cause: Callable[[Client], None]) -> Fault:
    """Two clients, one of which causes an error of the GPU."""
    (device,) = backend._devices.values()
    bad, other = LaneId(device.name, 0), LaneId(device.name, 1)
    env = {lane: backend.open(lane, 500).env for lane in (bad, other)}
    with client(backend, bad, env[bad]) as one, client(backend, other, env[other]):
        begun = time.monotonic()
        cause(one)
        told = _until(backend.lost, BACK) - begun
        reason, log = backend.lost()[device.name], device.daemon._read("server.log")
    begun = time.monotonic()
    back = _until(lambda: not backend.lost(), BACK) - begun
    with client(backend, bad, env[bad]) as again:
        return Fault(reason, told, back, log, again.said)


def _until(condition: Callable[[], object], patience: float) -> float:
    deadline = time.monotonic() + patience
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return time.monotonic()


@pytest.fixture
def backend() -> Iterator[Mps]:
    """Of the first GPU."""
    try:
        made = Mps(nvidia.select_gpus(nvidia.list_gpus())[:1])
    except DeviceError as error:
        pytest.skip(str(error))
    yield made
    made.stop()


@pytest.mark.parametrize("share", [100, 200, 500, 1000])
def test_mps_client_sees_its_share_of_multiprocessors(backend: Mps, share: int, figure: Figure) -> None:
    (gpu,) = backend._gpus
    lane = LaneId(DeviceId(gpu.kind), 0)
    with client(backend, lane, backend.open(lane, share).env) as it:
        figure(share=share, multiprocessors=it.said, of=gpu.multiprocessors)
        exact = gpu.multiprocessors * share / 1000
        assert exact - 2 <= int(it.said) <= exact  # rounded down, to pairs where the hardware has pairs


def test_mps_throughput_is_proportional_to_multiprocessors(backend: Mps, figure: Figure) -> None:
    """Of a kernel that only computes, in blocks that any multiprocessor takes."""
    (gpu,) = backend._gpus
    lane, seconds, processors = LaneId(DeviceId(gpu.kind), 0), {}, {}
    for share in (1000, 750, 500, 250, 100):
        with client(backend, lane, backend.open(lane, share).env) as it:
            processors[share] = int(it.said)
            it.tell("compute")
            assert it.process.stdout
            seconds[share] = float(it.process.stdout.readline())
    kept = {share: seconds[WHOLE] / took for share, took in seconds.items()}
    figure(share_kept={share: round(value, 4) for share, value in kept.items()}, multiprocessors=processors)
    assert {share: value for share, value in kept.items() if abs(value - 1) > CLOSE} == {}


@pytest.mark.parametrize("platform", ["pytorch_libtorch", "pytorch_export"])
def test_mps_prestarted_client_sees_its_share(backend: Mps, platform: str, figure: Figure) -> None:
    """Importing its libraries has asked CUDA for nothing: that would have read what the environment was then."""
    (gpu,) = backend._gpus
    lane, share = LaneId(DeviceId(gpu.kind), 0), 200
    modules = modules_of(WorkerModel(name="any", platform=platform, inputs=()), fake=False)
    with client(backend, lane, backend.open(lane, share).env, modules) as it:
        figure(share=share, multiprocessors=it.said, of=gpu.multiprocessors)
        exact = gpu.multiprocessors * share / 1000
        assert exact - 2 <= int(it.said) <= exact


def test_mps_fault_is_reported_in_time_and_mps_recovers(backend: Mps, figure: Figure) -> None:
    fault = watched(backend, lambda it: it.tell("fault"))
    figure(**msgspec.structs.asdict(fault))
    assert fault.told < SEEN
    assert "fatal error of the GPU" in fault.reason
    assert fault.back < BACK and fault.next.isdecimal()
