from __future__ import annotations

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.runtime.lending import BOARD_SIZE, MAX_LOOK, MIN_LOOK, SLOTS, Borrower, LendingBoard, look_interval
from cotenant.worker import main
from cotenant.worker.cpu_throttle import CpuThrottle


def board() -> LendingBoard:
    return LendingBoard(memoryview(bytearray(b"\xff" * BOARD_SIZE)), fresh=True)


def lane(shared: LendingBoard, *cores: int, held: float = 0.0, has_work: bool = True) -> int:
    slot = shared.open(cores)
    assert slot is not None
    shared.set_work(slot, has_work)
    if held:
        shared.hold(slot, held)
    return slot


def test_worker_that_is_alone_may_resume() -> None:
    shared = board()
    assert shared.may_resume(lane(shared, 0, held=5.0))


def test_worker_is_held_while_another_of_its_cores_is_at_work() -> None:
    shared = board()
    held, other = lane(shared, 0, 1, held=5.0), lane(shared, 1)
    assert not shared.may_resume(held)
    shared.set_work(other, False)
    assert shared.may_resume(held)


def test_lane_on_other_cores_holds_nobody() -> None:
    shared = board()
    held, other = lane(shared, 0, held=5.0), lane(shared, 1)
    assert shared.may_resume(held)
    shared.move(other, (0, 1))
    assert not shared.may_resume(held)


def test_among_held_workers_the_first_due_goes_first() -> None:
    shared = board()
    late, early = lane(shared, 0, held=5.0), lane(shared, 0, held=4.0)
    assert (shared.may_resume(late), shared.may_resume(early)) == (False, True)
    shared.resume(early)  # it is at work again, until the server says that it has none
    assert not shared.may_resume(late)


def test_worker_that_is_gone_holds_nobody() -> None:
    shared = board()
    held, dead = lane(shared, 0, held=5.0), lane(shared, 0, held=4.0)
    shared.clear(dead)
    assert shared.may_resume(held)


def test_slots_are_reused_and_come_to_an_end() -> None:
    shared = board()
    slots = [shared.open((0,)) for _ in range(SLOTS)]
    assert slots == [*range(1, SLOTS), None]
    shared.close(7)
    assert (shared.open((0,)), shared.open((0,))) == (7, None)


def test_workers_see_what_the_server_writes() -> None:
    memory = bytearray(BOARD_SIZE)
    server = LendingBoard(memoryview(memory), fresh=True)
    held, other = lane(server, 3), lane(server, 3)
    worker = Borrower(LendingBoard(memoryview(memory)), held)
    worker.hold(5.0)
    assert not worker.may_resume()
    server.set_work(other, False)
    assert worker.may_resume()


@given(
    lanes=st.lists(
        st.tuples(st.sets(st.integers(0, 3), min_size=1), st.booleans(), st.sampled_from([0.0, 1.0, 2.0])), min_size=1
    )
)
def test_of_lanes_with_work_on_a_core_one_can_always_go_on(
    lanes: list[tuple[set[int], bool, float]],
) -> None:
    """One that shares no core with any at work and is due first: nothing is held for ever."""
    shared = board()
    slots = [lane(shared, *cores, held=held, has_work=has_work) for cores, has_work, held in lanes]
    waiting = [slot for slot, (_, has_work, held) in zip(slots, lanes, strict=True) if has_work and held]
    computing = any(has_work and not held for _, has_work, held in lanes)
    assert computing or not waiting or any(shared.may_resume(slot) for slot in waiting)


@given(left=st.floats(1e-9, 1e4))
def test_a_held_worker_looks_again_soon_but_not_always(left: float) -> None:
    assert 0 < look_interval(left) <= min(left, MAX_LOOK)
    assert look_interval(left) >= min(left, MIN_LOOK)


def test_hold_ends_at_once_where_nobody_else_has_work() -> None:
    shared = board()
    slot = lane(shared, 0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        main.hold(theirs, time.monotonic() + 3600, Borrower(shared, slot), CpuThrottle(1.0))
    assert shared.may_resume(lane(shared, 0, held=9e9)) is False  # the first lane is at work, and not held any more


def test_hold_ends_where_the_server_is_gone() -> None:
    shared = board()
    slot, other = lane(shared, 0), lane(shared, 0)
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        main.hold(theirs, time.monotonic() + 3600, Borrower(shared, slot), CpuThrottle(1.0))
    shared.hold(other, 9e9)
    assert not shared.may_resume(other)  # the first lane is held no longer, though the other was at work all the time


def test_looking_at_the_board_is_not_charged() -> None:
    shared = board()
    slot = lane(shared, 0)
    used = iter([0.0, 0.010, 0.013, 0.023])
    throttle = CpuThrottle(0.5, used=lambda: next(used))
    due, cost = throttle.charge(started=100.0)
    assert (due, cost) == (100.0 + 0.020, 0.010)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        main.hold(theirs, time.monotonic() + 3600, Borrower(shared, slot), throttle)  # which takes 3 ms
    assert throttle.charge(started=101.0)[1] == pytest.approx(0.010)
