"""System shared memory of callers: through the stock clients, and what a hostile or careless one gets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

import cotenant
from cotenant.app.serving import BackgroundServer
from cotenant.errors import InvalidError, NotFoundError, UnavailableError, UnsupportedError
from cotenant.live import codec, preparation
from cotenant.live.grpc import inference as grpc_inference
from cotenant.live.http import request_cycle
from cotenant.live.limits import MAX_REGIONS, MemoryBudget
from cotenant.live.shared_memory import OutputRegion, SharedMemory, SharedTensors
from cotenant.worker.arena import Arena
from tests.cli.conftest import SERVE
from tests.live.deployment import csv, repository

ROWS = 512  # of 16 floats: 32 KiB, which go through the workers' memory
SIZE = ROWS * 16 * 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundServer]:
    folder = tmp_path_factory.mktemp("shared")
    root = repository(folder / "models")
    (root / "lookup" / "config.pbtxt").write_text('model_warmup { inputs { key: "x" value { dims: [2] } } }')
    (root / "identity" / "config.pbtxt").write_text("max_batch_size: 1024")
    (folder / "profiles.csv").write_text(csv())
    (folder / "serve.toml").write_text("allow_client_shm = true\n" + SERVE.replace('"2s"', '"30s"'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with cotenant.serve(folder / "serve.toml", models=["identity"]) as server:
            yield server


@pytest.fixture(params=[triton_http, triton_grpc])
def client(request: pytest.FixtureRequest, server: BackgroundServer) -> Iterator[tuple[Any, Any]]:
    module = request.param
    address = server.addresses.http if module is triton_http else server.addresses.grpc
    client = module.InferenceServerClient(address)
    yield client, module
    client.unregister_system_shared_memory()
    client.close()


@pytest.fixture
def regions() -> Iterator[tuple[Any, Any, str]]:
    """Two regions, for inputs and outputs, with a name that nobody else has."""
    name = f"cotenant-test-{uuid.uuid4().hex}"
    handles = [shm.create_shared_memory_region(f"{kind}", f"/{name}-{kind}", 2 * SIZE) for kind in ("in", "out")]
    yield *handles, name
    for handle in handles:
        shm.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("rows", [2, ROWS])
def test_inputs_and_outputs_in_shared_memory(client: tuple[Any, Any], regions: tuple[Any, Any, str], rows: int) -> None:
    (asking, module), (inputs, outputs, name) = client, regions
    values = np.random.default_rng(rows).random((rows, 16), dtype=np.float32)
    offset = 64
    shm.set_shared_memory_region(inputs, [values], offset=offset)
    asking.register_system_shared_memory("in", f"/{name}-in", 2 * SIZE)
    asking.register_system_shared_memory("out", f"/{name}-out", 2 * SIZE)
    given = module.InferInput("x", (rows, 16), "FP32")
    given.set_shared_memory("in", values.nbytes, offset=offset)
    wanted = module.InferRequestedOutput("y")
    wanted.set_shared_memory("out", values.nbytes, offset=128)
    for _ in range(3):
        answer = asking.infer("identity", [given], outputs=[wanted])
        output = answer.get_output("y")
        if module is triton_http:
            assert "data" not in output and output["parameters"]["shared_memory_region"] == "out"
        else:
            assert output.parameters["shared_memory_region"].string_param == "out"
            assert not answer.get_response().raw_output_contents
        got = shm.get_contents_as_numpy(outputs, np.float32, (rows, 16), offset=128)
        assert got.tolist() == values.tolist()
        values = values + 1
        shm.set_shared_memory_region(inputs, [values], offset=offset)
    status = asking.get_system_shared_memory_status()
    names = {entry["name"] for entry in status} if isinstance(status, list) else set(status.regions)
    assert names == {"in", "out"}
    asking.unregister_system_shared_memory("in")
    with pytest.raises(InferenceServerException, match="no shared memory region 'in' is registered"):
        asking.infer("identity", [given])
    extensions = asking.get_server_metadata()
    extensions = extensions["extensions"] if isinstance(extensions, dict) else extensions.extensions
    assert "system_shared_memory" in extensions


def test_large_tensors_are_copied_beside_the_event_loop(
    client: tuple[Any, Any], regions: tuple[Any, Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (asking, module), (inputs, outputs, name) = client, regions
    threads: dict[str, set[int]] = {"copy": set(), "write": set(), "reserve": set()}

    def spied(owner: type, method: str) -> None:
        call = getattr(owner, method)

        def spy(self: Any, *args: Any) -> Any:
            threads[method].add(threading.get_ident())
            return call(self, *args)

        monkeypatch.setattr(owner, method, spy)

    spied(SharedTensors, "copy")
    spied(OutputRegion, "write")
    spied(SharedMemory, "reserve")
    for part in (preparation, request_cycle, codec, grpc_inference):
        monkeypatch.setattr(part, "MAX_AT_ONCE", SIZE - 1)
    asking.register_system_shared_memory("in", f"/{name}-in", 2 * SIZE)
    asking.register_system_shared_memory("out", f"/{name}-out", 2 * SIZE)
    values = np.random.default_rng(1).random((ROWS, 16), dtype=np.float32)
    shm.set_shared_memory_region(inputs, [values])
    given = module.InferInput("x", (ROWS, 16), "FP32")
    given.set_shared_memory("in", SIZE)
    wanted = module.InferRequestedOutput("y")
    wanted.set_shared_memory("out", SIZE)
    asking.infer("identity", [given], outputs=[wanted])
    assert shm.get_contents_as_numpy(outputs, np.float32, (ROWS, 16)).tolist() == values.tolist()
    (loop,) = threads["reserve"]
    assert threads["copy"] and threads["write"] and loop not in threads["copy"] | threads["write"]
    # What goes wrong there is an answer as well.
    os.truncate(f"/dev/shm/{name}-in", 64)  # noqa: S108
    with pytest.raises(InferenceServerException, match="'in' is smaller than it was registered"):
        asking.infer("identity", [given], outputs=[wanted])
    os.truncate(f"/dev/shm/{name}-in", 2 * SIZE)  # noqa: S108
    os.truncate(f"/dev/shm/{name}-out", 64)  # noqa: S108
    with pytest.raises(InferenceServerException, match="'out' is smaller than it was registered"):
        asking.infer("identity", [given], outputs=[wanted])


def test_tensors_of_shared_memory_and_bodies_have_one_budget(
    server: BackgroundServer, client: tuple[Any, Any], regions: tuple[Any, Any, str]
) -> None:
    (asking, module), (inputs, _, name) = client, regions
    values = np.ones((ROWS, 16), np.float32)
    shm.set_shared_memory_region(inputs, [values])
    asking.register_system_shared_memory("in", f"/{name}-in", 2 * SIZE)
    given = module.InferInput("x", (ROWS, 16), "FP32")
    given.set_shared_memory("in", SIZE)
    memory = server._server._server.shared_memory
    budget = memory._budget
    held = budget.total - budget.used - SIZE // 2  # as bodies would
    budget.used += held
    try:
        with pytest.raises(InferenceServerException, match="take too much memory now"):
            asking.infer("identity", [given])
        budget.used += SIZE  # as tensors of shared memory would
        with triton_http.InferenceServerClient(server.addresses.http) as other:
            plain = triton_http.InferInput("x", (1, 16), "FP32")
            plain.set_data_from_numpy(np.ones((1, 16), np.float32))
            with pytest.raises(InferenceServerException, match="bodies of all requests take too much memory"):
                other.infer("identity", [plain])
        budget.used -= SIZE
    finally:
        budget.used -= held
    assert asking.infer("identity", [given]).as_numpy("y").tolist() == values.tolist()


def test_tensors_of_shared_memory_go_beside_tensors_of_the_message(
    client: tuple[Any, Any], regions: tuple[Any, Any, str]
) -> None:
    (asking, module), (inputs, _, name) = client, regions
    values = np.ones((2, 16), np.float32)
    shm.set_shared_memory_region(inputs, [values])
    asking.register_system_shared_memory("in", f"/{name}-in", 2 * SIZE)
    given = module.InferInput("x", (2, 16), "FP32")
    given.set_shared_memory("in", values.nbytes)
    assert asking.infer("identity", [given]).as_numpy("y").tolist() == values.tolist()


def test_region_that_shrinks_fails_requests_and_kills_nobody(
    client: tuple[Any, Any], regions: tuple[Any, Any, str]
) -> None:
    (asking, module), (_, _, name) = client, regions
    asking.register_system_shared_memory("in", f"/{name}-in", 2 * SIZE)
    asking.register_system_shared_memory("out", f"/{name}-out", 2 * SIZE)
    for rows in (2, ROWS):
        given = module.InferInput("x", (rows, 16), "FP32")
        given.set_shared_memory("in", rows * 64)
        os.truncate(f"/dev/shm/{name}-in", 64)  # noqa: S108
        with pytest.raises(InferenceServerException, match="'in' is smaller than it was registered"):
            asking.infer("identity", [given])
        os.truncate(f"/dev/shm/{name}-in", 2 * SIZE)  # noqa: S108
        wanted = module.InferRequestedOutput("y")
        wanted.set_shared_memory("out", rows * 64)
        os.truncate(f"/dev/shm/{name}-out", 64)  # noqa: S108
        with pytest.raises(InferenceServerException, match="'out' is smaller than it was registered"):
            asking.infer("identity", [given], outputs=[wanted])
        assert Path(f"/dev/shm/{name}-out").stat().st_size == 64  # noqa: S108
        os.truncate(f"/dev/shm/{name}-out", 2 * SIZE)  # noqa: S108
        assert asking.infer("identity", [given], outputs=[wanted]) is not None


@pytest.mark.parametrize(
    ("size", "offset", "reason"),
    [
        (128, 2 * SIZE, "do not lie in shared memory region 'in'"),
        (128, 2 * SIZE - 127, "do not lie in shared memory region 'in'"),
        (64, 0, "64 bytes of shared memory, but FP32 of shape"),
        (1 << 40, 0, "bytes of shared memory, but FP32"),
        (128, 1 << 40, "do not lie in shared memory region 'in'"),
    ],
)
def test_tensor_that_does_not_lie_in_its_region_is_refused(
    client: tuple[Any, Any], regions: tuple[Any, Any, str], size: int, offset: int, reason: str
) -> None:
    (asking, module), (_, _, name) = client, regions
    asking.register_system_shared_memory("in", f"/{name}-in", 2 * SIZE)
    given = module.InferInput("x", (2, 16), "FP32")
    given.set_shared_memory("in", size, offset=offset)
    with pytest.raises(InferenceServerException, match=reason):
        asking.infer("identity", [given])
    inline = module.InferInput("x", (2, 16), "FP32")
    inline.set_data_from_numpy(np.ones((2, 16), np.float32))
    wanted = module.InferRequestedOutput("y")
    wanted.set_shared_memory("in", 127)
    with pytest.raises(InferenceServerException, match="an output of 128 bytes does not fit into 127 bytes"):
        asking.infer("identity", [inline], outputs=[wanted])
    wanted.set_shared_memory("in", 128, offset=2 * SIZE - 1)
    with pytest.raises(InferenceServerException, match="do not lie in shared memory region"):
        asking.infer("identity", [inline], outputs=[wanted])


@pytest.mark.parametrize(
    ("key", "offset", "size", "reason"),
    [
        ("/cotenant-nothing", 0, 64, "cannot be opened: No such file"),
        ("/../etc/passwd", 0, 64, "it is a name, without folders"),
        ("/..", 0, 64, "it is a name, without folders"),
        ("/a/b", 0, 64, "it is a name, without folders"),
        ("", 0, 64, "it is a name, without folders"),
        ("/{name}-in", 0, 2 * SIZE + 1, "the region is to end at"),
        ("/{name}-in", 1, 2 * SIZE, "the region is to end at"),
        ("/{name}-in", 0, 0, "are no shared memory region"),
    ],
)
def test_registration_of_what_is_no_region_is_refused(
    client: tuple[Any, Any], regions: tuple[Any, Any, str], key: str, offset: int, size: int, reason: str
) -> None:
    asking, _ = client
    with pytest.raises(InferenceServerException, match=reason):
        asking.register_system_shared_memory("in", key.format(name=regions[2]), size, offset=offset)


def test_region_is_named_by_programs_of_this_machine_alone(
    server: BackgroundServer, regions: tuple[Any, Any, str]
) -> None:
    """A page under a name that leads here (DNS rebinding) neither registers a region nor reads one that is there."""
    with triton_http.InferenceServerClient(server.addresses.http) as asking:
        asking.register_system_shared_memory("in", f"/{regions[2]}-in", 2 * SIZE)
        place = {"shared_memory_region": "in", "shared_memory_byte_size": 64}
        given = {"name": "x", "datatype": "FP32", "shape": [1, 16], "parameters": place}
        bodies = {
            "/v2/models/identity/infer": {"inputs": [given]},
            "/v2/systemsharedmemory/region/more/register": {"key": f"{regions[2]}-in", "byte_size": 64},
            "/v2/systemsharedmemory/unregister": {},
        }
        for path, body in bodies.items():
            for host, origin, expected in (
                ("evil.example", None, 403),
                ("localhost", "https://evil.example", 403),
                ("localhost", None, 200),
            ):
                connection = http.client.HTTPConnection(server.addresses.http, timeout=60)
                headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
                connection.request("POST", path, json.dumps(body), headers)
                assert connection.getresponse().status == expected, (path, host, origin)
                connection.close()


# Without a server.


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[SharedMemory]:
    (tmp_path / "region").write_bytes(bytes(range(256)) * 256)
    arena = Arena(1 << 20)
    yield SharedMemory(
        enabled=True, allocate=arena.allocate, tensor=1 << 16, budget=MemoryBudget(1 << 17), folder=tmp_path
    )
    gc.collect()
    arena.close()


def test_links_folders_and_devices_are_no_shared_memory(memory: SharedMemory, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("region")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for key in ("link", "folder", "pipe"):
        with pytest.raises(InvalidError, match=r"cannot be opened|is not shared memory"):
            memory.register("r", key, 0, 64)


def open_regions() -> int:
    """Return how many descriptors of this process are of a region; threads of other tests may open others."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found += descriptor.readlink().name == "region"
    return found


