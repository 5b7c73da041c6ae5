"""A small deployment of real ONNX models, with profiles that are given rather than measured."""

from __future__ import annotations

from pathlib import Path

from cotenant.core.model import Kind, Model
from cotenant.core.profile import Point, Profile, write_profiles
from cotenant.live.deployment import Deployment, ServableModel
from cotenant.planners import Problem
from cotenant.planning import plan as plan_problem
from cotenant.worker.repository import describe, find_model
from tests.worker import graphs

CPU = Kind(name="cpu", cuts=tuple(range(50, 1001, 50)))
TARGET = 30.0  # seconds; these tests are not about speed, and a machine with much to do takes some to start a worker


def repository(root: Path) -> Path:
    """Models `identity` (16 floats) and `lookup` (fails for an index of 4 or more), and `broken`, which is none."""
    for name, make in (("identity", graphs.identity), ("lookup", graphs.lookup)):
        (root / name / "1").mkdir(parents=True)
        make(root / name / "1" / "model.onnx")
    (root / "broken" / "1").mkdir(parents=True)
    (root / "broken" / "1" / "model.onnx").write_bytes(b"this is no model")
    return root


def profile(model: str) -> Profile:
    """1 ms a row on the whole device, twice that on half of it, and so on."""
    points = [
        Point(share=share, batch=batch, latency=0.001 * batch * 1000 / share, memory=64 << 20)
        for share in (1000, 50)
        for batch in (1, 8)
    ]
    return Profile(model, "cpu", points)


def csv(names: tuple[str, ...] = ("identity", "lookup")) -> str:

    return write_profiles([profile(name) for name in names])


def sample_deployment(root: Path, names: tuple[str, ...] = ("identity", "lookup")) -> Deployment:
    models = {name: Model(name=name, slo=TARGET) for name in names}
    problem = Problem(
        models=tuple(models.values()),
        rates=dict.fromkeys(names, 10.0),
        fleet=(CPU,),
        profiles={(name, "cpu"): profile(name) for name in names},
    )
    entries = {name: find_model(root, name) for name in names}
    return Deployment(
        offered={
            name: ServableModel(entry=entry, info=describe(entry), model=models[name])
            for name, entry in entries.items()
        },
        problem=problem,
        plan=plan_problem(problem, "elastic", validate=False),
        broken={"broken": "not a model"},
    )
