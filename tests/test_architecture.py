"""docs/architecture.md and the tree say the same."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = set(re.findall(r"`([\w.-]+/[\w./-]*)`", PAGE))


def folders(name: str) -> set[str]:
    """A folder and those below that hold Python."""
    return {f"{path.parent.relative_to(ROOT)}/" for path in (ROOT / name).rglob("*.py")}


@pytest.mark.parametrize("path", sorted(NAMED))
def test_path_that_the_page_names_exists(path: str) -> None:
    assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file()


RULES = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", PAGE)


@pytest.mark.parametrize(("path", "names"), RULES)
def test_name_that_the_page_gives_is_defined_in_its_file(path: str, names: str) -> None:
    defined = set(
        re.findall(r"^\s*(?:(?:async )?def |class )?(\w+)(?=[(:]| =)", (ROOT / path).read_text(), re.MULTILINE)
    )
    assert set(re.findall(r"\w+", names)) <= defined


def test_page_gives_the_names_of_rules() -> None:
    assert len(RULES) > 10


@pytest.mark.parametrize("name", ["cotenant", "tests"])
def test_folder_of_python_is_named_by_the_page(name: str) -> None:
    assert sorted(folders(name) - NAMED - {"cotenant/"}) == []


def test_packages_of_the_page_are_in_the_order_of_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in contracts[0]["layers"]]
    floors = {package.replace(".", "/"): floor for floor, packages in enumerate(layers) for package in packages}
    named = [floors[package] for package in re.findall(r"^\| `(cotenant/\w+)/`", PAGE, re.MULTILINE)]
    assert len(named) > 10
    assert named == sorted(named)


@pytest.mark.parametrize("name", ["cotenant", "benchmarks", "experiments"])
def test_module_outside_tests_imports_nothing_from_tests(name: str) -> None:
    guilty = []
    for path in (ROOT / name).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
            guilty += [str(path.relative_to(ROOT)) for module in modules if module.split(".")[0] == "tests"]
    assert guilty == []
