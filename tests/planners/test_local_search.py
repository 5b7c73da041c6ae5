from __future__ import annotations

from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Plan
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem, load_planner
from cotenant.planners.capacity import PartitionDraft, batched_partitions
from cotenant.planners.check import check
from cotenant.planners.local_search import attainment_shortfall, improve_plan
from tests.planners.problems import embedded


def test_improve_plan_of_missed_slos_recuts_the_device() -> None:
    problem = embedded(1.0)
    paper = load_planner("elastic")(problem)
    improved = improve_plan(paper, problem)
    assert attainment_shortfall(paper, problem)
    assert attainment_shortfall(improved, problem) == {}
    assert check(improved, problem) == []
    assert improved.devices_used == 1


def test_improve_plan_of_parallel_workers_keeps_them() -> None:
    points = [
        Point(share=share, batch=batch, latency=0.010 * batch * 1000 / share * (1 + procs / 4), memory=1, procs=procs)
        for share in (500, 1000)
        for batch in (1, 4)
        for procs in (1, 2)
    ]
    problem = Problem(
        models=(Model(name="a", slo=0.2),),
        rates={"a": 64.0},
        fleet=(Kind(name="k", cuts=(500, 1000)),),
        profiles={("a", "k"): Profile("a", "k", points)},
    )
    partitions = batched_partitions(problem, problem.fleet[0], [PartitionDraft(500, {"a": 64.0}, {"a": 2})])
    assert partitions is not None
    plan = Plan(planner="by hand", devices=(Device(id=DeviceId("k", 0), partitions=partitions),))
    assert check(plan, problem) == []
    assert attainment_shortfall(plan, problem)
    improved = improve_plan(plan, problem)
    assert attainment_shortfall(improved, problem) == {}
    assert [placement.procs for _, _, placement in improved.placements()] == [2]
    assert check(improved, problem) == []
