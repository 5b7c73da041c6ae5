"""A server in a process of its own, the commands that talk to it, and every way that it can end."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.cli.conftest import fill
from tests.cli.program import (
    INTERRUPT,
    KILL,
    PATIENCE,
    TERMINATE,
    Program,
    Served,
    alive,
    serving,
    started,
    until,
    workers_of,
)


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for tests that leave it as they found it, which it shows by ending as usual, without a word."""
    folder = tmp_path_factory.mktemp("shared")
    fill(folder, models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with serving(folder) as server:
            yield server
            assert server.end(INTERRUPT) == (130, "", "")


def test_serve_under_load_reports_status_and_replays(program: Program, folder: Path) -> None:
    with serving(folder, "--event-log", "events.jsonl") as server:
        assert server.plan.rate("identity") == 20
        said = program("loadtest", "--address", server.address, "--duration", "1", "--json")
        assert not said.err
        report = {row["model"]: row for row in json.loads(said.out)["models"]}
        assert set(report) == {"identity", "lookup"}
        served = report["identity"]["outcomes"]["served"]
        assert served > 0 and report["identity"]["outcomes"]["failed"] == 0

        table = program("loadtest", "-a", f"http://{server.address}/", "--duration", "0.5", "--rate", "identity=20")
        assert "identity" in table.out and "lookup" not in table.out

        status = json.loads(program("status", "--address", server.address, "--json").out)
        assert status["statistics"]["identity"]["outcomes"]["served"] >= served
        serving_pids = {worker["pid"] for worker in status["workers"]}
        assert serving_pids and serving_pids <= set(server.workers)  # others are started ahead of need
        shown = program("status", "--address", server.address)
        for word in ("identity", "READY", "broken", "UNAVAILABLE", "cpu-0/0"):
            assert word in shown.out
        assert program.refuses("loadtest", "--address", server.address, "--rate", "nobody=1").startswith(
            "--rate nobody=1: no model"
        )
        assert server.end(INTERRUPT).code == 130
    replayed = json.loads(program("replay", "events.jsonl", "--json").out)
    assert replayed["identical"]
    ends = {(end["model"], end["outcome"]): end["count"] for end in replayed["outcomes"]}
    assert ends["identity", "served"] == status["statistics"]["identity"]["outcomes"]["served"]

    log = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    cut = [*log[:3], log[3].rstrip("\n")[:-5]]
    (folder / "cut.jsonl").write_text("".join(cut))  # as a full disk does
    said = program("replay", "cut.jsonl", "--json")
    assert json.loads(said.out)["identical"] and said.err == "cut.jsonl: the last line was cut off, and is left out\n"
    (folder / "cut.jsonl").write_text("".join([*cut, "\n", *log[4:]]))
    assert program.refuses("replay", "cut.jsonl").startswith("cut.jsonl:4: not a line of an event log: ")
    (folder / "without.jsonl").write_text("".join([log[0], *log[2:]]))
    said = program("replay", "without.jsonl")
    assert said.code == 1 and "differs at without.jsonl:" in said.out


def test_serve_without_json_shows_addresses_and_broken_models(folder: Path) -> None:
    process = started(folder, "serve", "serve.toml")
    assert process.stdout is not None
    shown = ""
    while "Ctrl-C stops" not in shown:
        line = process.stdout.readline()
        assert line, process.communicate()
        shown += line
    assert "serving HTTP at http://127.0.0.1:" in shown
    process.send_signal(INTERRUPT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    said = " ".join(err.split())
    assert said.startswith("not served: broken: models/broken/1/model.onnx: no ONNX model: "), err


CLIMBERS = ["%2E%2E", "..%2F..", "..", "%2E%2E%2F%2E%2E%2Fetc", "identity%2F1", "a%00b", ".", "%20", "nobody"]


def test_bad_requests_are_explained_and_leave_the_server_working(server: Served) -> None:
    for name in CLIMBERS:
        for verb in ("load", "unload"):
            status, answer = server.ask("POST", f"/v2/repository/models/{name}/{verb}", {})
            if verb == "load":
                assert status >= 400 and "is one of its folders" in answer["error"], (name, answer)
        status, answer = server.ask("POST", f"/v2/models/{name}/infer", {"inputs": []})
        assert status in (400, 404) and answer["error"]
    assert server.works()

    status, answer = server.ask("POST", "/v2/repository/models/broken/load", {})
    assert status == 500
    assert answer["error"].startswith("failed to load 'broken': models/broken/1/model.onnx: no ONNX model")
    status, answer = server.ask("POST", "/v2/models/broken/infer", {})
    assert (status, answer["error"][:42]) == (404, "model 'broken' cannot be served: models/br")

    for wrong, code, message in (
        (b"x", 500, "not an inference request: JSON is malformed"),
        ({}, 500, "not an inference request: Object missing required field `inputs`"),
        ({"inputs": []}, 400, "model 'identity' takes 1 inputs, but 'x' is missing"),
        (one(shape=[1, 3], data=[1, 2, 3]), 400, "input 'x' has shape [1, 3], but model 'identity' takes [-1, 16]"),
        (one(data=[1, 2, 3]), 500, "input 'x': 'data' has 3 elements, but shape [1, 16] has 16"),
        (one(name="z"), 400, "'z'"),
        (one(datatype="INT8"), 400, "INT8"),
        (one(datatype="NONE"), 400, "NONE"),
        (one(shape=[-1, 16]), 500, "Expected `int` >= 0 - at `$.inputs[0].shape[0]`"),
        (one(shape=[10**30, 16]), 500, "Expected `int` <= 1099511627776 - at `$.inputs[0].shape[0]`"),
    ):
        status, answer = server.ask("POST", "/v2/models/identity/infer", wrong)
        assert (status, message in answer["error"]) == (code, True), (wrong, status, answer)
    # The model itself fails on this one.
    index = {"name": "x", "datatype": "INT64", "shape": [1, 1], "data": [9]}
    status, answer = server.ask("POST", "/v2/models/lookup/infer", {"inputs": [index]})
    assert status == 500 and "indices element out of data bounds" in answer["error"]
    assert server.works()


@contextmanager
def in_flight(server: Served) -> Iterator[list[HTTPConnection]]:
    """Two requests that were accepted and not answered; no worker of the server may run."""
    connections = [HTTPConnection(server.address, timeout=PATIENCE) for _ in range(2)]
    for connection in connections:
        connection.request("POST", "/v2/models/identity/infer", json.dumps(one()))
        waiting(server)  # once that is answered, the request has been read: two that are read at once are one batch
    until(lambda: waiting(server) == 1)  # the other is a batch
    yield connections
    for connection in connections:
        connection.close()


def waiting(server: Served) -> float:
    """The number of queued requests."""
    with closing(HTTPConnection(server.address, timeout=PATIENCE)) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("cotenant_queue_length{"))


def one(**changes: object) -> dict[str, object]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [1] * 16} | changes]}


