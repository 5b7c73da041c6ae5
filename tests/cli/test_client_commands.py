"""Commands that talk to a running server: models, infer, status."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tests.cli.program import INTERRUPT, PATIENCE, Program, Served, serving, started

REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}]}


def test_models_commands_list_load_and_unload(program: Program, folder: Path) -> None:
    with serving(folder) as server:
        address = ("-a", server.address)

        def states() -> dict[str, str]:
            return {row["name"]: row["state"] for row in json.loads(program("models", "list", *address, "--json").out)}

        assert states() == {"broken": "UNAVAILABLE", "identity": "READY", "lookup": "READY"}
        shown = program("models", "list", *address).out
        assert "broken" in shown and "no ONNX model" in " ".join(shown.split())
        said = program("models", "unload", "lookup", *address)
        assert (said.code, said.out, said.err) == (0, "", "unloaded lookup\n")
        assert states()["lookup"] == "UNAVAILABLE"
        said = program("models", "load", "lookup", *address)
        assert (said.code, said.out, said.err) == (0, "", "loaded lookup\n")
        assert states()["lookup"] == "READY"
        said = program("models", "unload", "lookup", *address, "--json")
        assert (json.loads(said.out)["name"], json.loads(said.out)["state"], said.err) == ("lookup", "UNAVAILABLE", "")
        said = program("models", "load", "lookup", *address, "--json")
        assert json.loads(said.out) == {"name": "lookup", "version": "1", "state": "READY"}
        assert program.refuses("models", "unload", "nobody", *address) == (
            f"no model 'nobody' at {server.address}; it has broken, identity, lookup"
        )
        assert program.refuses("models", "load", "nobody", *address).startswith("failed to load 'nobody': no model")
        (folder / "config.json").write_text('{"max_batch_size": 3}')
        assert program("models", "load", "identity", "--config", "config.json", *address).code == 0
        assert server.ask("GET", "/v2/models/identity/config")[1]["max_batch_size"] == 3
        (folder / "config.json").write_text('{"max_batch": 3}')
        refused = program.refuses("models", "load", "identity", "--config", "config.json", *address)
        assert 'no field named "max_batch"' in refused
        assert program.refuses("models", "load", "identity", "--config", "none.json", *address).startswith(
            "none.json: "
        )


def test_infer_command_takes_json_npy_and_random_inputs(program: Program, folder: Path) -> None:
    (folder / "request.json").write_text(json.dumps(REQUEST))
    np.save(folder / "x.npy", np.full((2, 16), 0.25))
    np.save(folder / "words.npy", np.array(["a"]))
    with serving(folder) as server:

        def outputs(*arguments: str) -> list[dict[str, object]]:
            answer = json.loads(program("infer", "identity", "-a", server.address, "--json", *arguments).out)
            assert answer["model_name"] == "identity"
            found: list[dict[str, object]] = answer["outputs"]
            return found

        y = {"name": "y", "datatype": "FP32"}
        assert outputs("--input", "request.json") == [{**y, "shape": [1, 16], "data": [0.5] * 16}]
        for text in ("x.npy", "x=x.npy"):
            assert outputs("--input", text) == [{**y, "shape": [2, 16], "data": [0.25] * 32}]
        assert outputs("--random", "--seed", "1") == outputs("--random", "--seed", "1") != outputs("--random")
        table = program("infer", "identity", "-a", server.address, "--random").out
        assert "1 x 16" in table and "(16 values)" in table
        _check_rejections(program, server)


def _check_rejections(program: Program, server: Served) -> None:
    for arguments, message in (
        ("identity", "nothing to send to 'identity'; give either --input FILE or --random"),
        ("identity --input x.npy --random", "nothing to send to 'identity';"),
        ("identity --input z=x.npy", "--input z=x.npy: write NAME=FILE.npy; inputs of 'identity' are x"),
        ("identity --input words.npy", "words.npy: input 'x' takes FP32, which cannot hold <U1"),
        ("identity --input profiles.csv", "profiles.csv: is not a NumPy array (.npy) or a JSON request (.json): "),
        ("identity --input nowhere.npy", "nowhere.npy: cannot be read: No such file or directory"),
        ("identity --input request.json --input x.npy", "request.json: a JSON request holds all inputs"),
        ("nobody --random", "unknown model 'nobody'; available: identity, lookup"),
    ):
        message_shown = program.refuses("infer", *arguments.split(), "-a", server.address)
        assert message_shown.startswith(message)


class OtherProgram(BaseHTTPRequestHandler):
    """Answer every request with 501 and a page of HTML."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("command", ["models list", "models load m", "jobs list", "infer m --random", "reload"])
def test_command_to_a_server_of_something_else_says_so_in_one_line(program: Program, command: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), OtherProgram) as other:
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        said = program(*command.split(), "-a", f"127.0.0.1:{other.server_port}")
        other.shutdown()
    assert said.code == 1 and said.err.count("\n") == 1
    assert "the answer is 501 Unsupported method" in said.err and "is --address that of a Cotenant server?" in said.err


def test_status_command_with_watch_repeats_until_interrupted(folder: Path) -> None:
    with serving(folder) as server:
        process = started(folder, "status", "--watch", "--json", "--address", server.address)
        assert process.stdout is not None
        for _ in range(2):
            assert json.loads(process.stdout.readline())["ready"]
        process.send_signal(INTERRUPT)
        _, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, err) == (130, "")


def test_commands_with_an_environment_variable_use_it(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTENANT_ADDRESS", "127.0.0.1:1")
    assert program.refuses("status").startswith("no server answers at '127.0.0.1:1'")
    monkeypatch.setenv("COTENANT_MODEL_REPOSITORY", "nowhere")
    assert program.refuses("serve", "serve.toml").startswith("no model repository at 'nowhere'")
    monkeypatch.setenv("COTENANT_SETTINGS", "serve.toml")
    assert program.refuses("serve").startswith("no model repository at 'nowhere'")
    assert program("plan", "problem.toml").code == 0  # an argument wins over the environment
    monkeypatch.setenv("COTENANT_PLANNER", "best")
    assert program.refuses("serve").startswith("unknown planner 'best'")
    monkeypatch.setenv("COTENANT_LOG_LEVEL", "loud")
    assert "COTENANT_LOG_LEVEL" in program("serve").err


def test_serve_command_with_a_folder_serves_its_models(program: Program, folder: Path) -> None:
    (folder / "empty").mkdir()
    assert program.refuses("serve", "empty").startswith("no model in 'empty' can be served")
    assert program.refuses("plan", "empty").startswith("no model in 'empty' can be served")
