"""What a request costs the front end is measured once, and counted in plans."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
import pytest

import cotenant.app.front_end_source as source
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.backends.cpu import Cpu
from cotenant.live.front_end_cost import measure_front_end
from cotenant.live.http import load_shedding
from cotenant.planners.front_end import REQUEST_SECONDS, FrontEnd
from cotenant.planning import plan
from cotenant.profiling import cache
from cotenant.render.provenance import provenance_view
from tests.app.test_server_state import settings_of
from tests.planners.problems import embedded
from tests.render.plans import shown


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_front_end_is_measured_with_real_requests() -> None:
    seconds = measure_front_end()
    assert seconds is not None and source.LEAST < seconds < source.MOST


def test_front_end_is_measured_on_a_machine_whose_event_loop_lags(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load_shedding, "MIN_LAG", 0.0)
    monkeypatch.setattr(load_shedding, "INTERVAL", math.inf)  # no overload that stands, at which all would be rejected
    assert measure_front_end() is not None
    assert not caplog.records


def test_cost_is_measured_once_for_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = iter([7.234e-5, 1e-4])
    monkeypatch.setattr(source, "measure_front_end", lambda: next(costs))
    assert source.request_seconds() == source.request_seconds() == 7.2e-5
    monkeypatch.setattr(cache, "machine_fingerprint", lambda: "another processor")
    assert source.request_seconds() == 1e-4


@pytest.mark.parametrize("measured", [None, 0.0, 1.0])
def test_cost_that_cannot_be_measured_is_assumed_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, measured: float | None
) -> None:
    monkeypatch.setattr(source, "measure_front_end", lambda: measured)
    assert source.request_seconds() == REQUEST_SECONDS
    assert not cache.cache_folder().exists()


def test_kept_cost_that_makes_no_sense_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "measure_front_end", lambda: 8e-5)
    source.request_seconds()
    (file,) = cache.cache_folder().iterdir()
    for text in ("-1", "nan", "no number", "3"):
        file.write_text(text)
        assert source.request_seconds() == 8e-5


def test_folder_that_cannot_be_written_keeps_no_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cotenant").write_text("a file in the way")
    monkeypatch.setattr(source, "measure_front_end", lambda: 8e-5)
    assert source.request_seconds() == source.request_seconds() == 8e-5


def test_plan_counts_the_cost_and_says_so() -> None:
    problem = msgspec.structs.replace(embedded(), front_end=FrontEnd(seconds=4e-5))
    made = plan(problem, "elastic", validate=False)
    assert made.provenance is not None and made.provenance.request_s == 4e-5
    assert "front end: 40 µs of a processor counted for each request" in shown(provenance_view(made))
    much = sum(problem.rates.values()) * 4e-5 / 0.7 / 4  # of what it can read are four times as many
    dear = msgspec.structs.replace(problem, front_end=FrontEnd(seconds=4e-5 / much))
    assert sum(plan(dear, "elastic", validate=False).unserved.values()) == pytest.approx(
        0.75 * sum(problem.rates.values()), rel=0.01
    )


def test_server_plans_with_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.app.deployment_builder.request_seconds", lambda: 3e-5)
    deployment = asyncio.run(DeploymentBuilder(settings_of(tmp_path), Cpu()).build())
    front_end, provenance = deployment.problem.front_end, deployment.plan.provenance
    assert front_end is not None and provenance is not None
    assert front_end.seconds == provenance.request_s == 3e-5