def test_served_models_survive_changes_of_the_repository(folder: Path) -> None:
    repository = folder / "own"
    shutil.copytree(folder / "models", repository)
    with serving(folder, "--model-repository", "own") as server:
        file = repository / "lookup" / "1" / "model.onnx"
        content = file.read_bytes()
        file.write_bytes(b"in the middle of a copy")
        assert server.ask("POST", "/v2/repository/models/identity/load", {})[0] == 200, "lookup stays as it is"
        status, answer = server.ask("POST", "/v2/repository/models/lookup/load", {})
        assert status == 500 and "lookup/1/model.onnx: no ONNX model: " in answer["error"]
        shutil.rmtree(repository / "lookup")
        assert server.ask("POST", "/v2/repository/models/identity/load", {})[0] == 200
        status, answer = server.ask("POST", "/v2/repository/models/lookup/load", {})
        assert status == 500 and "'lookup' has settings, but is not in own" in answer["error"]
        assert ready(server) == {"identity", "lookup"} and server.works()
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        assert server.ask("POST", "/v2/repository/models/identity/load", {})[0] == 200
        assert ready(server) == {"identity", "lookup"}

        assert server.ask("POST", "/v2/repository/models/lookup/unload", {})[0] == 200
        file.write_bytes(b"in the middle of a copy")
        assert server.ask("POST", "/v2/repository/models/identity/load", {})[0] == 200
        index = server.ask("POST", "/v2/repository/index", {})[1]
        assert sorted(entry["name"] for entry in index) == ["broken", "identity", "lookup"]
        assert [entry["reason"] for entry in index if entry["name"] == "lookup"] == ["unloaded"]
        file.unlink()  # so that the repository itself knows of no version to serve
        assert server.ask("POST", "/v2/repository/models/identity/load", {})[0] == 200
        index = server.ask("POST", "/v2/repository/index", {})[1]
        assert sorted(entry["name"] for entry in index) == ["broken", "identity", "lookup"]
        (reason,) = [entry["reason"] for entry in index if entry["name"] == "lookup"]
        assert "model.onnx" in reason


