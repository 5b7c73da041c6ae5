"""Which instances are asked for and let go, by HetSev's policies: rule by rule, and over any sequence of rates and
mishaps."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.control.scaling.hetsev import GreedyScaling, LeastCostScaling
from cotenant.control.scaling.provisioning import (
    MAX_ADDED,
    MAX_NAME,
    Instance,
    InstanceScaler,
    InstanceState,
    Provision,
    Release,
    instance_name,
)
from cotenant.core.model import Kind, Model
from cotenant.core.profile import Point, Profile
from cotenant.core.units import WHOLE
from cotenant.planners import Problem

V100, T4 = Kind(name="v100", count=4, price=3.0), Kind(name="t4", count=4, price=1.0)
INTERVAL = 15.0
RATES = {"a": 150.0, "b": 100.0}


def problem(*kinds: Kind, rates: dict[str, float] | None = None) -> Problem:
    """One row takes 10 ms of half a device, and 15 of a t4's: an instance carries 100 and 66.7 requests/s."""
    fleet = kinds or (V100,)
    rates = RATES if rates is None else rates
    seconds = {"v100": 0.010, "t4": 0.015}
    return Problem(
        models=tuple(Model(name=name, slo=0.031) for name in rates),
        rates=rates,
        fleet=fleet,
        profiles={
            (name, kind.name): Profile(
                name, kind.name, [Point(share=500, batch=1, latency=seconds[kind.name], memory=0)]
            )
            for name in rates
            for kind in fleet
        },
    )


def greedy(*kinds: Kind, rates: dict[str, float] | None = None, cool_down: float = 60.0) -> InstanceScaler:
    return InstanceScaler(problem(*kinds, rates=rates), GreedyScaling(share=500, cool_down=cool_down))


def one(name: str, state: InstanceState = "ready", model: str = "a") -> Instance:
    kind = "t4" if "t4" in name else "v100"
    return Instance(name=name, model=model, kind=kind, state=state, reason="")


def names(requests: list[Provision | Release]) -> list[str]:
    """Requests as +NAME and -NAME."""
    return [("+" if isinstance(each, Provision) else "-") + each.name for each in requests]


def steps(scaler: InstanceScaler, rates: Sequence[float | None], instances: list[Instance]) -> list[str]:
    """Return the requests of the last step, for rates of a at equal intervals."""
    requests: list[Provision | Release] = []
    for number, rate in enumerate(rates):
        requests = scaler.step(INTERVAL * number, INTERVAL, {} if rate is None else {"a": rate}, instances)
    return names(requests)


ONLY_A = {"a": 150.0}


def test_model_without_instances_begins_with_what_its_rate_in_the_problem_takes() -> None:
    requests = greedy().step(0.0, INTERVAL, {}, [])
    assert names(requests) == ["+a-v100-0", "+a-v100-1", "+b-v100-0", "+b-v100-1"]  # to stay below 80 %
    assert requests[0] == Provision(name="a-v100-0", model="a", kind="v100", slo=0.031, rate=100.0)


def test_rate_that_is_not_known_changes_nothing() -> None:
    scaler = greedy(rates=ONLY_A)
    assert steps(scaler, [None] * 30, [one("a-v100-0")]) == []
    assert steps(scaler, [None] * 30, [one("a-v100-0", "stuck")]) == []


def test_first_instances_that_are_stuck_leave_a_model_to_another_kind() -> None:
    """Nothing tells of its requests as long as none serves."""
    scaler = greedy(V100, T4, rates=ONLY_A)
    first = steps(scaler, [None], [])
    assert first and all(name.startswith("+a-t4-") for name in first)
    stuck = [one(name[1:], "stuck") for name in first]
    then = steps(scaler, [None], stuck)
    assert then and all(name.startswith("+a-v100-") for name in then)
    assert steps(scaler, [None], [*stuck, *[one(name[1:], "pending") for name in then]]) == []


