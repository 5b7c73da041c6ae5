"""At most one leads at any time, whatever clocks show and whenever somebody looks."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cotenant.k8s.election import Election, LeaseRecord, read_lease

DURATION = 10.0


def record(holder: str, renewed: str = "1", version: str = "1", duration: float = DURATION) -> LeaseRecord:
    return LeaseRecord(holder=holder, duration=duration, renewed=renewed, acquired="", transitions=3, version=version)


def test_lease_that_is_not_there_or_released_is_taken_at_once() -> None:
    election = Election("a", DURATION)
    election.observe(None, 0.0)
    assert election.may_take(0.0)
    election.observe(record(""), 1.0)
    assert election.may_take(1.0)


def test_lease_of_another_is_taken_only_after_it_was_seen_unrenewed_for_its_duration() -> None:
    election = Election("a", DURATION)
    election.observe(record("b"), 100.0)
    assert not election.may_take(109.9)
    assert not election.is_lost, "it never held the lease"
    election.observe(record("b", renewed="2", version="2"), 109.9)
    assert not election.may_take(119.8)
    election.observe(record("b", renewed="2", version="2"), 119.8)
    assert election.may_take(119.9)


def test_renewal_times_hours_in_the_past_or_future_change_nothing() -> None:
    for renewed in ("1970-01-01T00:00:00Z", "2999-01-01T00:00:00Z", "nonsense"):
        election = Election("a", DURATION)
        election.observe(record("b", renewed=renewed), 0.0)
        assert not election.may_take(9.9)
        assert election.may_take(10.0)


def test_duration_is_that_of_the_holder() -> None:
    election = Election("a", 1.0)
    election.observe(record("b", duration=60.0), 0.0)
    assert not election.may_take(59.0)


def test_lease_that_somebody_made_endless_runs_out_all_the_same() -> None:
    election = Election("a", DURATION)
    election.observe(record("b", duration=1e9), 0.0)
    assert not election.may_take(299.0)
    assert election.may_take(300.0)


def test_leader_that_cannot_renew_no_longer_leads_but_has_not_lost() -> None:
    election = Election("a", DURATION)
    election.held(record("a"), 0.0)
    assert election.leads(9.9)
    assert not election.leads(10.0)
    assert not election.is_lost
    election.observe(record("b", version="2"), 11.0)
    assert election.is_lost
    assert not election.leads(0.1)


def test_lease_edited_by_hand_is_read_as_far_as_it_goes() -> None:
    read = read_lease({"metadata": {"resourceVersion": "7"}, "spec": {"holderIdentity": None}})
    assert read == LeaseRecord(holder="", duration=0.0, renewed="", acquired="", transitions=0, version="7")
    assert read_lease({"metadata": {}}).holder == ""


def test_transitions_count_changes_of_the_holder() -> None:
    election = Election("a", DURATION)
    election.observe(record("b"), 0.0)
    assert election.body(None, "lease", "default", 0.0)["spec"]["leaseTransitions"] == 4
    election.held(record("a"), 0.0)
    spec = election.body(None, "lease", "default", 0.0)["spec"]
    assert (spec["leaseTransitions"], spec["renewTime"]) == (3, "1970-01-01T00:00:00.000000Z")


class Store:
    """One Lease, as an API server keeps it."""

    def __init__(self) -> None:
        self.body: dict[str, Any] | None = None
        self.version = 0

    def write(self, body: dict[str, Any], over: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return what is stored; None for a conflict."""
        now = None if self.body is None else self.body["metadata"]["resourceVersion"]
        if (None if over is None else over["metadata"]["resourceVersion"]) != now:
            return None
        self.version += 1
        self.body = {"metadata": {**body["metadata"], "resourceVersion": str(self.version)}, "spec": body["spec"]}
        return self.body


steps = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["read", "write", "write", "release", "restart"]),
        st.floats(0.0, 4.0),
        st.floats(0.0, 2.0),
    ),
    max_size=80,
)


@given(steps, st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3))
def test_never_do_two_lead_at_once(moves: list[tuple[int, str, float, float]], skews: list[float]) -> None:
    store, now = Store(), 0.0
    elections = [Election(f"front-{i}", DURATION) for i in range(3)]
    read: list[dict[str, Any] | None] = [None, None, None]
    for who, what, wait, delay in moves:
        now += wait
        election, skew = elections[who], skews[who]
        if what == "restart":
            elections[who] = Election(f"front-{who}", DURATION)
        elif what == "read":
            read[who] = store.body
            election.observe(None if read[who] is None else read_lease(read[who] or {}), now + skew)
        elif what == "release" and election.leads(now + skew) and store.body is not None:
            if read_lease(store.body).holder == election.identity:
                store.write(election.released(store.body), store.body)
                elections[who] = Election(f"front-{who}", DURATION)  # it ends
        elif what == "write" and not election.is_lost and election.may_take(now + skew):
            asked_at = now + skew
            body = election.body(read[who], "lease", "default", 1e9)
            now += delay
            if (written := store.write(body, read[who])) is not None:
                read[who] = written
                election.held(read_lease(written), asked_at)
        leading = [each.identity for each, ahead in zip(elections, skews, strict=True) if each.leads(now + ahead)]
        assert len(leading) <= 1, leading
        assert not leading or store.body is not None


def test_someone_leads_again_once_the_leader_is_gone() -> None:
    store = Store()
    first, second = Election("a", DURATION), Election("b", DURATION)
    first.held(read_lease(store.write(first.body(None, "lease", "d", 0.0), None) or {}), 0.0)
    taken = None
    for tick in range(30):
        second.observe(read_lease(store.body or {}), float(tick))
        if second.may_take(float(tick)):
            taken = tick
            break
    assert taken == 10
