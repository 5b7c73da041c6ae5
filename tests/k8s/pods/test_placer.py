"""Who gets which share, by every rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.model import Kind
from cotenant.errors import PlanError
from cotenant.k8s.pods.inventory import NodeDevices
from cotenant.k8s.pods.placer import Decision, NoRoom, Placed, Placer, Recut
from cotenant.k8s.pods.request import KIND, SharePlacement, SharePod
from cotenant.k8s.pods.residual import BesideInterference, Remains
from cotenant.k8s.pods.rules import RULES, Memo, choose_rule
from cotenant.planners.capacity import DeviceDraft, PartitionDraft
from cotenant.planners.cluster import fits
from cotenant.planners.score import node_binding
from cotenant.predictors import Load
from tests.k8s.pods.cluster import BIG, GIB, MIG, SMALL, catalogue, device, instances, node, pod

EVERY_RULE = [*RULES, "geometry", "bestfit", "elastic"]
CLUSTER = (
    node("n1", device("GPU-1a"), device("GPU-1b")),
    node("n2", device("GPU-2", SMALL)),
)


def placer(rule: str = "score", *kinds: Kind) -> Placer:
    return Placer(catalogue(*kinds), choose_rule(rule))


def decide(
    placer: Placer,
    pods: list[SharePod],
    nodes: tuple[NodeDevices, ...] = CLUSTER,
    reserved: Mapping[str, SharePlacement] | None = None,
) -> dict[str, Decision]:
    return {each.pod.key.name: each for each in placer.decide(nodes, pods, reserved or {})}


def placed(decision: Decision) -> SharePlacement:
    assert isinstance(decision, Placed), decision
    return decision.placement


def with_placements(pods: list[SharePod], decisions: dict[str, Decision]) -> list[SharePod]:
    """The pods as they are once all decisions are written."""
    return [
        msgspec.structs.replace(each, placement=decision.placement, gated=False)
        if isinstance(decision := decisions.get(each.key.name), Placed)
        else each
        for each in pods
    ]


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_decide_gives_an_idle_cluster_to_one_pod(rule: str) -> None:
    found = placed(decide(placer(rule), [pod("p", "mid", "100ms", "20")])["p"])
    report = {each.uuid: each for node in CLUSTER for each in node.devices}[found.device]
    assert (found.model, found.slo, found.rate, found.slot) == ("mid", 0.1, 20.0, 0)
    assert found.visible == found.device and found.node == ("n2" if found.device == "GPU-2" else "n1")
    assert found.memory == 2 * GIB and found.share in dict.fromkeys((*BIG.cuts, *SMALL.cuts))
    assert report.kind in ("a100", "t4")


@pytest.mark.parametrize("rule", EVERY_RULE)
@pytest.mark.parametrize("kinds", [(BIG, SMALL), (MIG,)])
@settings(max_examples=15, deadline=None)
@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from(["tiny", "mid", "large"]),
            st.sampled_from(["100ms", "300ms"]),
            st.sampled_from([5, 40, 200]),
        ),
        max_size=8,
    ),
    cut=st.booleans(),
)
def test_decide_never_gives_what_is_not_there(
    rule: str, kinds: tuple[Kind, ...], asked: list[tuple[str, str, int]], cut: bool
) -> None:
    """Every share is within its device and meets all targets; the same pods ask for nothing more; one that left room
    for nothing is told what is short."""
    nodes: tuple[NodeDevices, ...] = CLUSTER
    if kinds == (MIG,):
        made = instances("3g.40gb", "2g.20gb", "1g.10gb") if cut else ()
        nodes = (node("n1", device("GPU-0", MIG, mig=True, recut=not cut, instances=made)),)
    machine = placer(rule, *kinds)
    pods = [
        pod(f"p{n}", model, slo, str(qps), created=f"2026-01-01T00:00:{n:02}Z")
        for n, (model, slo, qps) in enumerate(asked)
    ]
    decisions = decide(machine, pods, nodes)
    assert list(decisions) == [each.key.name for each in pods]  # the oldest first
    after = with_placements(pods, decisions)
    problem = machine._catalogue.problem()
    for each in machine.devices(nodes, [one.placement for one in after if one.placement is not None]):
        assert fits(problem, each.slots.draft)
        assert each.slots.pods == sum(p.placement is not None and p.placement.device == each.report.uuid for p in after)
    again = decide(machine, after, nodes)
    assert {name for name, each in again.items() if isinstance(each, Placed)} == set()
    for name, decision in decisions.items():
        if isinstance(decision, NoRoom):
            assert decision.pod.model in decision.reason and "requests/s within" in decision.reason, name


def test_decide_by_score_is_the_thesis_best_node() -> None:
    """All devices are asked, not only those before the bound."""
    machine = placer()
    pods = [pod(f"p{n}", "tiny", "100ms", str(20 * n + 10)) for n in range(6)]
    decisions = decide(machine, pods)
    after = with_placements(pods, decisions)
    new = pod("new", "mid", "100ms", "20")
    chosen = placed(decide(machine, [*after, new])["new"])
    problem = machine._catalogue.problem()
    instance, _ = machine._asked(new)
    devices = machine.devices(CLUSTER, [each.placement for each in after if each.placement is not None])
    bindings = {each.report.uuid: node_binding(problem, each.slots.draft, instance) for each in devices}
    scores = {uuid: binding.score for uuid, binding in bindings.items() if binding is not None}
    assert scores[chosen.device] == max(scores.values())


def test_decide_by_maximum_takes_whole_devices() -> None:
    decisions = decide(placer("max"), [pod(f"p{n}", created=f"2026-01-01T00:00:0{n}Z") for n in range(4)])
    shares = [placed(decisions[f"p{n}"]) for n in range(3)]
    assert [each.share for each in shares] == [1000] * 3
    assert [each.device for each in shares] == ["GPU-2", "GPU-1a", "GPU-1b"]  # the cheapest first
    assert isinstance(decisions["p3"], NoRoom)


def test_decide_by_minimum_takes_a_quarter_of_an_idle_device() -> None:
    decisions = decide(placer("min"), [pod("a", "tiny"), pod("b", "tiny")])
    assert [(placed(each).share, placed(each).device) for each in decisions.values()] == [
        (250, "GPU-2"),
        (250, "GPU-1a"),
    ]


def test_decide_by_turns_goes_round() -> None:
    machine = placer("roundrobin")
    pods = [pod(f"p{n}", "tiny", "300ms", "5", created=f"2026-01-01T00:00:0{n}Z") for n in range(3)]
    first = [(placed(each).device, placed(each).slot) for each in decide(machine, pods).values()]
    assert first == [("GPU-1a", 0), ("GPU-1a", 1), ("GPU-1a", 2)]
    other = decide(machine, [*with_placements(pods, decide(machine, pods)), pod("p3", "tiny", "300ms", "5")])
    assert (placed(other["p3"]).device, placed(other["p3"]).slot) == ("GPU-1a", 3)


@pytest.mark.parametrize("rule", ["score", "hetsev", "max"])
def test_decide_gives_a_pod_the_kind_that_it_wants(rule: str) -> None:
    for kind in ("a100", "t4"):
        wanted = {"annotations": {KIND: kind}}
        found = placed(decide(placer(rule), [pod("p", "mid", "100ms", "20", **wanted)])["p"])
        assert {each.uuid: each.kind for node in CLUSTER for each in node.devices}[found.device] == kind
    odd = decide(placer(rule), [pod("p", "mid", "100ms", "20", annotations={KIND: "h200"})])["p"]
    assert isinstance(odd, NoRoom)
    assert odd.reason.endswith(": no node reports a device of the kind 'h200'; available: a100, t4")
    fast = decide(placer(rule), [pod("p", "mid", "1ms", "20", annotations={KIND: "t4"})])["p"]
    assert isinstance(fast, NoRoom) and fast.reason.endswith("within 1 ms: no share of one t4 sustains that")


def test_decide_by_hetsev_keeps_instances_of_a_model_apart() -> None:
    decisions = decide(placer("hetsev"), [pod("a"), pod("b"), pod("c")])
    devices = [placed(each).device for each in decisions.values() if isinstance(each, Placed)]
    assert len(devices) == len(set(devices)) >= 2


def test_decide_by_colocation_prefers_company() -> None:
    """The sum of throughputs is larger where several run."""
    machine = placer("colocate")
    pods = [pod("a", "tiny", "300ms", "5"), pod("b", "mid", "300ms", "5")]
    decisions = decide(machine, pods)
    assert placed(decisions["a"]).device == placed(decisions["b"]).device


class Rivals:
    """A predictor of models that slow each other by more the larger they are."""

    interferes = True
    weights: ClassVar = {"tiny": 0.1, "mid": 0.6, "large": 1.5}

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return 1 + sum(self.weights[other.model] * other.share / 1000 for other in colocated)


class UncertainRivals(Rivals):
    """In the tail as `Rivals`; in the median only the smallest slow others."""

    def __init__(self, quantile: float = 0.9) -> None:
        self._median = quantile == 0.5

    def with_quantile(self, quantile: float) -> UncertainRivals:
        return UncertainRivals(quantile)

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        if self._median:
            return 2.0 if any(each.model == "tiny" for each in colocated) else 1.0
        return super().slowdown(victim, colocated)


@pytest.mark.parametrize(("interference", "beside"), [(Rivals(), "tiny"), (UncertainRivals(), "large")])
def test_decide_by_colocation_compares_medians(interference: Rivals, beside: str) -> None:
    machine = Placer(catalogue(BIG, interference=interference), choose_rule("colocate"))
    nodes = tuple(node(name, device(f"GPU-{name}")) for name in ("tiny", "large"))
    there = [placed(decide(machine, [pod(on.name, on.name, "900ms", "5")], (on,))[on.name]) for on in nodes]
    pods = [pod(on.name, on.name, "900ms", "5") for on in nodes]
    taken = with_placements(pods, {on.name: Placed(of, at) for on, of, at in zip(nodes, pods, there, strict=True)})
    assert placed(decide(machine, [*taken, pod("new", "mid", "900ms", "5")], nodes)["new"]).node == beside


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_predictors_of_what_is_left_have_quantiles(quantile: float) -> None:
    rest = Remains(msgspec.structs.replace(BIG, name="rest"), BIG, 0, None, (Load("large", BIG.name, 1, 500),))
    predictor = BesideInterference(UncertainRivals(), {"rest": rest}).with_quantile(quantile)
    assert predictor.slowdown(Load("mid", "rest", 1, 500), ()) == (1.0 if quantile == 0.5 else 1.75)


@settings(max_examples=25, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.sampled_from(["tiny", "mid", "large"]), st.sampled_from(["100ms", "300ms"]), st.integers(1, 60)),
        min_size=2,
        max_size=9,
    )
)
def test_decide_by_colocation_is_the_largest_throughput_on_the_smallest_share(
    asked: list[tuple[str, str, int]],
) -> None:
    machine = Placer(catalogue(interference=Rivals()), choose_rule("colocate"))
    *pods, new = [pod(f"p{n}", model, slo, str(qps)) for n, (model, slo, qps) in enumerate(asked)]
    after = with_placements(pods, decide(machine, pods))
    holding = [each.placement for each in after if each.placement is not None]
    decision = decide(machine, [*after, new])[new.key.name]
    instance, problem = machine._asked(new)
    assert problem is not None
    scores = {}
    for each in machine.devices(CLUSTER, holding):
        draft = each.slots.draft
        choice = RULES["colocate"](problem, [each.slots], instance, Memo())
        more = [[*draft.cuts, PartitionDraft(cut, {instance.model: instance.rate})] for cut in draft.kind.cuts]
        smallest = next((cuts for cuts in more if fits(problem, DeviceDraft(draft.kind, cuts))), None)
        assert smallest == (None if choice is None else choice.cuts)
        if choice is not None:
            scores[each.report.uuid] = choice.score
    assert isinstance(decision, Placed) == bool(scores)
    if isinstance(decision, Placed):
        assert scores[decision.placement.device] == max(scores.values())


def test_decide_older_pods_first_and_small_ones_where_large_ones_wait() -> None:
    pods = [
        pod("large", "large", "100ms", "60", created="2026-01-01T00:00:02Z"),
        pod("first", "large", "100ms", "60", created="2026-01-01T00:00:01Z"),
        pod("tiny", "tiny", "100ms", "5", created="2026-01-01T00:00:03Z"),
    ]
    decisions = decide(placer(), pods, (node("n1", device("GPU-0")),))
    assert isinstance(decisions["first"], NoRoom) or isinstance(decisions["large"], NoRoom)
    assert isinstance(decisions["tiny"], Placed) or isinstance(decisions["first"], Placed)


def test_decide_keeps_what_was_written_down() -> None:
    was = SharePlacement(node="n2", device="GPU-2", visible="GPU-2", slot=3, share=500, model="mid", slo=0.1, rate=50.0)
    decisions = decide(placer(), [pod("p")], reserved={"uid-p": was})
    assert decisions["p"] == Placed(pod("p"), was)
    gone = msgspec.structs.replace(was, device="GPU-9")
    assert placed(decide(placer(), [pod("p")], reserved={"uid-p": gone})["p"]).device != "GPU-9"


def test_decide_counts_what_is_written_down_for_others() -> None:
    whole = SharePlacement(
        node="n2", device="GPU-2", visible="GPU-2", slot=0, share=1000, model="mid", slo=0.1, rate=50.0
    )
    nodes = (CLUSTER[1],)
    decisions = decide(placer(), [pod("a"), pod("b")], nodes, reserved={"uid-b": whole})
    assert isinstance(decisions["a"], NoRoom) and isinstance(decisions["b"], Placed)


def test_decide_respects_where_a_pod_may_run() -> None:
    only = pod("p", "tiny", "300ms", "5", nodeSelector={"kubernetes.io/hostname": "n2"})
    assert placed(decide(placer(), [only])["p"]).node == "n2"
    nowhere = pod("p", "tiny", "300ms", "5", nodeSelector={"kubernetes.io/hostname": "n3"})
    decision = decide(placer(), [nowhere])["p"]
    assert isinstance(decision, NoRoom) and "and no node takes it" in decision.reason


def test_decide_closed_nodes_take_nobody() -> None:
    nodes = (node("n1", device("GPU-0"), unschedulable=True), node("n2", device("GPU-1"), ready=False))
    assert isinstance(decide(placer(), [pod("p")], nodes)["p"], NoRoom)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (("unknown",), "no profile of model 'unknown'; available: large, mid, tiny"),
        (
            ("mid", "1ms"),
            "mid at 50 requests/s within 1 ms: no share of one a100 sustains that; no share of one t4 sustains that",
        ),
    ],
)
def test_decide_says_what_is_short(asked: tuple[str, ...], reason: str) -> None:
    decision = decide(placer(), [pod("p", *asked)])["p"]
    assert isinstance(decision, NoRoom) and decision.reason == reason


def test_decide_says_what_is_not_free_in_words_that_no_other_pod_changes() -> None:
    nodes = (node("n1", device("GPU-0")),)
    found = []
    for first, second in ((450, 450), (500, 450), (550, 450)):
        placements = [
            SharePlacement(
                node="n1", device="GPU-0", visible="GPU-0", slot=n, share=share, model="tiny", slo=0.3, rate=5.0
            )
            for n, share in enumerate((first, second))
        ]
        holders = [
            msgspec.structs.replace(pod(f"h{n}"), gated=False, placement=placement)
            for n, placement in enumerate(placements)
        ]
        decision = decide(placer(), [*holders, pod("p")], nodes)["p"]
        assert isinstance(decision, NoRoom)
        found.append(decision.reason)
    assert found == 3 * ["mid at 50 requests/s within 100 ms: needs 30 % of one a100, and none has that free"]
    assert "no node reports a device" in decide(placer(), [pod("p")], ())["p"].reason  # type: ignore[union-attr]


def test_decide_gives_mig_instances_by_uuid() -> None:
    made = instances("3g.40gb", "2g.20gb", "1g.10gb")
    nodes = (node("n1", device("GPU-0", MIG, mig=True, instances=made)),)
    machine = placer("score", MIG)
    pods = [pod(f"p{n}", "mid", "300ms", "20", created=f"2026-01-01T00:00:0{n}Z") for n in range(3)]
    found = [placed(each) for each in decide(machine, pods, nodes).values()]
    assert {each.visible for each in found} == {each.uuid for each in made}
    assert all(each.device == "GPU-0" and each.memory == 0 for each in found)
    assert all(each.share == made[each.slot].share for each in found)


def test_decide_recuts_an_idle_gpu_where_that_is_allowed_and_places_once_it_is_done() -> None:
    machine = placer("score", MIG)
    asking = [pod("p", "mid", "100ms", "20")]
    before = (node("n1", device("GPU-0", MIG, mig=True, recut=True, instances=instances("7g.80gb"))),)
    decision = decide(machine, asking, before)["p"]
    assert isinstance(decision, Recut) and (decision.node, decision.device) == ("n1", "GPU-0")
    assert decide(machine, asking, before)["p"] == decision
    names = {each.share: each for each in instances("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")}
    cut = tuple(msgspec.structs.replace(names[share], uuid=f"MIG-{n}") for n, share in enumerate(decision.shares))
    after = (node("n1", device("GPU-0", MIG, mig=True, recut=True, instances=cut)),)
    assert placed(decide(machine, asking, after)["p"]).visible in {each.uuid for each in cut}
    forbidden = (node("n1", device("GPU-0", MIG, mig=True)),)
    assert isinstance(decide(machine, asking, forbidden)["p"], NoRoom)


def test_decide_leaves_a_gpu_alone_whose_instance_is_gone_under_a_pod() -> None:
    made = instances("3g.40gb", "3g.40gb")
    lost = SharePlacement(
        node="n1", device="GPU-0", visible="MIG-gone", slot=0, share=428, model="mid", slo=0.1, rate=5.0
    )
    holder = msgspec.structs.replace(pod("h"), gated=False, placement=lost)
    nodes = (node("n1", device("GPU-0", MIG, mig=True, instances=made)),)
    assert isinstance(decide(placer("score", MIG), [holder, pod("p", "mid", "300ms", "5")], nodes)["p"], NoRoom)


def test_choose_rule_of_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(
        PlanError, match=r"^unknown planner 'best'; available: score, hetsev, min, max, roundrobin, col"
    ):
        choose_rule("best")


def test_place_on_some_nodes_is_on_one_of_them() -> None:
    machine = placer()
    for each in CLUSTER:
        assert placed(machine.place(pod("p", "tiny", "300ms", "5"), [each], [])).node == each.name
    assert isinstance(machine.place(pod("p"), [], []), NoRoom)


def test_share_that_a_scheduler_was_offered_goes_to_no_other_pod() -> None:
    machine, nodes = placer("max"), (node("n1", device("GPU-0")),)
    unbound = pod("u", gated=False)
    offered = placed(machine.place(unbound, nodes, []))
    for pods in ([unbound, pod("g")], [pod("g")]):  # seen by the controller, or not yet
        assert isinstance(decide(machine, pods, nodes, {"uid-u": offered})["g"], NoRoom)
    assert placed(decide(machine, [unbound, pod("g")], nodes)["g"]) == offered


class OfUnknownModels:
    """A predictor without samples of any model."""

    interferes = True

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        raise PlanError(f"model {victim.model!r} was in no sample")


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_models_whose_slowdown_is_not_known_have_devices_alone(rule: str) -> None:
    machine = Placer(catalogue(interference=OfUnknownModels()), choose_rule(rule))
    pods = [pod(name, "tiny", "100ms", "5") for name in "abcdefgh"]
    placements = [each.placement for each in machine.decide(CLUSTER, pods, {}) if isinstance(each, Placed)]
    partitions = {(each.device, each.slot) for each in placements}  # which pods of one model may share
    assert 0 < len(partitions) == len({device for device, _ in partitions})


def test_planner_that_cannot_plan_is_the_reason_of_the_pod_alone() -> None:
    def rule(*arguments: object) -> None:
        raise PlanError("planning so needs a package")

    machine = Placer(catalogue(), rule)
    assert decide(machine, [pod("p")])["p"] == NoRoom(pod("p"), "planning so needs a package")
