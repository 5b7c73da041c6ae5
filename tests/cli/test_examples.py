from __future__ import annotations

from pathlib import Path

import pytest

from cotenant import published
from cotenant.cli import reproduce
from tests.cli.program import Program

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_examples_files_copies_the_documentations_files(program: Program, folder: Path) -> None:
    for _ in range(2):  # the second time they are there
        assert program("examples", "--files", "docs/examples").code == 0
    copied = {path.name: path.read_bytes() for path in (folder / "docs" / "examples").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in EXAMPLES.iterdir()}
    assert program("plan", "docs/examples/problem.toml", "--planner", "elastic", "--json").code == 0


def test_examples_files_overwrites_nothing(program: Program, folder: Path) -> None:
    (folder / "problem.toml").write_text("mine")
    assert program.refuses("examples", "--files", ".") == (
        "problem.toml: is there already, and different; name another folder"
    )
    assert (folder / "problem.toml").read_text() == "mine"
    assert not (folder / "alerts.yml").exists()


def test_experiments_without_a_checkout_are_refused_with_the_way_out(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "CHECKOUT", folder)
    said = program.refuses("reproduce", "--list")
    assert "they are not part of the installed package" in said and "published data" not in said


def test_published_samples_of_an_installed_package_lie_where_the_user_says(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "FOLDER", published.default_folder(folder / "lib" / "python" / "site-packages"))
    assert "cotenant-data/icloud-ecnu+igniter" in program.refuses("fit", "v100")
    (folder / "checkout").mkdir()
    (folder / "checkout" / "pyproject.toml").touch()
    assert published.default_folder(folder / "checkout") == folder / "shared" / "data"
    monkeypatch.setenv("COTENANT_DATA", "there")
    assert published.default_folder(folder / "checkout") == Path("there")
