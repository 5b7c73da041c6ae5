from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.plan_diff import PlanDiff, diff_plans, renumber_devices


def cut(share: int, *models: str, batch: int = 4, rate: float = 10.0, procs: int = 1) -> Partition:
    each = (Placement(model=m, batch=batch, rate=rate, duty=0.1, latency=0.1, procs=procs) for m in models)
    return Partition(share=share, placements=tuple(each))


def device(number: int, *cuts: Partition, kind: str = "k") -> Device:
    return Device(id=DeviceId(kind, number), partitions=cuts)


def plan(*devices: Device) -> Plan:
    return Plan(planner="p", devices=devices)


def verbs(found: PlanDiff) -> dict[str, int]:
    return dict(Counter(change.verb for change in found.changes))


def workers(found: PlanDiff) -> tuple[int, int, int]:
    return found.workers_kept, found.workers_started, found.workers_stopped


def test_diff_plans_of_equal_plans_has_no_change() -> None:
    same = plan(device(0, cut(600, "a", "b"), cut(400, "c")))
    found = diff_plans(same, same)
    assert verbs(found) == {"keep": 2}
    assert (found.devices_added, found.devices_removed, found.rates) == ((), (), {})
    assert workers(found) == (2, 0, 0)


def test_diff_plans_keeps_workers_for_smaller_batches_only() -> None:
    old = plan(device(0, cut(500, "a"), cut(500, "b")))
    new = plan(device(0, cut(500, "a", batch=3), cut(500, "b", batch=5)))
    found = diff_plans(old, new)
    assert verbs(found) == {"tune": 1, "reload": 1}
    assert workers(found) == (1, 1, 1)
    faster = diff_plans(old, plan(device(0, cut(500, "a", rate=12), cut(500, "b"))))
    assert verbs(faster) == {"tune": 1, "keep": 1}
    assert faster.rates == {"a": (10, 12)}


def test_diff_plans_assigns_a_verb_to_each_change() -> None:
    old = plan(device(0, cut(500, "a"), cut(200, "b", "c"), cut(100, "d")), device(1, cut(1000, "e")))
    new = plan(device(0, cut(400, "a"), cut(200, "b", "f")), device(2, cut(100, "d"), cut(100, "g")))
    found = diff_plans(old, new)
    assert verbs(found) == {"resize": 1, "refill": 1, "move": 1, "start": 1, "stop": 1}
    (moved,) = [change for change in found.changes if change.verb == "move"]
    assert (moved.origin, moved.device) == ("k-0", "k-2")
    assert (found.devices_added, found.devices_removed) == (("k-2",), ("k-1",))
    assert workers(found) == (0, 4, 4)


def test_diff_plans_counts_procs_as_workers() -> None:
    found = diff_plans(plan(), plan(device(0, cut(500, "a", procs=3))))
    assert workers(found) == (0, 3, 0)


def test_renumber_devices_matches_current_devices() -> None:
    old = plan(device(0, cut(1000, "a")), device(1, cut(500, "b"), cut(500, "c")), device(7, cut(1000, "d")))
    new = plan(device(0, cut(500, "b"), cut(400, "c")), device(1, cut(1000, "d")), device(2, cut(1000, "e")))
    numbers = {it.partitions[0].placements[0].model: it.id.index for it in renumber_devices(new, old).devices}
    assert numbers == {"b": 1, "d": 7, "e": 0}


def test_renumber_devices_with_duplicate_number_uses_it_once() -> None:
    old = plan(device(1, cut(1000, "a")), device(1, cut(1000, "b")))
    new = plan(device(0, cut(1000, "a")), device(1, cut(1000, "b")))
    assert sorted(it.id.index for it in renumber_devices(new, old).devices) == [0, 1]


cuts = st.builds(cut, st.sampled_from((200, 300)), st.sampled_from("abc"), batch=st.integers(1, 3))
plans = st.lists(st.lists(cuts, min_size=1, max_size=3), max_size=5).map(
    lambda all_cuts: plan(*(device(i, *own, kind="kl"[i % 2]) for i, own in enumerate(all_cuts)))
)


@given(plans, plans)
def test_diff_plans_accounts_for_every_partition_once(old: Plan, new: Plan) -> None:
    new = renumber_devices(new, old)
    found = diff_plans(old, new)
    before = [it.before for it in found.changes if it.before]
    after = [it.after for it in found.changes if it.after]
    assert Counter(map(repr, before)) == Counter(repr(it) for one in old.devices for it in one.partitions)
    assert Counter(map(repr, after)) == Counter(repr(it) for one in new.devices for it in one.partitions)
    kept, started, stopped = workers(found)
    assert (kept + stopped, kept + started) == (len(before), len(after))


@given(plans, plans)
def test_renumber_devices_changes_only_numbers(old: Plan, new: Plan) -> None:
    again = renumber_devices(new, old)
    assert len({(it.kind, it.id) for it in again.devices}) == len(new.devices)

    def bare(it: Plan) -> Counter[str]:
        return Counter(repr(msgspec.structs.replace(one, id=0)) for one in it.devices)

    assert bare(again) == bare(new)
    assert set(renumber_devices(new, new).devices) == set(new.devices)
