"""Tests that need a GPU: `make gpu-check STAGE=1` runs them under the backends named in COTENANT_CHECK_BACKENDS.

What they measure goes, a line of JSON each, to the file named in COTENANT_FIGURES. With the backend `cpu` they run on a
machine without a GPU: the same paths, where nothing is asked that only a GPU can keep.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cotenant.app.backend import create_backend
from cotenant.backends import Backend
from cotenant.config import read_settings
from cotenant.errors import DeviceError

BACKENDS = os.environ.get("COTENANT_CHECK_BACKENDS", "green mps").split()

collect_ignore = [] if "green" in BACKENDS else ["test_green.py"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Ends what it started: the next one may want the same device."""
    try:
        found = create_backend(msgspec.structs.replace(read_settings(), backend=request.param))
    except DeviceError as error:
        pytest.skip(str(error))
    yield found
    found.stop()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Writes down what a test measured, whether or not it is what it should be."""

    def write(**values: object) -> None:
        line = json.dumps({"test": request.node.name, "at": round(time.monotonic(), 1), **values})
        print(line)  # noqa: T201 shown where the test fails
        if path := os.environ.get("COTENANT_FIGURES"):
            with Path(path).open("a") as file:
                file.write(line + "\n")

    return write