def test_scales_out_above_four_fifths_and_counts_what_is_on_its_way() -> None:
    assert steps(greedy(rates=ONLY_A), [79.0], [one("a-v100-0")]) == []
    assert steps(greedy(rates=ONLY_A), [81.0], [one("a-v100-0")]) == ["+a-v100-1"]
    assert steps(greedy(rates=ONLY_A), [81.0], [one("a-v100-0"), one("a-v100-1", "pending")]) == []


def test_adds_of_the_cheapest_kind_as_many_as_it_takes() -> None:
    assert steps(greedy(V100, T4, rates=ONLY_A), [130.0], [one("a-v100-0")]) == ["+a-t4-0"]
    assert steps(greedy(V100, T4, rates=ONLY_A), [150.0], [one("a-v100-0")]) == ["+a-t4-0", "+a-t4-1"]


def test_scales_in_after_a_cool_down_and_keeps_the_last() -> None:
    three = [one(f"a-v100-{n}") for n in range(3)]
    assert steps(greedy(rates=ONLY_A), [70.0] * 3, three) == []
    assert steps(greedy(rates=ONLY_A), [70.0] * 4, three) == ["-a-v100-2", "-a-v100-1"]
    assert steps(greedy(rates=ONLY_A), [170.0] + [70.0] * 3, three) == []  # it is the peak that counts
    assert steps(greedy(rates=ONLY_A), [0.0] * 9, three[:1]) == []
    assert steps(greedy(rates=ONLY_A), [0.0] * 9, three) == ["-a-v100-2", "-a-v100-1"]


def test_gap_in_what_is_known_begins_the_cool_down_anew() -> None:
    three = [one(f"a-v100-{n}") for n in range(3)]
    assert steps(greedy(rates=ONLY_A), [70.0, 70.0, 70.0, None, 70.0, 70.0], three) == []
    assert steps(greedy(rates=ONLY_A), [70.0, None, *[70.0] * 4], three) == ["-a-v100-2", "-a-v100-1"]


def test_one_on_its_way_goes_before_one_that_serves() -> None:
    there = [one("a-v100-0"), one("a-v100-1", "pending"), one("a-v100-2")]
    assert steps(greedy(rates=ONLY_A), [10.0] * 9, there) == ["-a-v100-1"]
    there = [one("a-t4-0", "pending"), one("a-v100-0"), one("a-v100-1"), one("a-v100-2")]
    released = steps(greedy(V100, T4, rates=ONLY_A), [130.0] * 9, there)
    assert released == []  # the dearer ones would go, and wait for what is on its way


def test_program_exchanges_instances_once_the_new_ones_serve() -> None:
    scaler = InstanceScaler(problem(V100, T4, rates=ONLY_A), LeastCostScaling(share=500))
    dear = one("a-v100-0")
    assert steps(scaler, [60.0], [dear]) == ["+a-t4-0"]
    assert steps(scaler, [60.0], [dear, one("a-t4-0", "pending")]) == []
    assert steps(scaler, [60.0], [dear, one("a-t4-0")]) == ["-a-v100-0"]


def test_kind_on_which_one_is_stuck_gets_no_more_until_others_carry_the_rate() -> None:
    scaler = greedy(V100, T4, rates=ONLY_A)
    there = [one("a-v100-0"), one("a-t4-0", "stuck")]
    assert steps(scaler, [120.0], there) == ["+a-v100-1"]
    there.append(one("a-v100-1", "pending"))
    assert steps(scaler, [120.0], there) == ["-a-t4-0"]
    assert steps(greedy(rates=ONLY_A), [120.0], [one("a-v100-0", "stuck")]) == []  # waits for room


def all_stuck(scaler: InstanceScaler, rates: Sequence[float], instances: list[Instance]) -> list[list[str]]:
    """Return the requests of each step where no instance that is added finds room."""
    there, made = {each.name: each for each in instances}, []
    for number, rate in enumerate(rates):
        requests = scaler.step(INTERVAL * number, INTERVAL, {"a": rate}, list(there.values()))
        for each in requests:
            if isinstance(each, Release):
                del there[each.name]
            else:
                there[each.name] = one(each.name, "stuck")
        made.append(names(requests))
    return made


