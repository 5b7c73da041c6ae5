"""Models of a lane take turns, and give way where somebody would be late by them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Outcome, Request
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Applied, Arrived, Command, Finished, LaneModel, LaneSpec, Ready, Reply, Run
from cotenant.runtime.lane import Lane
from cotenant.runtime.turns import next_queue
from tests.runtime.queues import LATENCIES, lane_of, push, request

LANE = LaneId(DeviceId("cpu"), 0)

# Seconds of a batch: a quick model beside two slow ones.
QUICK, SLOW = 0.001, 0.030


@pytest.mark.parametrize(
    ("ran", "deadlines", "model"),
    [
        ((7, 6), (0.1, 0.9), "n"),  # the one that ran longest ago
        ((6, 7), (0.9, 0.1), "m"),  # however near the other's deadline
        ((0, 0), (0.9, 0.1), "n"),  # the earliest deadline, where none has run
        ((6, 7), (0.9, 2 * LATENCIES[0]), "m"),  # which is just in time by turns
        ((6, 7), (0.9, 1.9 * LATENCIES[0]), "n"),  # or else goes first
        ((6, 7), (1.9 * LATENCIES[0],) * 2, "m"),  # unless somebody else would be late by that
    ],
)
def test_next_queue_several_models_waiting_takes_turns_unless_one_would_be_late(
    ran: tuple[int, int], deadlines: tuple[float, float], model: str
) -> None:
    lane = lane_of("m", "n")
    for number, (name, last, deadline) in enumerate(zip("mn", ran, deadlines, strict=True)):
        push(lane.queues[name], request(number, deadline, model=name))
        lane.queues[name].ran = last
    assert next_queue(lane, 0.0)[:3] == (lane.queues[model], 1, 1)


def test_next_queue_only_batches_held_back_says_when_the_first_is_due() -> None:
    lane = lane_of("m", "n", max_queue_delay=0.020)
    push(lane.queues["m"], request(1, 0.9))
    push(lane.queues["n"], request(2, 0.025, model="n"))
    queue, count, rows, again = next_queue(lane, 0.0)
    assert (queue, count, rows) == (None, 0, 0)
    assert again == pytest.approx(0.025 - LATENCIES[1])


def quick_beside_slow(slow: int = 1) -> LaneSpec:
    """The lane of a quick model and two slow ones, whose batches take `slow` rows."""
    return LaneSpec(
        id=LANE,
        models=(
            LaneModel(model="quick", latencies=(QUICK,) * 4),
            LaneModel(model="slow", latencies=(SLOW,) * slow),
            LaneModel(model="slower", latencies=(SLOW,) * slow),
        ),
    )


def waiting(deadlines: dict[str, list[float]]) -> Lane:
    """A free lane on which the quick model ran last, and requests wait with these deadlines."""
    lane = Lane(quick_beside_slow())
    lane.queues["quick"].ran = 1
    for number, (model, due) in enumerate(deadlines.items()):
        push(lane.queues[model], *(request(10 * number + place, each, model=model) for place, each in enumerate(due)))
    return lane


@pytest.mark.parametrize(
    ("deadlines", "model"),
    [
        # Not all can be in time, but the quick one can, and nobody is late by it.
        ({"quick": [0.020], "slow": [0.9], "slower": [0.005]}, "quick"),
        # It makes one late that is in time by turns.
        ({"quick": [0.020], "slow": [SLOW + QUICK / 2], "slower": [0.9]}, "slow"),
        # The last request of a queue is in time only if every round is as planned.
        ({"quick": [0.020], "slow": [0.08, 3 * SLOW + 1.5 * QUICK], "slower": [0.005]}, "slower"),
        ({"quick": [0.020], "slow": [0.08, 3 * SLOW + 2.5 * QUICK], "slower": [0.005]}, "quick"),
        # It cannot be in time itself.
        ({"quick": [QUICK / 2], "slow": [0.9], "slower": [0.9]}, "slow"),
    ],
)
def test_next_queue_where_not_all_are_in_time_runs_who_makes_nobody_late(
    deadlines: dict[str, list[float]], model: str
) -> None:
    lane = waiting(deadlines)
    assert next_queue(lane, 0.0)[0] is lane.queues[model]


def test_next_queue_turn_with_a_short_head_is_not_taken_for_late_by_the_rows_behind_it() -> None:
    """Its next batch is of the head alone, which is in time by turns."""
    lane = Lane(
        LaneSpec(
            id=LANE,
            models=(
                LaneModel(model="turn", latencies=tuple(0.001 * rows for rows in range(1, 9))),
                LaneModel(model="quick", latencies=(0.003,)),
            ),
        )
    )
    lane.queues["quick"].ran = 1
    push(lane.queues["turn"], *(request(n, 0.0035 if n == 0 else 0.5, model="turn") for n in range(6)))
    push(lane.queues["quick"], request(9, 0.0059, model="quick"))
    assert next_queue(lane, 0.0)[0] is lane.queues["turn"]


# On a dispatcher


def started(spec: LaneSpec) -> Dispatcher:
    dispatcher = Dispatcher()
    dispatcher.handle(Applied((spec,)), 0.0)
    dispatcher.handle(Ready(LANE), 0.0)
    return dispatcher


def ends(commands: list[Command]) -> dict[int, Outcome]:
    return {r.id: command.outcome for command in commands if isinstance(command, Reply) for r in command.requests}


def run_out(
    dispatcher: Dispatcher, commands: list[Command], latencies: dict[str, tuple[float, ...]]
) -> dict[int, float]:
    """Let all batches take exactly as long as predicted; return when each request was served."""
    now, served = 0.0, dict[int, float]()
    while running := [command for command in commands if isinstance(command, Run)]:
        (run,) = running
        now += latencies[run.model][len(run.requests) - 1]
        commands = dispatcher.handle(Finished(LANE, run.batch), now)
        served |= {number: now for number, outcome in ends(commands).items() if outcome is Outcome.SERVED}
    return served


def test_quick_model_is_admitted_and_served_between_batches_of_slow_ones() -> None:
    """By turns it would wait for three of their batches."""
    dispatcher = started(quick_beside_slow())
    commands = []
    for number, model in enumerate(("slow", "slower", "slow")):
        commands += dispatcher.handle(Arrived(Request(number, model, 0.0, 0.5)), 0.0)
    commands += dispatcher.handle(Arrived(Request(7, "quick", 0.0, 0.050)), 0.0)
    assert not ends(commands)
    assert dispatcher.late_finish("quick", 0.050, 0.0) < 0.0, "another would be in time as well"
    served = run_out(dispatcher, commands, {"quick": (QUICK,) * 4, "slow": (SLOW,), "slower": (SLOW,)})
    assert served[7] == pytest.approx(SLOW + QUICK)
    assert sorted(served) == [0, 1, 2, 7]


def test_quick_model_is_rejected_where_a_slow_one_would_be_late_by_it() -> None:
    dispatcher = started(quick_beside_slow())
    commands = dispatcher.handle(Arrived(Request(0, "slow", 0.0, 0.5)), 0.0)
    commands += dispatcher.handle(Arrived(Request(1, "slower", 0.0, 2 * SLOW)), 0.0)
    assert not ends(commands)
    assert ends(dispatcher.handle(Arrived(Request(2, "quick", 0.0, 0.050)), 0.0)) == {2: Outcome.REJECTED}
    assert dispatcher.late_finish("quick", 0.050, 0.0) == pytest.approx(2 * SLOW + QUICK)


# Seconds of batches of one row and more: as long whatever their rows, longer with each, much longer from some on.
MODELS = {
    "a": (0.004,) * 8,
    "b": tuple(0.006 + 0.003 * rows for rows in range(8)),
    "c": (0.010, 0.011, *(0.030,) * 6),
}


@settings(suppress_health_check=[HealthCheck.filter_too_much], deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 30).map(lambda tenths: 10 * tenths)), min_size=2, max_size=6
    ),
    st.sampled_from("abc"),
    st.floats(0.0, 1.0),
)
def test_who_is_admitted_before_its_turn_is_in_time_and_makes_nobody_late(
    first: list[tuple[str, int]], model: str, tightness: float
) -> None:
    """Batches take as long as predicted here, and hold all that wait."""
    spec = LaneSpec(id=LANE, models=tuple(LaneModel(model=name, latencies=it) for name, it in MODELS.items()))
    requests = [Request(number, name, 0.0, due / 1000) for number, (name, due) in enumerate(first)]
    in_time = {False: dict[int, float](), True: dict[int, float]()}
    for with_last in (False, True):
        dispatcher = started(spec)
        commands = [command for each in requests for command in dispatcher.handle(Arrived(each), 0.0)]
        if with_last:  # it is due between its own batch at once, and its turn
            by_turn = dispatcher.late_finish(model, 0.0, 0.0)
            last = Request(len(requests), model, 0.0, by_turn - tightness * (by_turn - MODELS[model][0]))
            assume(dispatcher._routes[model].first(1, 0, last.deadline, 0.0)[1] > last.deadline)
            commands += (answer := dispatcher.handle(Arrived(last), 0.0))
            assume(not ends(answer))
            requests.append(last)
        served = run_out(dispatcher, commands, MODELS)
        in_time[with_last] = {number: at for number, at in served.items() if at <= requests[number].deadline + 1e-9}
    assert in_time[True].keys() == in_time[False].keys() | {requests[-1].id}


def test_queue_alone_on_its_lane_has_no_turn_to_go_before() -> None:
    dispatcher = started(LaneSpec(id=LANE, models=(LaneModel(model="slow", latencies=(SLOW,)),)))
    commands = dispatcher.handle(Arrived(Request(0, "slow", 0.0, 0.5)), 0.0)
    commands += dispatcher.handle(Arrived(Request(1, "slow", 0.0, 0.5)), 0.0)
    assert not ends(commands)
    late = dispatcher.handle(Arrived(Request(2, "slow", 0.0, 1.5 * SLOW)), 0.0)
    assert ends(late) == {2: Outcome.REJECTED}
