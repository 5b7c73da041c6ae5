"""Which replica gets a request."""

from __future__ import annotations

from collections import Counter

import pytest

from cotenant.core.request import Outcome
from cotenant.k8s.picker.picker import (
    MAX_AGE,
    NO_WORKER,
    NONE_IN_SUBSET,
    NONE_READY,
    EndpointPicker,
    Picked,
    Rejected,
    Unavailable,
)
from cotenant.runtime.admission_state import AdmissionState, ModelTarget
from tests.k8s.picker.states import TARGET, VirtualServer


def picker_of(**servers: VirtualServer) -> EndpointPicker:
    picker = EndpointPicker()
    for name, server in servers.items():
        picker.observe(name, server.state(0.0), 0.0, 0.0)
    return picker


def first(decision: object) -> str:
    assert isinstance(decision, Picked), decision
    return decision.addresses[0]


def test_pick_equal_replicas_share_equally() -> None:
    picker = picker_of(a=VirtualServer({"m": 1.0}), b=VirtualServer({"m": 1.0}), c=VirtualServer({"m": 1.02}))
    picked = Counter(first(picker.pick("m", 0.02 * number)) for number in range(30))
    assert picked == {"a": 10, "b": 10, "c": 10}


def test_pick_an_idle_replica_before_a_busy_one() -> None:
    busy = VirtualServer({"m": 1.0})
    for number in range(6):
        busy.arrive(number, "m", 1.0, 0.0)
    picker = picker_of(busy=busy, idle=VirtualServer({"m": 1.0}))
    assert picker.pick("m", 0.0) == Picked(("idle", "busy"))


def test_pick_of_a_crowd_goes_where_it_is_done_in_time_until_nobody_can() -> None:
    """The fast replica takes about three times as many; every request that is sent is served in time."""
    fast, slow = VirtualServer({"m": 1.0}), VirtualServer({"m": 3.0})
    picker, picked = picker_of(fast=fast, slow=slow), Counter[str]()
    for number in range(200):
        match picker.pick("m", 0.0):
            case Picked((address, *_)):
                picked[address] += 1
                assert {"fast": fast, "slow": slow}[address].arrive(number, "m", TARGET, 0.0)
            case Rejected(reason, wait):
                assert "within its deadline" in reason and 0 < wait < 0.1
                break
    else:
        pytest.fail("nothing was rejected")
    fast.advance(1.0)
    slow.advance(1.0)
    assert set({**fast.outcomes, **slow.outcomes}.values()) == {Outcome.SERVED}
    assert 2 <= picked["fast"] / picked["slow"] <= 6
    assert not fast.arrive(1000, "m", 1.0 + 0.005, 1.0)  # neither would have taken more


def test_pick_is_rejected_where_the_callers_time_is_too_short() -> None:
    picker = picker_of(a=VirtualServer({"m": 1.0}))
    assert picker.pick("m", 0.0, timeout=0.005) == Rejected(
        "no replica could answer it within its deadline",
        pytest.approx(0.006),  # type: ignore[arg-type]
    )
    assert first(picker.pick("m", 0.0, timeout=10.0)) == "a"


def test_pick_only_replicas_with_the_model() -> None:
    picker = picker_of(a=VirtualServer({"m": 1.0}), b=VirtualServer({"n": 1.0}))
    assert picker.pick("n", 0.0) == Picked(("b",))


def test_pick_of_an_unknown_model_or_none_goes_to_each_in_turn() -> None:
    """A replica says itself that it lacks a model."""
    picker = picker_of(a=VirtualServer({"m": 1.0}), b=VirtualServer({"n": 1.0}))
    assert [first(picker.pick(None, 0.0)) for _ in range(4)] == ["a", "b", "a", "b"]
    assert {first(picker.pick("other", 0.0)) for _ in range(2)} == {"a", "b"}


def test_pick_from_a_subset() -> None:
    picker = picker_of(a=VirtualServer({"m": 1.0}), b=VirtualServer({"m": 1.0}))
    assert {first(picker.pick("m", 0.0, subset=["b", "x"])) for _ in range(3)} == {"b"}
    assert picker.pick("m", 0.0, subset=[]) == Unavailable(NONE_IN_SUBSET)
    assert picker.pick("m", 0.0, subset=["x"]) == Unavailable(NONE_IN_SUBSET)


