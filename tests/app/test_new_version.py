"""A new version of a model beside one that is served."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import cotenant
from cotenant.app.serving import BackgroundServer
from cotenant.errors import FailedError
from tests.cli.program import until
from tests.live.deployment import repository

ROW = np.full((1, 16), 0.25, dtype=np.float32)


@pytest.fixture
def served(folder: Path) -> Path:
    """The repository of the settings, which tests may change."""
    (folder / "models").unlink()
    path = folder / "serve.toml"
    path.write_text(path.read_text().replace('"2s"', '"30s"'))
    return repository(folder / "models")


class Caller:
    """Ask without a pause, within the block; every answer is the old version's or the new one's."""

    def __init__(self, server: BackgroundServer) -> None:
        self.answers: list[float] = []
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._stop.is_set():
            self.answers.append(float(self._server.infer("identity", {"x": ROW})["y"].sum()))

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def test_new_version_that_fails_to_load_is_kept_out_and_the_old_one_serves_on(served: Path) -> None:
    with cotenant.serve("serve.toml") as server, Caller(server) as caller:
        (served / "identity" / "2").mkdir()
        (served / "identity" / "2" / "model.onnx").write_bytes(b"this is no model")
        with pytest.raises(FailedError, match=r"^failed to load 'identity': .*2/model.onnx: no ONNX model"):
            server.load("identity")
        assert server.deployment.offered["identity"].info.version == "1"
        seen = len(caller.answers)
        until(lambda: len(caller.answers) >= seen + 5)
    assert set(caller.answers) == {4.0}


def test_new_version_takes_over_without_a_request_lost(served: Path) -> None:
    with cotenant.serve("serve.toml") as server, Caller(server) as caller:
        (served / "identity" / "2").mkdir()
        (served / "identity" / "2" / "model.onnx").write_bytes((served / "identity" / "1" / "model.onnx").read_bytes())
        server.load("identity")
        assert server.deployment.offered["identity"].info.version == "2"
    assert set(caller.answers) == {4.0}
