"""What the demo writes and asks beside its load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.app.running_server import Addresses
from cotenant.backends.fake import Fake
from cotenant.cli import demo
from cotenant.cli.demo import _example, _examples
from cotenant.cli.demo_rates import DemoPlan
from cotenant.config import read_problem, read_settings
from cotenant.errors import FailedError
from cotenant.live.deployment import Deployment
from cotenant.planning import plan as plan_problem


def test_examples_are_made_for_models_that_are_placed_and_one_is_written_for_curl(tmp_path: Path) -> None:
    problem = read_problem(Path(__file__).parents[2] / "docs" / "examples" / "problem.toml")  # the demo's models
    deployment = Deployment(offered={}, problem=problem, plan=plan_problem(problem, "elastic", validate=False))
    examples = _examples(deployment, 0)
    assert list(examples) == [model.name for model in problem.models if deployment.plan.rate(model.name)]
    folder = tmp_path / "demo"
    words = _example(Addresses(http="127.0.0.1:1", grpc="", metrics=""), examples, folder)
    assert words == f"curl -d @{folder}/digits.json http://127.0.0.1:1/v2/models/digits/infer"
    (given,) = json.loads((folder / "digits.json").read_text())["inputs"]
    assert np.prod(given["shape"]) == len(given["data"]) == 64


def test_examples_that_are_still_made_when_the_workers_fail_end_with_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = read_problem(Path(__file__).parents[2] / "docs" / "examples" / "problem.toml")
    described = Deployment(offered={}, problem=problem, plan=plan_problem(problem, "elastic", validate=False))
    begun = asyncio.Event()

    class Builder:
        def say(self, doing: str) -> None:
            pass

        async def describe(self, names: object) -> Deployment:
            return described

    async def in_thread(function: Callable[..., object], *given: object) -> object:
        if function is _examples:
            begun.set()
            await asyncio.Event().wait()
        return function(*given)

    @asynccontextmanager
    async def running(settings: object, backend: object, prepare: Any, **options: object) -> AsyncIterator[None]:
        await prepare(Builder())
        await begun.wait()
        raise FailedError("no worker starts")
        yield

    async def scene() -> None:
        with pytest.raises(FailedError, match="no worker starts"):
            await demo.run(
                (),
                read_settings(),
                keep=False,
                seconds=1.0,
                scale=1.0,
                plot=Path(),
                report=None,
                train=False,
                seed=0,
                json=True,
            )
        assert len(asyncio.all_tasks()) == 1

    chosen = DemoPlan(problem=problem, plan=described.plan)
    monkeypatch.setattr(demo, "plan_demo_once", lambda *given: chosen)
    monkeypatch.setattr(demo, "create_backend", lambda settings: Fake(problem.fleet))
    monkeypatch.setattr(demo, "raise_file_limit", lambda: None)
    monkeypatch.setattr(demo, "running", running)
    monkeypatch.setattr(asyncio, "to_thread", in_thread)
    asyncio.run(scene())
    assert begun.is_set()
