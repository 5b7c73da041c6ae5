"""A replica is predicted as it would decide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.request import Outcome
from cotenant.k8s.picker.replica import Prediction, Replica
from cotenant.runtime.admission_state import AdmissionState, ModelTarget
from cotenant.runtime.standing import STANDING
from tests.k8s.picker.states import TARGET, VirtualServer

# Pause before each request, its model, and its seconds.
ARRIVALS = st.lists(
    st.tuples(st.floats(0, 0.02), st.sampled_from("mn"), st.sampled_from([TARGET, 0.05, 0.03])), max_size=40
)
LANES = st.sampled_from(
    [
        ({"m": 1.0, "n": 1.0},),
        ({"m": 1.0}, {"n": 0.7}),
        ({"m": 1.0, "n": 2.0}, {"m": 0.5}),
        tuple({"m": 1.0 + 0.1 * slot, "n": 1.0} for slot in range(8)),  # more than are scanned one by one
    ]
)


@given(LANES, ARRIVALS, st.integers(0, 40))
def test_predict_says_what_the_server_decides(
    lanes: tuple[dict[str, float], ...], arrivals: list[tuple[float, str, float]], known: int
) -> None:
    """The state is told once; what follows is predicted, and each request that is admitted is sent."""
    server, now = VirtualServer(*lanes), 0.0
    for number, (pause, model, within) in enumerate(arrivals[:known]):
        now += pause
        server.arrive(number, model, now + within, now)
    replica = Replica(server.state(now), 500.0 + now)
    for number, (pause, model, within) in enumerate(arrivals[known:], known):
        now += pause
        predicted = replica.predict(model, 500 + now + within, 500 + now)
        assert server.arrive(number, model, now + within, now) == predicted.admitted
        if predicted.admitted:
            replica.admit(model, 500 + now + within, 500 + now)


def test_predict_where_queues_stand_says_what_the_server_decides() -> None:
    server, now, number = VirtualServer({"m": 1.0}), 0.0, 0
    while now < STANDING * TARGET + 2 * TARGET:  # three times what the lane can do
        now, number = now + 0.0008, number + 1
        server.arrive(number, "m", now + TARGET, now)
    crowded = 0
    for _ in range(10):
        now += 0.0203  # no batch ends at that moment
        replica = Replica(server.state(now), 500.0 + now)
        for _ in range(20):
            number += 1
            predicted = replica.predict("m", 500 + now + TARGET, 500 + now)
            assert server.arrive(number, "m", now + TARGET, now) == predicted.admitted
            if predicted.admitted:
                replica.admit("m", 500 + now + TARGET, 500 + now)
            else:
                crowded += predicted.finish <= 500 + now + TARGET
    assert crowded


def test_predict_an_idle_server_finishes_after_one_batch() -> None:
    replica = Replica(VirtualServer({"m": 1.0}).state(0.0), 0.0)
    assert replica.predict("m", 1.0, 0.5) == Prediction(pytest.approx(0.511), True)  # type: ignore[arg-type]


def test_predict_a_model_without_a_lane_never_finishes() -> None:
    state = AdmissionState(accepting=True, models={"m": ModelTarget(timeout=1.0)}, lanes=())
    assert Replica(state, 0.0).predict("m", 1.0, 0.0) == Prediction(float("inf"), False)


def test_predict_an_application_asks_its_first_stages_for_their_part_of_the_time() -> None:
    server = VirtualServer({"m": 1.0}, {"n": 3.0})
    told = server.state(0.0)
    models = told.models | {"app": ModelTarget(timeout=0.1, stages=(("m", 0.05), ("n", 0.02)))}
    replica = Replica(AdmissionState(accepting=True, models=models, lanes=told.lanes), 0.0)
    assert replica.predict("app", 0.1, 0.0) == Prediction(pytest.approx(0.061), True)  # type: ignore[arg-type]
    # With 40 ms, `n` has 32 of them, and takes 33.
    assert not replica.predict("app", 0.04, 0.0).admitted
    for _ in range(9):
        replica.admit("app", 0.1, 0.0)
    assert not replica.predict("app", 0.1, 0.0).admitted


def test_admit_of_an_unknown_model_counts_nothing() -> None:
    replica = Replica(VirtualServer({"m": 1.0}).state(0.0), 0.0)
    replica.admit("other", 1.0, 0.0)
    assert replica.predict("m", 1.0, 0.0).finish == pytest.approx(0.011)


def test_virtual_server_serves_what_it_admits() -> None:
    """Else the property above would hold of nothing."""
    server = VirtualServer({"m": 1.0})
    taken = [number for number in range(60) if server.arrive(number, "m", 0.1, 0.0)]
    server.advance(1.0)
    assert 10 < len(taken) < 60
    assert all(server.outcomes[number] is Outcome.SERVED and server.finished[number] <= 0.1 + 1e-9 for number in taken)