def test_models_loaded_at_once_are_all_served(server: Served) -> None:
    with ThreadPoolExecutor() as threads:

        def change(verb: str) -> list[int]:
            paths = [f"/v2/repository/models/{name}/{verb}" for name in ("identity", "lookup", "identity")]
            return [status for status, _ in threads.map(lambda path: server.ask("POST", path, {}), paths)]

        assert change("unload") == [200, 200, 200]
        assert ready(server) == set()
        assert change("load") == [200, 200, 200]
        assert ready(server) == {"identity", "lookup"} and server.works()


def ready(server: Served) -> set[str]:
    return {entry["name"] for entry in server.ask("POST", "/v2/repository/index", {"ready": True})[1]}


def test_full_disk_under_the_event_log_ends_the_log_alone(folder: Path) -> None:
    with serving(folder, "--event-log", "/dev/full") as server:
        for _ in range(300):
            assert server.works()
        said = server.end(INTERRUPT)
    assert (said.code, said.out) == (130, "")
    assert [line.partition("Z ")[2] for line in said.err.splitlines()] == [
        "ERROR: the event log ends here, and cannot be replayed further: No space left on device",
        "ERROR: the event log /dev/full is incomplete: No space left on device",
    ]


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_drains_and_is_the_usual_end(folder: Path, processes: int) -> None:
    """A SIGHUP meanwhile, as of a terminal that is closed, changes nothing, in the server or in its workers."""
    text = (folder / "serve.toml").read_text().replace("5s", "10min").replace('"2s"', '"10min"')
    (folder / "serve.toml").write_text(f"http_processes = {processes}\n{text}")
    with serving(folder) as server:
        assert server.works()
        # One that is started ahead of need may not ignore signals yet.
        workers = [worker["pid"] for worker in server.ask("GET", "/cotenant/status")[1]["workers"]]
        assert workers and all(alive(pid) for pid in workers)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        with in_flight(server) as requests:
            server.process.send_signal(TERMINATE)
            until(lambda: server.ask("GET", "/v2/health/ready")[0] != 200)
            for pid in (server.process.pid, *workers):
                os.kill(pid, signal.SIGHUP)
            for pid in workers:
                os.kill(pid, signal.SIGCONT)
            assert [request.getresponse().status for request in requests] == [200, 200]
        assert server.end() == (0, "", "")


def test_sigterm_while_a_server_starts_is_the_usual_end(folder: Path) -> None:
    process = started(folder, "serve", "serve.toml", "--json")
    until(lambda: bool(workers_of(process.pid)))
    process.send_signal(TERMINATE)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")


def test_second_signal_stops_at_once(folder: Path) -> None:
    """However long the grace, and however stuck the workers."""
    text = (folder / "serve.toml").read_text()
    (folder / "serve.toml").write_text(text.replace("5s", "10min").replace('"2s"', '"10min"'))
    with serving(folder) as server:
        for pid in server.workers:
            os.kill(pid, signal.SIGSTOP)
        with in_flight(server):
            server.process.send_signal(INTERRUPT)
            until(lambda: server.ask("GET", "/v2/health/ready")[0] != 200)
            assert server.end(INTERRUPT) == (130, "", "")


def test_workers_of_a_killed_server_end(folder: Path) -> None:
    with serving(folder) as server:
        assert server.workers
        server.process.send_signal(KILL)
        server.process.wait(PATIENCE)
        until(lambda: not any(alive(pid) for pid in server.workers))


def test_server_interrupted_while_it_starts_leaves_nothing(folder: Path) -> None:
    process = started(folder, "serve", "serve.toml", "--json")
    workers: list[int] = []

    def starting() -> bool:
        assert process.poll() is None, process.communicate()
        workers[:] = workers_of(process.pid)
        return bool(workers)

    until(starting)
    process.send_signal(INTERRUPT)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (130, "")
    until(lambda: not any(alive(pid) for pid in workers))


def test_two_servers_of_one_repository_are_independent(folder: Path, server: Served) -> None:
    with serving(folder) as other:
        assert server.works() and other.works()
        assert other.end(INTERRUPT).code == 130
        assert server.works()
