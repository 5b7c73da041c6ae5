"""MPS over a fake control program: real processes, sockets, folders and signals, but no GPU."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import share_change
from cotenant.backends import mps, mps_daemon, nvidia
from cotenant.backends.mps import Mps
from cotenant.backends.mps_daemon import mps_processes
from cotenant.core.identity import DeviceId, LaneId
from cotenant.errors import DeviceError
from cotenant.live import control_driver
from tests.driver import mps as fake
from tests.driver.build import fitted, loaded
from tests.gpu import test_mps as check
from tests.live.workers import floats, pool_of
from tests.worker import graphs

PROTOCOLS = {2: 13000, 3: 13040}
WAIT = 60.0  # seconds until a test that waits for something fails


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where daemons are to be. Short, for sockets; and nothing runs there afterwards."""
    fake.installed(tmp_path / "bin", monkeypatch)
    monkeypatch.setattr(mps, "LOOK", 0.03)
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        root = Path(folder) / "r"
        root.mkdir()
        yield root
        left = fake.left(root)
        fake.cleared(root)
    assert not left


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[[str], tuple[nvidia.Gpu, ...]]]:
    """Gives this process some GPUs, once."""
    with ExitStack() as held:

        def machine(gpus: str) -> tuple[nvidia.Gpu, ...]:
            held.enter_context(loaded(gpus, state=tmp_path / "state"))
            return nvidia.list_gpus()

        yield machine


Make = Callable[..., Mps]


@pytest.fixture
def made(root: Path, machine: Callable[[str], tuple[nvidia.Gpu, ...]]) -> Iterator[Make]:
    """Starts MPS on the GPUs of a machine, which is the same in later calls. only: which of them."""
    with ExitStack() as held:
        there: list[nvidia.Gpu] = []

        def make(gpus: str = "h200", *, only: Sequence[int] | None = None, **options: Any) -> Mps:
            there.extend(() if there else machine(gpus))
            some = there if only is None else [there[index] for index in only]
            backend = fake.OnProcessor(some, directory=root, **options)
            held.callback(backend.stop)
            return backend

        yield make
    assert not list(root.iterdir())


def uuid(index: int) -> str:
    return f"GPU-{index + 1:08x}-{os.getpid() & 0xFFFF:04x}-4000-8000-000000000000"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def told(monkeypatch: pytest.MonkeyPatch, **told: object) -> None:
    """How the control program is from now on."""
    words = [name if value is True else f"{name}={value}" for name, value in told.items()]
    monkeypatch.setenv("COTENANT_FAKE_MPS", ",".join(words))


def test_mps_each_gpu_has_a_daemon_with_a_private_directory(made: Make, root: Path) -> None:
    backend = made("h200,h200")
    assert [(kind.name, kind.count) for kind in backend.fleet()] == [("h200", 2)]
    daemons = [it for it in mps_daemon.mps_processes() if it.pipe and it.pipe.is_relative_to(root)]
    assert sorted((it.name, it.devices) for it in daemons) == [
        (name, (uuid(index),)) for name in (nvidia.CONTROL, mps_daemon.SERVER) for index in (0, 1)
    ]
    (home,) = root.iterdir()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    first, second = backend.open(LaneId.parse("h200-0/0"), 200).env, backend.open(LaneId.parse("h200-1/0"), 200).env
    assert first["CUDA_MPS_PIPE_DIRECTORY"] != second["CUDA_MPS_PIPE_DIRECTORY"]
    assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == (uuid(0), uuid(1))


@pytest.mark.parametrize(("protocol", "version"), PROTOCOLS.items())
def test_mps_share_becomes_the_active_thread_percentage(
    made: Make, monkeypatch: pytest.MonkeyPatch, protocol: int, version: int
) -> None:
    told(monkeypatch, version=version)
    backend = made(protocol=protocol)
    for share, percentage in ((50, "5"), (200, "20"), (1000, "100")):
        launch = backend.open(LaneId.parse("h200-0/0"), share)
        assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in launch.env
        with fake.client(launch.env) as client:
            assert client.said == ["CUDA_SUCCESS", percentage, "-"]
        backend.close(LaneId.parse("h200-0/0"))


