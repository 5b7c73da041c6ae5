"""Timeouts and priorities of a model's configuration, and what is said of the fields that change nothing here."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton_http

import cotenant
from cotenant.app.serving import BackgroundServer
from cotenant.live.driver import Driver

POLICY = """
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 45000000 max_queue_size: 16 }
}
instance_group { count: 4 kind: KIND_CPU }
"""


@pytest.fixture
def server(folder: Path, models: Path) -> Iterator[BackgroundServer]:
    (folder / "models").unlink()
    shutil.copytree(models, folder / "models")
    (folder / "models" / "identity" / "config.pbtxt").write_text(POLICY)
    with cotenant.serve("serve.toml", models=["identity"]) as server:
        yield server


@pytest.mark.parametrize(
    ("parameters", "within", "priority"),
    [
        ({}, 45.0, 1),  # the model's own, not the target of 2 s
        ({"timeout": 30_000_000}, 30.0, 1),
        ({"priority": 1}, 45.0, 0),
        ({"priority": 3}, 45.0, 2),
        ({"priority": 4}, 45.0, 1),  # no such level: Triton takes the default then
    ],
)
def test_queue_policy_gives_requests_their_deadline_and_priority(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    server: BackgroundServer,
    parameters: dict[str, int],
    within: float,
    priority: int,
) -> None:
    seen: list[tuple[float, int]] = []
    submit = Driver.submit

    def observed(self: Driver, *given: object, within: float, priority: int, **rest: object) -> int:
        seen.append((within, priority))
        return submit(self, *given, within=within, priority=priority, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Driver, "submit", observed)
    client = triton_http.InferenceServerClient(server.addresses.http)
    row = triton_http.InferInput("x", (1, 16), "FP32")
    row.set_data_from_numpy(np.zeros((1, 16), np.float32))
    client.infer("identity", [row], **parameters)
    ((deadline, level),) = seen
    assert deadline == pytest.approx(within, abs=0.5) and level == priority
    config = client.get_model_config("identity")["dynamic_batching"]
    assert (config["priority_levels"], config["default_priority_level"]) == (3, 2)
    assert config["default_queue_policy"]["default_timeout_microseconds"] == 45_000_000
    client.close()


def test_fields_that_change_nothing_are_named_once(server: BackgroundServer, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        return [record.message for record in caplog.records if "ignored in its configuration" in record.message]

    with caplog.at_level(logging.WARNING):
        server.load("identity")
    assert told() == [], "it was said at the start"
    config = Path("models/identity/config.pbtxt")
    config.write_text(
        POLICY.replace("instance_group { count: 4 kind: KIND_CPU }", "metric_tags { key: 'a' value: 'b' }")
    )
    with caplog.at_level(logging.WARNING):
        server.load("identity")
    (line,) = told()
    assert line.startswith("identity: ignored in its configuration: ")
    assert "dynamic_batching.preferred_batch_size: the plan chooses batches" in line
    assert "dynamic_batching.default_queue_policy.max_queue_size: " in line
    assert "metric_tags: " in line and "instance_group" not in line
