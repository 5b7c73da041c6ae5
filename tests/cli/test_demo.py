"""What the demo writes and asks beside its load."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from cotenant.app.running_server import Addresses
from cotenant.cli.demo import _example, _examples
from cotenant.config import read_problem
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
