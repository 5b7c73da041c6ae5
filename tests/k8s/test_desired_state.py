"""All is served that can be, and what cannot be keeps back nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.config import DeviceSettings, ModelSettings
from cotenant.k8s.desired_state import FIRST_WAIT, LONGEST_WAIT, SOON, DesiredState, Reconciler


def model(name: str, slo: float = 1.0) -> ModelSettings:
    return ModelSettings(name=name, slo=slo)


def state(*models: ModelSettings, devices: tuple[DeviceSettings, ...] = ()) -> DesiredState:
    return DesiredState(tuple(sorted(models, key=lambda each: each.name)), devices)


A, B, C = model("a"), model("b"), model("c")
LIMITS = (DeviceSettings(kind="cpu", count=1),)


def test_all_changes_are_applied_at_once() -> None:
    reconciler = Reconciler()
    assert reconciler.next(state(A, B, devices=LIMITS), 0.0) == state(A, B, devices=LIMITS)
    reconciler.applied(state(A, B, devices=LIMITS))
    assert reconciler.next(state(A, B, devices=LIMITS), 1.0) is None


def test_set_that_is_rejected_is_tried_one_by_one() -> None:
    reconciler = Reconciler()
    wanted = state(A, B, C)
    reconciler.rejected(reconciler.next(wanted, 0.0) or state(), "no", 0.0)
    assert reconciler.next(wanted, 0.0) == state(A)
    reconciler.applied(state(A))
    assert reconciler.next(wanted, 0.0) == state(A, B)
    reconciler.rejected(state(A, B), "b is broken", 0.0)
    assert reconciler.reason(B) == "b is broken"
    assert reconciler.next(wanted, 0.0) == state(A, C)
    reconciler.applied(state(A, C))
    assert reconciler.next(wanted, 0.0) is None
    assert reconciler.due(0.0) == FIRST_WAIT
    assert reconciler.next(wanted, FIRST_WAIT) == state(A, B, C)


def test_change_that_is_rejected_leaves_what_was_in_force() -> None:
    reconciler = Reconciler()
    reconciler.applied(state(A))
    tighter = model("a", 0.001)
    assert reconciler.next(state(tighter), 0.0) == state(tighter)
    reconciler.rejected(state(tighter), "too tight", 0.0)
    assert reconciler.next(state(tighter), 1.0) is None
    assert reconciler.in_force == state(A)
    assert reconciler.next(state(tighter, B), 1.0) == state(A, B)


def test_what_is_deleted_leaves_though_what_is_new_is_rejected() -> None:
    reconciler = Reconciler()
    reconciler.applied(state(A))
    reconciler.rejected(reconciler.next(state(B), 0.0) or state(), "broken", 0.0)
    assert reconciler.next(state(B), 1.0) == state()
    reconciler.applied(state())
    assert reconciler.next(state(B), 2.0) is None


def test_change_that_is_corrected_is_tried_at_once() -> None:
    reconciler = Reconciler()
    reconciler.rejected(state(A), "broken", 0.0)
    assert reconciler.next(state(A), 1.0) is None
    assert reconciler.next(state(model("a", 2.0)), 1.0) == state(model("a", 2.0))
    assert reconciler.reason(A) == ""


def test_waits_double_up_to_a_limit() -> None:
    reconciler, now, waits = Reconciler(), 0.0, []
    for _ in range(8):
        assert reconciler.next(state(A), now) == state(A)
        reconciler.rejected(state(A), "broken", now)
        waits.append(reconciler.due(now) or 0.0)
        now += waits[-1]
    assert waits[:3] == [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT]
    assert waits[-1] == LONGEST_WAIT


def test_limits_that_are_rejected_keep_back_no_model() -> None:
    reconciler = Reconciler()
    wanted = state(A, devices=LIMITS)
    reconciler.rejected(reconciler.next(wanted, 0.0) or state(), "no", 0.0)
    assert reconciler.next(wanted, 0.0) == state(devices=LIMITS)
    reconciler.rejected(state(devices=LIMITS), "no such cut", 0.0)
    assert reconciler.next(wanted, 0.0) == state(A)
    assert reconciler.reason(LIMITS) == "no such cut"


def test_revision_that_was_overtaken_is_tried_again_soon() -> None:
    reconciler = Reconciler()
    reconciler.overtaken(0.0)
    assert reconciler.next(state(A), SOON / 2) is None
    assert reconciler.next(state(A), SOON) == state(A)


names = st.sampled_from("abcdef")
slos = st.sampled_from([0.001, 1.0, 2.0])  # the first is one that no server keeps
wishes = st.lists(
    st.tuples(
        st.dictionaries(names, slos).map(lambda given: state(*(model(name, slo) for name, slo in given.items()))),
        st.integers(0, 12),
    ),
    min_size=1,
    max_size=6,
)


@given(wishes)
def test_server_comes_to_serve_all_that_it_can(wishes: list[tuple[DesiredState, int]]) -> None:
    reconciler, now = Reconciler(), 0.0

    def attempt(wanted: DesiredState) -> bool:
        nonlocal now
        asked = reconciler.next(wanted, now)
        now += 0.1
        if asked is None:
            return False
        assert {each.name for each in asked.models} <= {each.name for each in wanted.models}
        if any(each.slo == 0.001 for each in asked.models):
            reconciler.rejected(asked, "too tight", now)
        else:
            reconciler.applied(asked)
        return True

    for wanted, attempts in wishes:
        for _ in range(attempts):
            attempt(wanted)
    before = reconciler.in_force
    for _ in range(20):
        if not attempt(wanted):
            break
    else:
        raise AssertionError("it does not settle")
    served = {each.name: each for each in reconciler.in_force.models}
    kept = {each.name: each for each in before.models}
    for each in wanted.models:
        assert served.get(each.name) == (each if each.slo != 0.001 else kept.get(each.name))
    assert served.keys() <= {each.name for each in wanted.models}