def test_stuck_instance_stays_while_the_others_do_not_carry_the_rate() -> None:
    for rate in (150.0, 90.0):  # more than the one that serves carries; and than 80 % of it
        rates = [rate] * 6 + [70.0] * 2
        expected = [["+a-v100-1"], *[[]] * 5, ["-a-v100-1"], []]
        assert all_stuck(greedy(rates=ONLY_A), rates, [one("a-v100-0")]) == expected


def test_stuck_instance_stays_while_no_other_kind_has_room() -> None:
    full = Kind(name="t4", count=1, price=1.0)
    there = [one("a-t4-0"), one("a-t4-1")]
    made = all_stuck(greedy(V100, full, rates=ONLY_A), [150.0] * 6 + [90.0], there)
    assert made == [["+a-v100-0"], *[[]] * 5, ["-a-v100-0"]]
    made = all_stuck(greedy(V100, T4, rates=ONLY_A), [150.0] * 6, [one("a-v100-0")])
    assert made == [["+a-t4-0", "+a-t4-1"], ["+a-v100-1"], *[[]] * 4]  # both kinds are


def test_program_keeps_a_stuck_instance_that_it_would_ask_for_again() -> None:
    scaler = InstanceScaler(problem(V100, T4, rates=ONLY_A), LeastCostScaling(share=500))
    assert all_stuck(scaler, [60.0] * 4, [one("a-v100-0")]) == [["+a-t4-0"], [], [], []]
    surplus = [one("a-v100-0"), one("a-v100-1"), one("a-t4-0", "stuck")]
    assert steps(scaler, [60.0], surplus) == ["-a-v100-1"]  # which serves, and is not missed


def test_ended_instance_is_released_and_replaced_under_another_name() -> None:
    there = [one("a-v100-0"), one("a-v100-1", "ended"), one("a-v100-2", "leaving")]
    assert steps(greedy(rates=ONLY_A), [120.0], there) == ["-a-v100-1", "+a-v100-3"]
    assert steps(greedy(rates=ONLY_A), [None], [one("a-v100-0", "ended")]) == [
        "-a-v100-0",
        "+a-v100-1",
        "+a-v100-2",
    ]


def test_models_share_what_there_is() -> None:
    small = Kind(name="v100", count=2)  # four instances
    there = [one("a-v100-0"), one("b-v100-0", model="b")]
    requests = greedy(small).step(0.0, INTERVAL, {"a": 999.0, "b": 999.0}, there)
    assert names(requests) == ["+a-v100-1", "+a-v100-2"]
    unknown = [*there, one("x-v100-0", model="x"), one("x-v100-1", model="x")]  # of a model that is somebody else's
    assert greedy(small).step(0.0, INTERVAL, {"a": 999.0, "b": 999.0}, unknown) == []


def test_rate_beyond_reason_adds_no_more_than_a_step_at_once() -> None:
    endless = Kind(name="v100", count=None)
    for policy in (GreedyScaling(share=500), LeastCostScaling(share=500)):
        scaler = InstanceScaler(problem(endless, rates=ONLY_A), policy)
        assert len(steps(scaler, [1e8], [one("a-v100-0")])) == MAX_ADDED
        for rate in (1e300, float("inf"), float("nan"), -1.0):
            assert steps(scaler, [rate], [one("a-v100-0")]) == []


def test_kind_without_a_profile_of_the_model_is_not_chosen() -> None:
    unknown = Kind(name="h200", count=4, price=0.1)
    known = problem(V100, rates=ONLY_A)
    asked = msgspec.structs.replace(known, fleet=(V100, unknown))
    scaler = InstanceScaler(asked, GreedyScaling(share=500))
    assert scaler.capacity("a", "h200") == 0.0
    assert steps(scaler, [120.0], [one("a-v100-0")]) == ["+a-v100-1"]


