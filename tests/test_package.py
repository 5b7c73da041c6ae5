from __future__ import annotations

import subprocess
import sys

import cotenant


def test_every_public_name_is_there() -> None:
    assert sorted(cotenant._HOMES) == sorted(cotenant.__all__)
    for name in cotenant.__all__:
        assert getattr(cotenant, name).__name__ == name


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, cotenant; print(sorted({'numpy', 'onnxruntime', 'grpc', 'typer', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
