"""Reloading the configuration of a running server, by signal and by command."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.cli.program import TERMINATE, Program, serving, until, workers_of

REJECTED = "reload rejected; keeping the current configuration: "


def test_sighup_with_changed_settings_serves_by_them(folder: Path) -> None:
    file = folder / "serve.toml"
    first = file.read_text()
    with serving(folder) as server:

        def target() -> float:
            status, found = server.ask("GET", "/cotenant/status")
            assert status == 200
            return float(found["targets"]["identity"])

        def changes_to(text: str, expected: float) -> None:
            file.write_text(text)
            server.process.send_signal(signal.SIGHUP)
            until(lambda: target() == expected)

        assert target() == 2
        changes_to(first.replace('"2s"', '"1s"', 1), 1)
        assert server.works()
        for wrong in ("slo = 0", first.replace("[[models]]", "warm_workers = 3\n[[models]]", 1)):
            file.write_text(wrong)
            server.process.send_signal(signal.SIGHUP)
            assert server.process.stderr is not None
            while f"Z ERROR: {REJECTED}" not in (line := server.process.stderr.readline()):
                assert line
            assert ("unknown key 'slo'" in line) != (
                "cannot change while the server runs: warm_workers; restart the server" in line
            ), line
            assert target() == 1
        changes_to(first.replace("rate = 20", "rate = 25"), 2)
        assert server.works()
        _, plan = server.ask("GET", "/cotenant/status")
        assert plan["planned"]["identity"] == 25
        server = server._replace(workers=workers_of(server.process.pid))
        assert server.end(TERMINATE).err.endswith("\nconfiguration reloaded\n")


def test_reload_command_with_changed_settings_serves_by_them(program: Program, folder: Path) -> None:
    file = folder / "serve.toml"
    first = file.read_text()
    with serving(folder) as server:
        command = ("reload", "--address", server.address)
        file.write_text(first.replace('"2s"', '"1s"', 1))
        said = program(*command)
        assert (said.code, said.out, said.err) == (0, "", "configuration reloaded\n")
        status = json.loads(program("status", "-a", server.address, "--json").out)
        assert status["targets"]["identity"] == 1
        file.write_text(first.replace("rate = 20", "rate = -1"))
        assert program.refuses(*command).startswith(f"{REJECTED}serve.toml: models[0].rate: -1 requests/s; a rate is")
        assert f"{REJECTED}serve.toml: models[0].rate: -1" in " ".join(
            program("status", "-a", server.address).out.split()
        )
        file.unlink()
        file.mkdir()
        assert program.refuses(*command) == f"{REJECTED}serve.toml: is a folder now; put the settings file back"
        file.rmdir()
        file.write_text(first)
        rollout = json.loads(program(*command, "--json").out)
        assert rollout["revision"] == rollout["last"][0]["revision"] > status["rollout"]["revision"]
        assert (rollout["last"][0]["reason"], rollout["last"][0]["outcome"]) == ("reload", "completed")
        assert "rejected" not in program("status", "-a", server.address).out
        assert server.works()
        file.write_text(first.replace("rate = 20", "rate = 1e7"))
        assert program(*command).err.startswith("configuration reloaded\nunserved, requests/s: identity 99")


def test_server_whose_output_nobody_reads_any_more_serves_on(program: Program, folder: Path) -> None:
    """As of one whose log goes to a program that has ended."""
    with serving(folder) as server:
        assert server.process.stdout is not None and server.process.stderr is not None
        server.process.stdout.close()
        server.process.stderr.close()
        for _ in range(2):
            assert program("reload", "--address", server.address).code == 0
        assert server.works()
