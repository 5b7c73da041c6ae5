"""What is rejected unread under overload, rule by rule in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cotenant.live.http.load_shedding import (
    AGAIN,
    BETWEEN,
    INTERVAL,
    LAG_SHARE,
    MAX_LAG,
    MIN_LAG,
    REJECTING,
    REST,
    ROUND,
    WRITING,
    LoadShedder,
)

READING = 0.0001  # seconds to read a request in full
SHORT = MIN_LAG / 2


class Rounds:
    """An event loop and its clock, in the test's hands, and an admission that remembers what it was asked."""

    def __init__(self) -> None:
        self.now = 100.0
        self.polled = self.now
        self.full: set[str] = set()
        self.asked: list[tuple[str, str, float]] = []
        self.soon: list[Callable[[], object]] = []
        self.polls = 0
        self.shortest_target = 0.0
        self.shedder = LoadShedder(self, lambda: self.now)
        self.shedder.attach(self)

    def time(self) -> float:
        return self.polled

    def call_soon(self, callback: Callable[[], object], /) -> None:
        self.soon.append(callback)

    def would_reject(self, model: str, version: str, lost: float) -> bool:
        self.asked.append((model, version, lost))
        return model in self.full

    def poll(self) -> None:
        self.polls += 1

    def begin(self, after: float = 0.0) -> None:
        """Let a round begin, after so many seconds in which the loop waited for sockets."""
        self.now += after
        self.polled = self.now

    def end(self) -> None:
        ending, self.soon = self.soon, []
        for callback in ending:
            callback()

    def round(self, seconds: float, after: float = 0.0) -> list[bool]:
        """Run a round in which sockets are read for so long; return for each request whether it was shed."""
        self.begin(after)
        shed = []
        until = self.now + seconds
        while self.now < until:
            self.shedder.read()
            shed.append(self.shedder.sheds("m", ""))
            self.now += READING
        self.end()
        return shed


@pytest.fixture
def rounds() -> Rounds:
    return Rounds()


def test_loop_that_does_not_lag_sheds_nothing(rounds: Rounds) -> None:
    rounds.full.add("m")
    for _ in range(100):
        assert not any(rounds.round(SHORT, after=2 * REST))
    assert not rounds.asked and not rounds.shedder.active and rounds.shedder.lost == 0.0


def test_lagging_loop_sheds_what_admission_would_reject_after_the_lag(rounds: Rounds) -> None:
    rounds.full.add("m")
    rounds.begin()
    rounds.shedder.read()
    rounds.now += 2 * MIN_LAG
    rounds.shedder.read()
    assert rounds.shedder.sheds("m", "1") and not rounds.shedder.sheds("other", "")
    assert [(model, version) for model, version, _ in rounds.asked] == [("m", "1"), ("other", "")]
    assert [lost for _, _, lost in rounds.asked] == pytest.approx([2 * MIN_LAG] * 2)
    assert rounds.shedder.lost == pytest.approx(2 * MIN_LAG)


def test_model_without_room_is_asked_about_again_soon_and_in_the_next_round(rounds: Rounds) -> None:
    rounds.full.add("m")
    rounds.begin()
    rounds.shedder.read()
    rounds.now += 2 * MIN_LAG
    for _ in range(5):
        rounds.shedder.read()
        assert rounds.shedder.sheds("m", "")
        rounds.now += AGAIN / 10
    assert len(rounds.asked) == 1
    rounds.full.clear()
    rounds.now += AGAIN
    rounds.shedder.read()
    assert not rounds.shedder.sheds("m", "")
    rounds.full.add("m")
    assert rounds.shedder.sheds("m", "")
    rounds.end()
    rounds.full.clear()
    rounds.begin()
    rounds.shedder.read()
    assert not rounds.shedder.sheds("m", "")


def test_request_with_its_own_timeout_is_read_though_its_model_is_full(rounds: Rounds) -> None:
    rounds.full.add("m")
    rounds.round(2 * MIN_LAG)
    rounds.begin()
    assert rounds.shedder.read()
    assert not rounds.shedder.sheds("m", "", hurried=False) and rounds.shedder.sheds("m", "")


def test_lag_counts_from_the_round_before_unless_the_loop_rested(rounds: Rounds) -> None:
    rounds.round(SHORT)
    rounds.begin()
    rounds.shedder.read()
    assert rounds.shedder.lag == pytest.approx(SHORT, rel=0.1)
    rounds.end()
    rounds.begin(after=2 * REST)
    rounds.shedder.read()
    assert rounds.shedder.lag == 0.0


def test_burst_is_read_in_full_where_admission_takes_it(rounds: Rounds) -> None:
    """What the loop catches up with is no overload: each of these rounds lags, and then it rests."""
    for _ in range(10):
        assert not any(rounds.round(INTERVAL - MIN_LAG, after=2 * REST))
        assert not any(rounds.round(SHORT / 2, after=2 * REST))
        assert rounds.shedder.active