def test_pick_without_a_ready_replica() -> None:
    picker = EndpointPicker()
    assert picker.pick("m", 0.0) == Unavailable(NONE_READY)
    server = VirtualServer({"m": 1.0})
    picker.observe("a", server.state(0.0, accepting=False), 0.0, 0.0)
    assert picker.pick("m", 0.0) == Unavailable(NONE_READY) and not picker.ready(0.0)
    picker.observe("a", server.state(0.0), 0.0, 0.0)
    assert first(picker.pick("m", MAX_AGE)) == "a"
    assert picker.pick("m", 1.01 * MAX_AGE) == Unavailable(NONE_READY)
    picker.observe("a", server.state(2.0), 2.0, 2.0)
    assert picker.ready(2.0)
    picker.lose("a")
    picker.lose("a")
    assert picker.pick("m", 2.0) == Unavailable(NONE_READY)


def test_pick_without_a_worker_is_unavailable() -> None:
    picker = EndpointPicker()
    state = AdmissionState(accepting=True, models={"m": ModelTarget(timeout=1.0)}, lanes=())
    picker.observe("a", state, 0.0, 0.0)
    assert picker.pick("m", 0.0) == Unavailable(NO_WORKER)


def test_observe_keeps_what_was_sent_since_the_replica_was_asked() -> None:
    """The answer may not know of it yet; what was sent before, it does know."""
    server = VirtualServer({"m": 1.0})
    picker = picker_of(a=server)
    empty = server.state(0.0)
    sent = 0
    while isinstance(picker.pick("m", 0.001), Picked):
        sent += 1
    assert sent > 5
    picker.observe("a", empty, 0.0, 0.001)
    assert isinstance(picker.pick("m", 0.001), Rejected)
    picker.observe("a", empty, 0.002, 0.002)
    assert isinstance(picker.pick("m", 0.002), Picked)


def test_observe_of_a_new_replica_does_not_make_it_take_all() -> None:
    picker = picker_of(a=VirtualServer({"m": 1.0}))
    for number in range(50):
        picker.pick("m", 0.02 * number)
    picker.observe("a", VirtualServer({"m": 1.0}).state(0.0), 1.0, 1.0)
    picker.observe("b", VirtualServer({"m": 1.0}).state(0.0), 1.0, 1.0)
    assert Counter(first(picker.pick("m", 1.0 + 0.02 * number)) for number in range(10)) == {"a": 5, "b": 5}


def test_pick_of_many_equal_replicas_shares_about_equally() -> None:
    servers = {f"r{number}": VirtualServer({"m": 1.0}) for number in range(30)}
    picker = picker_of(**servers)
    picked = Counter(first(picker.pick("m", 0.001 * number)) for number in range(900))
    assert picked.keys() == servers.keys() and min(picked.values()) >= 24 and max(picked.values()) <= 36


def test_pick_of_many_finds_the_one_that_has_time() -> None:
    servers = {f"r{number}": VirtualServer({"m": 1.0}) for number in range(30)}
    for name, server in servers.items():
        number = 0
        while name != "r23" and server.arrive(number, "m", TARGET, 0.0):
            number += 1
    picker = picker_of(**servers)
    assert picker.pick("m", 0.0) == Picked(("r23",))
    assert {first(picker.pick("m", 0.0)) for _ in range(10)} == {"r23"}


def test_pick_after_a_rejection_asks_again_once_a_replica_tells_something_new() -> None:
    full = VirtualServer({"m": 1.0})
    number = 0
    while full.arrive(number, "m", TARGET, 0.0):
        number += 1
    picker = picker_of(a=full)
    rejected = picker.pick("m", 0.0)
    assert isinstance(rejected, Rejected)
    assert picker.pick("m", 0.0) == rejected
    picker.observe("a", VirtualServer({"m": 1.0}).state(0.0), 0.0, 0.0)
    assert first(picker.pick("m", 0.0)) == "a"


def test_ready_can_be_asked_for_while_replicas_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus asks in a thread of its own."""
    servers = picker_of(a=VirtualServer({"m": 1.0}), b=VirtualServer({"m": 1.0}))

    def takes_requests(known: object, now: float) -> bool:
        servers.lose("b")
        return True

    monkeypatch.setattr("cotenant.k8s.picker.picker._takes_requests", takes_requests)
    assert servers.ready(0.0) == 2
