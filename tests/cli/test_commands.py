"""Commands are imported once they are used."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cotenant.cli.commands import COMMANDS, load_command
from cotenant.core import units
from tests.cli.program import Program

# What takes long to import, and what a user waits for before anything is printed.
SLOW = {"numpy", "onnxruntime", "highspy", "uvloop", "matplotlib"}
IMPORTED = """
import json, sys
sys.argv = ["cotenant", *sys.argv[1:]]
from cotenant.cli import main
try:
    main()
except SystemExit:
    print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


def imported(*arguments: str) -> tuple[str, set[str]]:
    """What a command prints, and the modules that it has imported by then."""
    done = subprocess.run([sys.executable, "-c", IMPORTED, *arguments], capture_output=True, text=True, check=True)
    *said, modules = done.stdout.splitlines()
    return "\n".join(said), set(json.loads(modules))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_summary_of_a_command_is_what_its_docstring_says(name: str) -> None:
    summary, place = COMMANDS[name]
    first, *_ = inspect.cleandoc(load_command(name, place).help).split("\n\n")
    assert " ".join(first.split()) == summary


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_nothing_slow(option: str) -> None:
    said, modules = imported(option)
    assert "cotenant" in said
    assert modules & SLOW == set()


def test_help_of_a_command_shows_its_options(program: Program) -> None:
    said = program("plan", "--help")
    assert said.code == 0 and "--explain" in said.out and "Usage: cotenant plan" in said.out
    assert "Usage: cotenant models list" in program("models", "list", "--help").out


def _options(command: Any) -> Iterator[tuple[Any, Any]]:
    """All options of a command, or of a group's commands, each with the default that its function has."""
    for each in getattr(command, "commands", {}).values():
        yield from _options(each)
    if command.callback is not None:
        defaults = inspect.signature(command.callback).parameters
        yield from ((option, defaults[option.name].default) for option in command.params if option.name in defaults)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_defaults_of_durations_are_shown_with_their_unit_and_mean_the_same(name: str) -> None:
    for option, default in _options(load_command(name, COMMANDS[name][1])):
        if option.metavar == "DURATION" and default is not None:
            assert units.parse_seconds(option.default, option.name) == default


def test_help_shows_defaults_of_durations_as_they_are_written(program: Program) -> None:
    said = program("scaling-controller", "--help").out
    assert "[default: 15s]" in said and "[default: 300s]" in said


@pytest.mark.parametrize(("name", "level"), [("share-controller", "info"), ("endpoint-picker", "warning")])
def test_help_of_a_service_shows_the_level_at_which_it_logs(program: Program, name: str, level: str) -> None:
    assert f"[default: {level}]" in program(name, "--help").out


def test_unknown_command_is_named(program: Program) -> None:
    said = program("plann")
    assert said.code == 2 and "plann" in said.err