def test_standing_lag_sheds_what_a_round_has_no_time_for(rounds: Rounds) -> None:
    while rounds.now < 100.0 + 2 * INTERVAL + 4 * MIN_LAG:
        shed = rounds.round(2 * MIN_LAG)
    read = shed.index(True)
    assert all(shed[read:]) and read * READING == pytest.approx(MIN_LAG, abs=2 * READING)
    # With a timeout of its own, too: it has no time for that either.
    rounds.begin()
    rounds.shedder.read()
    rounds.now += 2 * MIN_LAG
    assert rounds.shedder.sheds("m", "", hurried=False)


def test_long_targets_leave_longer_rounds_to_reading(rounds: Rounds) -> None:
    """What 64 callers send at once may take longer to read than 5 ms; that makes nobody late with targets of 200 ms."""
    rounds.shortest_target = 0.2
    for _ in range(100):
        assert not any(rounds.round(1.5 * MIN_LAG))
    assert not rounds.shedder.active and rounds.shedder.lost > MIN_LAG, "it counts, but is no lag"
    while not any(shed := rounds.round(6 * MIN_LAG)):
        pass
    assert shed.index(True) * READING == pytest.approx(LAG_SHARE * 0.2, abs=2 * READING)
    rounds.shortest_target = 60.0
    rounds.round(12 * MIN_LAG)
    assert rounds.round(12 * MIN_LAG).index(True) * READING == pytest.approx(MAX_LAG, abs=2 * READING)
    rounds.shortest_target = 0.05
    rounds.round(1.5 * MIN_LAG)
    assert any(rounds.round(1.5 * MIN_LAG)), "as short a target does not stand that"


def test_shedding_ends_once_there_was_no_lag_for_an_interval(rounds: Rounds) -> None:
    while not any(rounds.round(2 * MIN_LAG)):
        pass
    rounds.full.add("m")
    rounds.round(SHORT / 2, after=INTERVAL / 2)
    assert rounds.shedder.active
    rounds.round(SHORT / 2, after=INTERVAL)
    assert not rounds.shedder.active
    rounds.full.clear()
    assert not any(rounds.round(2 * MIN_LAG, after=2 * REST)), "what stood before has been forgotten"


def test_lag_ends_also_where_nothing_more_is_read(rounds: Rounds) -> None:
    while not any(rounds.round(2 * MIN_LAG)):
        pass
    rounds.now += INTERVAL / 2
    rounds.shedder.settle()
    assert rounds.shedder.active
    rounds.now += INTERVAL
    rounds.shedder.settle()
    assert not rounds.shedder.active


def test_rejections_are_sent_in_order_and_for_a_part_of_each_round(rounds: Rounds) -> None:
    sent: list[int] = []

    def send(number: int) -> Callable[[], None]:
        def write() -> None:
            sent.append(number)
            rounds.now += REJECTING / 10

        return write

    rounds.begin()
    rounds.shedder.read()
    for number in range(35):
        rounds.shedder.reject(send(number))
    assert not sent
    rounds.end()
    assert sent == list(range(10))
    rounds.begin()
    rounds.shedder.read()  # a round with other requests in it
    rounds.end()
    assert sent == list(range(20))
    rounds.begin()
    rounds.shedder.read()
    assert rounds.shedder.lag == pytest.approx(REJECTING), "since the last round, though something is left of the first"
    rounds.end()
    assert sent == list(range(30))
    rounds.end()  # a round in which nothing is read
    assert sent == list(range(35)) and not rounds.soon


@pytest.mark.parametrize(
    ("reading", "writing"),
    [(0.0, REJECTING), (0.004, WRITING * 0.004), (0.008, ROUND * MIN_LAG - 0.008), (0.02, REJECTING)],
)
def test_rejections_have_as_much_of_a_round_as_reading_took_within_bounds(
    rounds: Rounds, reading: float, writing: float
) -> None:
    def write() -> None:
        rounds.now += REJECTING / 100

    rounds.begin()
    rounds.shedder.read()
    rounds.now += reading
    for _ in range(1000):
        rounds.shedder.reject(write)
    began = rounds.now
    rounds.end()
    assert rounds.now - began == pytest.approx(writing, abs=REJECTING / 50)


def test_workers_are_polled_between_rejections(rounds: Rounds) -> None:
    rounds.begin()
    rounds.shedder.read()
    for _ in range(3 * BETWEEN):
        rounds.shedder.reject(lambda: None)
    rounds.end()
    assert rounds.polls == 3


def test_nothing_is_shed_before_a_loop_is_followed() -> None:
    alone = Rounds()
    alone.shedder = LoadShedder(alone, lambda: alone.now)
    alone.full.add("m")
    assert not any(alone.round(10 * INTERVAL)) and not alone.soon