def test_instances_of_unknown_kinds_are_left_alone() -> None:
    there = [Instance(name="odd", model="a", kind="", state="ready"), one("a-v100-0")]
    assert steps(greedy(rates=ONLY_A), [120.0], there) == ["+a-v100-1"]
    assert steps(greedy(rates=ONLY_A), [0.0] * 9, there) == []


def test_capacity_leaves_room_for_the_batch_before() -> None:
    scaler = greedy(V100, T4)
    assert scaler.capacity("a", "v100") == 100.0
    tight = msgspec.structs.replace(problem(rates=ONLY_A), models=(Model(name="a", slo=0.015),))
    assert InstanceScaler(tight, GreedyScaling(share=500)).capacity("a", "v100") == 0.0


@given(model=st.text(min_size=1, max_size=90), other=st.text(min_size=1, max_size=90), number=st.integers(0, 10**6))
def test_names_are_those_of_hosts_and_tell_models_apart(model: str, other: str, number: int) -> None:
    name = instance_name(model, "v100", number)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name) and len(name) <= MAX_NAME
    assert (instance_name(other, "v100", number) == name) == (other == model)


class Cluster:
    """Instances that do what they are asked, late or never."""

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}

    def apply(self, requests: list[Provision | Release], lost: bool) -> None:
        for each in requests:
            if isinstance(each, Release):
                found = self.instances[each.name]
                self.instances[each.name] = msgspec.structs.replace(found, state="leaving")
            elif not lost and each.name not in self.instances:
                self.instances[each.name] = Instance(name=each.name, model=each.model, kind=each.kind, state="pending")

    def carrying(self, model: str) -> int:
        return sum(each.model == model and each.state in ("pending", "ready") for each in self.instances.values())


FATES = st.sampled_from(["ready", "ready", "ready", "pending", "stuck", "ended"])


@settings(max_examples=60)
@given(data=st.data(), policy=st.sampled_from([GreedyScaling, LeastCostScaling]))
def test_any_sequence_stays_within_the_fleet_and_keeps_a_last_instance(
    data: st.DataObject, policy: type[GreedyScaling] | type[LeastCostScaling]
) -> None:
    chosen = GreedyScaling(share=500, cool_down=45.0) if policy is GreedyScaling else LeastCostScaling(share=500)
    scaler, cluster = InstanceScaler(problem(V100, T4), chosen), Cluster()
    for number in range(data.draw(st.integers(1, 12))):
        rates = {model: rate for model in "ab" if (rate := data.draw(st.none() | st.floats(0, 900))) is not None}
        before = {model: cluster.carrying(model) for model in "ab"}
        there = sorted(cluster.instances.values(), key=lambda each: each.name)
        requests = scaler.step(number * INTERVAL, INTERVAL, rates, there)
        made = [each.name for each in requests if isinstance(each, Provision)]
        assert len(made) == len(set(made)) and not set(made) & set(cluster.instances)
        for model in "ab":
            if model not in rates and any(each.model == model and each.state in ("pending", "ready") for each in there):
                ended = {each.name for each in there if each.state == "ended"}
                own = [each for each in requests if each.name.startswith(f"{model}-") and each.name not in ended]
                assert own == []
        cluster.apply(requests, lost=data.draw(st.booleans()))
        for kind in (V100, T4):
            held = [each for each in cluster.instances.values() if each.kind == kind.name]
            carrying = sum(each.state in ("pending", "ready") for each in held)
            assert carrying <= (kind.count or 0) * WHOLE // 500
        for model, count in before.items():
            assert cluster.carrying(model) >= min(count, 1)
        for name, each in list(cluster.instances.items()):
            if each.state == "leaving":
                if data.draw(st.booleans()):
                    del cluster.instances[name]
            else:
                cluster.instances[name] = msgspec.structs.replace(each, state=data.draw(FATES))
