"""A real server within this process, as a notebook, a test or an operator runs it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import uvloop

import cotenant
from cotenant.backends import Launch
from cotenant.backends.cpu import Cpu
from cotenant.config import ModelSettings
from cotenant.errors import ConfigError, FailedError, InvalidError, NotFoundError, UnavailableError
from tests.cli.program import alive, until, workers_of

ROW = np.arange(16, dtype=np.float32).reshape(1, 16)
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def _no_worker_is_left(folder: Path) -> Iterator[None]:
    path = folder / "serve.toml"
    # What is tested here is not speed; a machine with much to do takes some time to answer.
    path.write_text(path.read_text().replace('"2s"', '"30s"').replace('"5s"', '"60s"'))
    yield
    until(lambda: not any(alive(pid) for pid in workers_of(os.getpid())))
    assert not [thread for thread in threading.enumerate() if thread.name == "cotenant-server"]


def test_serve_stock_clients_and_in_process_calls_get_responses() -> None:
    with cotenant.serve("serve.toml") as server:
        assert server.infer("identity", {"x": ROW})["y"].tolist() == ROW.tolist()
        for client, module in (
            (triton_http.InferenceServerClient(server.addresses.http), triton_http),
            (triton_grpc.InferenceServerClient(server.addresses.grpc), triton_grpc),
        ):
            given = module.InferInput("x", ROW.shape, "FP32")
            given.set_data_from_numpy(ROW)
            assert client.infer("identity", [given]).as_numpy("y").tolist() == ROW.tolist()
            client.close()
        status = server.status()
        assert status.ready and all(worker.memory > 1 << 20 for worker in status.workers)
        assert {entry.name: entry.state for entry in status.models}["identity"] == "READY"
        assert status.statistics["identity"].outcomes["served"] == 3
        assert set(server.deployment.offered) == {"identity", "lookup"}


def test_second_server_leaves_the_event_log_of_the_first_alone(folder: Path) -> None:
    log = folder / "events.jsonl"
    log.write_text("of the run before\n")
    settings = msgspec.structs.replace(cotenant.read_settings(folder / "serve.toml"), event_log=log)
    with cotenant.serve(settings) as server:
        with pytest.raises(ConfigError, match=r"events\.jsonl: another server writes this event log"):
            cotenant.serve(settings).__enter__()
        server.infer("identity", {"x": ROW})
    replayed = cotenant.replay(log.read_bytes().splitlines())
    assert (replayed.difference, replayed.outcomes) == ("", {("identity", "served"): 1})


def test_serve_selected_models_serves_only_those() -> None:
    with cotenant.serve("serve.toml", models=["identity"]) as server:
        assert set(server.deployment.offered) == {"identity"}
        server.load("lookup")
        assert server.infer("lookup", {"x": [[3]]})["y"].shape == (1, 1)
        server.unload("lookup")
        with pytest.raises(UnavailableError):
            server.infer("lookup", {"x": [[3]]})
        with pytest.raises(FailedError, match="failed to load 'nowhere'"):
            server.load("nowhere")


def test_infer_bad_and_late_requests_raise_different_errors() -> None:
    with cotenant.serve("serve.toml") as server:
        with pytest.raises(NotFoundError, match="unknown model 'nobody'"):
            server.infer("nobody", {"x": ROW})
        with pytest.raises(InvalidError, match="is missing"):
            server.infer("identity", {})
        with pytest.raises(InvalidError, match=r"shape \[1, 3\]"):
            server.infer("identity", {"x": [[1, 2, 3]]})
        with pytest.raises(UnavailableError):
            server.infer("identity", {"x": ROW}, timeout=1e-6)
        with pytest.raises(FailedError, match="indices element out of data bounds"):
            server.infer("lookup", {"x": [[9]]})
        assert server.infer("identity", {"x": ROW})["y"].shape == (1, 16)


def test_serve_two_servers_in_one_process_are_independent() -> None:
    with cotenant.serve("serve.toml") as first:
        with cotenant.serve("serve.toml", models=["identity"]) as second:
            assert first.addresses != second.addresses
            for server in (first, second):
                assert server.infer("identity", {"x": ROW})["y"].tolist() == ROW.tolist()
        assert first.infer("identity", {"x": ROW})["y"].tolist() == ROW.tolist()


def test_serve_empty_repository_raises_before_anything_starts(folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(cotenant.ConfigError, match="no model in 'empty' can be served"), cotenant.serve("empty"):
        pytest.fail("it started")


def test_serve_port_in_use_raises_and_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = msgspec.structs.replace(cotenant.read_settings("serve.toml"), http_port=port)
        with pytest.raises(cotenant.ConfigError, match=f":{port}: .*choose another"), cotenant.serve(settings):
            pytest.fail("it started")


class NoRoom(Cpu):
    def open(self, lane: str, share: int, leaving: object = ()) -> Launch:
        raise cotenant.DeviceError("there is no room")


def test_serve_failed_worker_raises_and_leaves_nothing() -> None:
    with pytest.raises(cotenant.WorkerError, match="there is no room"), cotenant.serve("serve.toml", backend=NoRoom()):
        pytest.fail("it started")


def test_serve_requests_during_shutdown_are_answered_or_rejected() -> None:
    answered = threading.Semaphore(0)

    def ask(server: cotenant.BackgroundServer) -> int:
        for count in itertools.count():
            try:
                assert server.infer("identity", {"x": ROW})["y"].tolist() == ROW.tolist()
            except UnavailableError:
                return count
            answered.release()
        raise AssertionError

    with ThreadPoolExecutor(4) as threads:
        with cotenant.serve("serve.toml") as server:
            counts = [threads.submit(ask, server) for _ in range(4)]
            for _ in range(20):
                assert answered.acquire(timeout=PATIENCE)
        assert sum(count.result(PATIENCE) for count in counts) >= 20


def test_serve_exception_in_the_block_still_drains(folder: Path) -> None:
    with ThreadPoolExecutor() as threads, ExitStack() as expected:
        expected.enter_context(pytest.raises(ZeroDivisionError))
        with cotenant.serve("serve.toml") as server:
            workers = [worker.pid for worker in server.status().workers if worker.pid]
            for pid in workers:
                os.kill(pid, signal.SIGSTOP)
            answer = threads.submit(server.infer, "identity", {"x": ROW})
            until(lambda: server._server._server._driver.in_flight == 1)
            threads.submit(resume_when_it_drains, server, workers)
            raise ZeroDivisionError
    assert answer.result(PATIENCE)["y"].tolist() == ROW.tolist()


def resume_when_it_drains(server: cotenant.BackgroundServer, workers: list[int]) -> None:
    until(lambda: not server.status().ready)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)


def test_serve_use_after_the_block_raises() -> None:
    with cotenant.serve("serve.toml", models=["identity"]) as server:
        pass
    with pytest.raises(UnavailableError, match="its `with` block is over"):
        server.status()


def test_reload_changed_settings_apply_and_fixed_ones_are_rejected(folder: Path) -> None:
    settings = cotenant.read_settings("serve.toml")
    with cotenant.serve(settings, models=["identity"]) as server:
        models = tuple(msgspec.structs.replace(model, slo=20.0) for model in settings.models)
        server.reload(msgspec.structs.replace(settings, models=models))
        assert server.status().targets == {"identity": 20.0, "lookup": 20.0}
        with pytest.raises(cotenant.ConfigError, match="cannot change while the server runs: grace"):
            server.reload(msgspec.structs.replace(settings, grace=1.0))
        with pytest.raises(cotenant.ConfigError, match="'nobody' has settings"):
            server.reload(msgspec.structs.replace(settings, models=(ModelSettings(name="nobody"),)))
        assert server.status().targets == {"identity": 20.0, "lookup": 20.0}
        assert server.infer("identity", {"x": ROW})["y"].shape == (1, 16)


def test_serve_async_runs_in_the_event_loop_of_the_caller() -> None:
    told: list[tuple[str, int, int]] = []

    async def main() -> None:
        async with cotenant.serving("serve.toml", progress=lambda *point: told.append(point)) as server:
            answers = await asyncio.gather(*(server.infer("identity", {"x": ROW + n}) for n in range(8)))
            assert [answer["y"][0, 0] for answer in answers] == list(range(8))
            *staying, leaving = [asyncio.ensure_future(server.infer("identity", {"x": ROW})) for _ in range(20)]
            await asyncio.sleep(0)
            leaving.cancel()  # it waits behind the others
            with pytest.raises(asyncio.CancelledError):
                await leaving
            await asyncio.gather(*staying)
            status = await server.status()
            assert status.statistics["identity"].outcomes["cancelled"] == 1

    uvloop.run(asyncio.wait_for(main(), PATIENCE))
    assert told == []  # profiles were given
