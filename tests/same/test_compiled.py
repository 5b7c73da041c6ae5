"""The compiled build makes the same decisions as the files it is compiled from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def stories(build: Path) -> tuple[Path, list[str]]:
    """Where the dispatcher comes from, and what it decides."""
    told = subprocess.run(
        [sys.executable, "-m", "tests.same.stories"],
        cwd=build,
        env=os.environ | {"PYTHONPATH": str(build)},
        check=True,
        capture_output=True,
    )
    found = json.loads(told.stdout)
    return Path(found["module"]), found["stories"]


@pytest.mark.slow  # compiles for a minute
@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")
def test_compiled_dispatcher_gives_the_same_commands(tmp_path: Path) -> None:
    pure, source, build = tmp_path / "pure", tmp_path / "source", tmp_path / "build"
    for tree in (pure, source):
        shutil.copytree(ROOT / "cotenant", tree / "cotenant", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=source,
        env=os.environ | {"HATCH_BUILD_HOOK_ENABLE_MYPYC": "true"},
        check=True,
    )
    (wheel,) = (tmp_path / "dist").iterdir()
    zipfile.ZipFile(wheel).extractall(build)
    for tree in (pure, build):
        (tree / "tests" / "same").mkdir(parents=True)
        shutil.copy(ROOT / "tests" / "same" / "stories.py", tree / "tests" / "same")

    module, decided = stories(build)
    assert module.suffix == ".so"
    assert module.is_relative_to(build)
    module, expected = stories(pure)
    assert module == pure / "cotenant" / "runtime" / "dispatcher.py"
    assert decided == expected