def test_mps_job_is_a_client_of_low_priority_on_part_of_the_threads(made: Make) -> None:
    backend = made()
    launch = backend.open_job(DeviceId("h200"))
    assert launch.cuda and launch.env["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    with fake.client(launch.env) as client:
        assert client.said == ["CUDA_SUCCESS", "50", "-"]
    with pytest.raises(DeviceError, match=r"^no device 'h200-7'; available: h200-0"):
        backend.open_job(DeviceId("h200", 7))


def test_mps_static_partitions_leave_jobs_no_place(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, version=mps_daemon.STATIC)
    with pytest.raises(DeviceError, match="static partitions leave a job no multiprocessors"):
        made(static=True).open_job(DeviceId("h200"))


def test_mps_operator_environment_does_not_cap_clients(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    backend = made()
    with fake.client(backend.open(LaneId.parse("h200-0/0"), 500).env) as client:
        assert client.said == ["CUDA_SUCCESS", "50", "-"]
    environ = [Path(f"/proc/{it.pid}/environ").read_bytes() for it in mps_daemon.mps_processes()]
    assert environ and not any(b"PERCENTAGE" in entries for entries in environ)


def test_mps_memory_limit_is_the_share_of_the_device(made: Make) -> None:
    backend = made(memory_limits=True)
    assert backend.open(LaneId.parse("h200-0/0"), 200).env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={143771 // 5}M"


@pytest.mark.parametrize(("protocol", "version"), PROTOCOLS.items())
def test_mps_fault_names_the_lane_that_caused_it_and_others_recover(
    made: Make, monkeypatch: pytest.MonkeyPatch, protocol: int, version: int
) -> None:
    told(monkeypatch, version=version)
    backend = made("h200,h200", protocol=protocol)
    bad, neighbour, other = (
        backend.open(lane, 200).env
        for lane in (LaneId.parse("h200-0/0"), LaneId.parse("h200-0/1"), LaneId.parse("h200-1/0"))
    )
    with fake.client(bad) as one, fake.client(neighbour) as two, fake.client(other) as three:
        for lane, client in (
            (LaneId.parse("h200-0/0"), one),
            (LaneId.parse("h200-0/1"), two),
            (LaneId.parse("h200-1/0"), three),
        ):
            backend.on_worker_started(lane, client.pid)
        assert backend.lost() == {}
        fake.control(bad, f"fault {one.pid}")
        with fake.client(bad) as late:
            assert late.said[0] == "CUDA_ERROR_MPS_SERVER_NOT_READY"
        until(backend.lost)
        assert backend.lost() == {"h200-0": "its MPS server met a fatal error of the GPU, caused by h200-0/0"}
        one.end()
        assert backend.lost()  # the neighbour's process is still there, and so is the faulty server
        two.end()
        until(lambda: not backend.lost())
        with fake.client(bad) as again:
            assert again.said[0] == "CUDA_SUCCESS"


def test_mps_fault_without_a_known_cause_names_the_candidates(made: Make) -> None:
    backend = made()
    env = backend.open(LaneId.parse("h200-0/0"), 500).env
    with fake.client(env) as one, fake.client(env) as stranger:
        backend.on_worker_started(LaneId.parse("h200-0/0"), one.pid)
        fake.control(env, "fault 0")
        until(backend.lost)
        reason = f"its MPS server met a fatal error of the GPU, caused by one of h200-0/0, process {stranger.pid}"
        assert backend.lost() == {"h200-0": reason}


@pytest.mark.parametrize(("options", "version"), [({}, 13000), ({"static": True}, 13010)], ids=["shared", "static"])
def test_mps_workers_end_with_their_server_and_restart_with_the_next(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], version: int
) -> None:
    told(monkeypatch, version=version)
    monkeypatch.setattr(control_driver, "TICK", 0.05)
    backend = made("h200,h200", **options)
    lanes = [LaneId.parse("h200-0/0"), LaneId.parse("h200-1/0")]
    model = graphs.identity(tmp_path / "m.onnx", 2)

    async def scenario() -> None:
        async with pool_of(backend) as (pool, said, _):
            for lane in lanes:
                await pool.start(lane, share=500, models=[model])
                assert await said.next() == ("ready", lane)
            bad, other = (status.pid for status in pool.status())
            fake.control(dict(pool._driver.pool._lanes[LaneId.parse("h200-0/0")].launch.env), f"fault {bad}")
            reason = "h200-0 is lost: its MPS server met a fatal error of the GPU, caused by h200-0/0"
            assert await said.next() == ("died", "h200-0/0", reason)
            pool.run(LaneId.parse("h200-1/0"), 1, "identity", [floats(1, 2)])
            assert (await said.next())[:3] == ("finished", "h200-1/0", 1)
            assert await said.next() == ("ready", "h200-0/0")
            pids = [status.pid for status in pool.status()]
            assert pids[0] != bad and pids[1] == other
            with fake.client(
                dict(pool._driver.pool._lanes[LaneId.parse("h200-0/0")].launch.env)
            ) as client:  # as its worker would be, on a GPU
                assert client.said[0] == "CUDA_SUCCESS"

    asyncio.run(scenario())


def test_gpu_check_of_a_fault_over_the_fake_driver_finds_its_cause(made: Make) -> None:
    """Its programs run over the fake driver; only the fault comes from elsewhere."""
    backend = made()

    def cause(it: check.Client) -> None:
        assert it.said == "132", it.said
        fake.control(environment(it.process.pid), f"fault {it.process.pid}")

    fault = check.watched(backend, cause)
    assert fault.reason == "its MPS server met a fatal error of the GPU, caused by h200-0/0"
    assert "Server is handling a fatal GPU error." in fault.log
    assert fault.next == "132"


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mps_changed_share_starts_another_worker_and_loses_nothing(made: Make, tmp_path: Path, times: int) -> None:
    model = graphs.identity(tmp_path / "m.onnx", 2)
    backend = made()
    changes = asyncio.run(share_change.measure(backend, model, [floats(1, 2)], (200, 500), times))
    assert [(it.before, it.after) for it in changes] == [(200, 500), (500, 200)][:times]
    for it in changes:
        assert it.lost == 0 and it.restarted
        assert 0 < it.ready < it.answered <= it.over


def environment(pid: int) -> dict[str, str]:
    """What a process was started with for MPS."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry.startswith("CUDA_"))


def server_of(root: Path, name: str) -> int:
    return next(it.pid for it in mps_processes() if it.name == name and it.pipe and it.pipe.is_relative_to(root))


@pytest.mark.parametrize(
    ("name", "reason"),
    [(mps_daemon.SERVER, r"its MPS server ended: .*"), (nvidia.CONTROL, r"its MPS control daemon ended: .*")],
)
def test_mps_killed_server_or_daemon_restarts(made: Make, root: Path, name: str, reason: str) -> None:
    backend = made()
    env = backend.open(LaneId.parse("h200-0/0"), 500).env
    with fake.client(env) as client:
        backend.on_worker_started(LaneId.parse("h200-0/0"), client.pid)
        before = fake.left(root)
        os.kill(server_of(root, name), signal.SIGKILL)
        until(backend.lost)
        assert [*backend.lost()] == ["h200-0"]
        assert re.fullmatch(reason, backend.lost()[DeviceId.parse("h200-0")])
        client.end()
    until(lambda: not backend.lost())
    assert not set(before) & set(fake.left(root))  # whatever was left of the old ones went with them
    with fake.client(env) as client:
        assert client.said[0] == "CUDA_SUCCESS"


def test_mps_daemon_with_hidden_environment_is_found_by_its_file(
    made: Make, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = mps_daemon.mps_processes

    def hidden() -> Iterator[mps_daemon.MpsProcess]:
        for it in every():
            if it.pipe and it.pipe.is_relative_to(root):
                yield msgspec.structs.replace(it, pipe=None, devices=None)

    monkeypatch.setattr(mps_daemon, "mps_processes", hidden)
    backend = made()
    daemon = server_of(root, nvidia.CONTROL)
    assert backend._devices[DeviceId.parse("h200-0")].daemon.health_error({}) == ""
    backend.stop()
    assert not mps_daemon.is_alive(daemon)


def test_mps_client_death_costs_no_other_client(made: Make) -> None:
    backend = made()
    env = backend.open(LaneId.parse("h200-0/0"), 500).env
    with fake.client(env) as one, fake.client(env) as two:
        backend.on_worker_started(LaneId.parse("h200-0/0"), one.pid)
        one.end()
        until(lambda: fake.control(env, "get_client_list 0").split() == [str(two.pid)])
        assert backend.lost() == {}


def test_mps_failed_restart_says_why_and_is_retried(made: Make, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "AGAIN", 0.0)
    backend = made()
    told(monkeypatch, refuse="MPS is not supported on this system")
    os.kill(server_of(root, mps_daemon.SERVER), signal.SIGKILL)
    until(lambda: "MPS does not start" in backend.lost().get(DeviceId.parse("h200-0"), ""))
    assert (
        "its server ended: MPS is not supported on this system; in a container, MPS needs"
        in backend.lost()[DeviceId.parse("h200-0")]
    )
    told(monkeypatch)
    until(lambda: not backend.lost())


@pytest.mark.parametrize(("protocol", "version"), [(2, 13010), (3, 13040)])
def test_mps_static_partitions_are_reserved_and_inherited(
    made: Make, monkeypatch: pytest.MonkeyPatch, protocol: int, version: int
) -> None:
    told(monkeypatch, version=version)
    backend = made(protocol=protocol, static=True)
    (kind,) = backend.fleet()
    assert kind.cuts[:2] == (62, 125) and kind.cuts[-1] == 1000 and len(kind.cuts) == 16  # of 8 multiprocessors each
    env = backend.open(LaneId.parse("h200-0/0"), 500).env
    assert env["CUDA_MPS_SM_PARTITION"].startswith(uuid(0) + "/")
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in env
    with fake.client(env) as client:
        assert client.said == ["CUDA_SUCCESS", "-", env["CUDA_MPS_SM_PARTITION"]]
    assert not backend.divides
    second = LaneId.parse("h200-0/0.2")
    assert backend.open(second, 500).env == env  # another worker of the same partition
    backend.close(second)
    backend.open(LaneId.parse("h200-0/1"), 438)
    with pytest.raises(DeviceError, match=r"^MPS gives no partition of 2 chunks .*CUDA_ERROR_INVALID_RESOURCE_CONFIG"):
        backend.open(LaneId.parse("h200-0/2"), 125)
    backend.close(LaneId.parse("h200-0/1"))
    backend.open(LaneId.parse("h200-0/2"), 125)
    backend.close(LaneId.parse("h200-0/2"))
    lasting = backend.open(LaneId.parse("h200-0/3"), 500, leaving=[LaneId.parse("h200-0/0")]).env
    assert lasting["CUDA_MPS_SM_PARTITION"] != env["CUDA_MPS_SM_PARTITION"]  # there was room
    inherited = backend.open(LaneId.parse("h200-0/4"), 500, leaving=[LaneId.parse("h200-0/0")]).env
    assert inherited["CUDA_MPS_SM_PARTITION"] == env["CUDA_MPS_SM_PARTITION"]
    backend.close(LaneId.parse("h200-0/0"))
    with fake.client(inherited) as client:
        assert client.said[0] == "CUDA_SUCCESS"
    with pytest.raises(DeviceError, match=r"^MPS gives no partition of 8 chunks"):
        backend.open(LaneId.parse("h200-0/5"), 500, leaving=[LaneId.parse("h200-0/0")])


REJECTED: dict[str, tuple[str, dict[str, Any], dict[str, object], str]] = {
    "MIG": ("h200-mig=1g.18gb", {}, {}, r"MIG is on; its instances are for the backend mig$"),
    "Volta": (
        "v100",
        {"static": True},
        {"version": 13010},
        r"static partitions need Ampere or newer \(.* this is 7\.0",
    ),
    "13.0": ("h200", {"static": True}, {}, r"need the MPS of CUDA 13\.1 \(13010; this is 13000\); leave them off$"),
    "protocol": ("h200", {"protocol": 3}, {}, r"-control -d -p 3` ended with status 1: invalid option"),
    "rights": ("h200", {}, {"refuse": "Operation not permitted"}, r"ended: Operation not permitted; in a container"),
}


@pytest.mark.parametrize(("gpus", "options", "so", "reason"), REJECTED.values(), ids=REJECTED)
def test_mps_unsupported_configuration_is_rejected(
    made: Make,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: str,
    options: dict[str, Any],
    so: dict[str, object],
    reason: str,
) -> None:
    told(monkeypatch, **so)
    with pytest.raises(DeviceError, match=reason) as error:
        made(gpus, **options)
    assert uuid(0) in str(error.value) and "\n" not in str(error.value)
    assert not fake.left(root) and not list(root.iterdir())


def test_mps_one_unsuitable_gpu_leaves_no_daemon_on_the_others(made: Make, root: Path) -> None:
    with pytest.raises(DeviceError, match=rf"^h200-mig-0 \({uuid(1)}\): MIG is on"):
        made("h200,h200-mig=1g.18gb")
    assert not fake.left(root)


def test_mps_exclusive_gpu_in_use_is_an_error(made: Make, tmp_path: Path) -> None:
    (tmp_path / "state").write_text(f"mode 0 3\nprocess 0 {os.getpid()} 1000\n")
    with pytest.raises(
        DeviceError, match=rf"its compute mode lets one process in, and {os.getpid()} .*is there; end it$"
    ):
        made()
    (tmp_path / "state").write_text("mode 0 3\n")  # as NVIDIA advises for MPS
    made()


def test_mps_server_that_never_starts_is_an_error(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, silent=True)
    monkeypatch.setattr(mps_daemon, "PATIENCE", 0.3)
    with pytest.raises(DeviceError, match=r"it has no server after 0\.3 s: "):
        made()


def test_mps_share_below_one_sm_or_unknown_device_is_rejected(made: Make) -> None:
    backend = made()
    with pytest.raises(DeviceError, match=r"^0\.7 % of h200-0 is less than one of its 132 multiprocessors; give more$"):
        backend.open(LaneId.parse("h200-0/0"), 7)
    with pytest.raises(DeviceError, match=r"^'a100-0/0' is on no device of h200-0$"):
        backend.open(LaneId.parse("a100-0/0"), 500)


def test_mps_unusable_directory_is_an_error(root: Path) -> None:
    with pytest.raises(DeviceError, match=r"/nowhere: No such file or directory; name another with `directory`$"):
        Mps([], directory=Path("/nowhere"))
    long = root / ("x" * 100)
    long.mkdir()
    with pytest.raises(DeviceError, match=r"is too long a name for the sockets of MPS; name a shorter one"):
        Mps([], directory=long)
    assert not list(long.iterdir())


@pytest.mark.parametrize(
    ("devices", "sees"),
    [(None, True), ((uuid(0),), True), ((uuid(0)[:12],), True), (("0", "3"), True), ((uuid(1),), False), ((), False)],
)
def test_mps_process_sees_its_visible_devices(
    machine: Callable[[str], tuple[nvidia.Gpu, ...]], devices: tuple[str, ...] | None, sees: bool
) -> None:
    (gpu,) = machine("h200")
    gpu = msgspec.structs.replace(gpu, uuid=uuid(0))
    assert mps_daemon.MpsProcess(1, nvidia.CONTROL, None, devices).sees(gpu) == sees


@pytest.mark.parametrize(("device", "taken"), [(0, True), (1, False)])
def test_mps_other_daemon_on_the_same_gpu_is_an_error(made: Make, root: Path, device: int, taken: bool) -> None:
    pipe = root.parent / "p"
    pipe.mkdir()
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_VISIBLE_DEVICES": uuid(device)}
    subprocess.run([nvidia.CONTROL, "-d"], env=os.environ | env, check=True)
    try:
        if taken:
            with pytest.raises(
                DeviceError, match=rf"the MPS control daemon \d+ \(its pipes are in {pipe}\) has this GPU"
            ):
                made()
        else:
            made()
    finally:
        fake.cleared(pipe)


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_mps_daemon_outside_the_container_is_an_error(
    made: Make, root: Path, monkeypatch: pytest.MonkeyPatch, kind: socket.SocketKind
) -> None:
    pipe = root.parent / "p"
    pipe.mkdir()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipe))
    made().stop()  # nobody listens there
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(str(pipe / "control"))
        listener.listen()
        with pytest.raises(DeviceError, match=rf"not of this container answers at {pipe}; end it, or start this cont"):
            made()


OWNER = """
import sys
from pathlib import Path
from cotenant.backends import mps, nvidia
backend = mps.Mps(nvidia.list_gpus(), directory=Path(sys.argv[1]))
print(backend.lost(), flush=True)
sys.stdin.read()
"""


def owner(root: Path) -> subprocess.Popen[str]:
    """A process with an Mps on a GPU, until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(root)],
        env=os.environ | fitted("h200"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "{}\n"
    return process


def test_mps_process_exit_leaves_nothing(root: Path) -> None:
    process = owner(root)
    assert fake.left(root)
    process.communicate()
    assert process.returncode == 0
    assert not fake.left(root) and not list(root.iterdir())


def test_mps_leftovers_of_a_killed_process_are_ended_by_the_next(made: Make, root: Path) -> None:
    """Its daemon would otherwise have the GPU for good."""
    process = owner(root)
    process.kill()
    process.communicate()
    old, folders = fake.left(root), list(root.iterdir())
    assert len(old) == 2 and len(folders) == 1
    os.kill(server_of(root, mps_daemon.SERVER), signal.SIGKILL)
    made()
    assert not set(old) & set(fake.left(root)) and not folders[0].exists()


def test_mps_directory_in_use_by_another_process_is_left_alone(made: Make, root: Path) -> None:
    process = owner(root)
    (folder,) = root.iterdir()
    with pytest.raises(DeviceError, match=r"^h200-0 .* the MPS control daemon \d+ \(its pipes .*\) has this GPU"):
        made("h200,h200")
    made(only=[1]).stop()
    assert folder.exists() and len(fake.left(root)) == 2
    process.communicate()


def test_mps_unresponsive_daemon_is_killed(made: Make, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, deaf=True)
    monkeypatch.setattr(mps_daemon, "LINGER", 0.1)
    backend = made()
    assert fake.left(root)
    backend.stop()
    assert not fake.left(root)