def test_regions_have_a_limit_and_close_their_files(memory: SharedMemory) -> None:
    before = open_regions()
    for number in range(MAX_REGIONS):
        memory.register(str(number), "region", 0, 64)
    with pytest.raises(InvalidError, match="the most; unregister some"):
        memory.register("more", "region", 0, 64)
    with pytest.raises(InvalidError, match="is registered already"):
        SharedMemory.register(memory, "0", "region", 0, 64)
    assert len(memory.status()) == MAX_REGIONS and memory.status("7")[0].key == "region"
    assert open_regions() == before + MAX_REGIONS
    with pytest.raises(NotFoundError, match="no shared memory region 'nobody'"):
        memory.status("nobody")
    memory.unregister()
    gc.collect()
    assert open_regions() == before


def test_tensors_that_are_held_have_a_limit(memory: SharedMemory) -> None:
    memory.register("r", "region", 0, 1 << 16)
    with pytest.raises(InvalidError, match="do not lie in"):
        memory.tensors().read("r", 0, (1 << 16) + 1)
    for limit, size in ((100, 101), (1 << 15, (1 << 15) + 1)):
        memory.tensor = limit
        with pytest.raises(InvalidError, match=f"at most {limit} are read"):
            memory.tensors().read("r", 0, size)
    memory.tensor = 1 << 16
    held = [memory.tensors() for _ in range(2)]
    views = [tensors.read("r", 0, 1 << 16) for tensors in held]
    held[0].copy()
    assert held[0].size == 1 << 16 and bytes(views[0][0]) == bytes(range(256)) * 256
    with pytest.raises(UnavailableError, match="take too much memory now"):
        memory.tensors().read("r", 0, 1 << 16)
    held.pop()
    views.pop()
    gc.collect()
    assert memory.tensors().read("r", 256, 1 << 15)[1] is not None


def test_tensor_that_a_thread_drops_last_is_counted_back_on_the_loop(tmp_path: Path) -> None:
    (tmp_path / "region").write_bytes(bytes(1 << 15))
    budget = MemoryBudget(1 << 20)

    async def main() -> None:
        arena = Arena(1 << 20)
        memory = SharedMemory(
            enabled=True,
            allocate=arena.allocate,
            budget=budget,
            loop=asyncio.get_running_loop(),
            folder=tmp_path,
        )
        memory.register("r", "region", 0, 1 << 15)
        held = [memory.tensors().read("r", 0, 1 << 15)]
        await asyncio.to_thread(held.clear)
        await asyncio.sleep(0)
        arena.close()

    asyncio.run(main())
    assert budget.used == 0


def test_memory_that_is_not_enabled_takes_and_gives_nothing(tmp_path: Path) -> None:
    off = SharedMemory(folder=tmp_path)
    for call in (
        lambda: off.register("r", "region", 0, 1),
        lambda: off.tensors().read("r", 0, 1),
        lambda: off.tensors().output("r", 0, 1),
    ):
        with pytest.raises(UnsupportedError, match="allow_client_shm"):
            call()
    assert off.status() == []
