from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from cotenant.core.identity import LaneId
from cotenant.core.request import Request
from cotenant.errors import CancelledError, UnavailableError
from cotenant.live.driver import GAIN, Driver, Tensors
from cotenant.live.event_log import EventLog
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Applied, Arrived, Command, Died, Event, LaneModel, LaneSpec, Ready, Reply
from cotenant.worker.wire import Timing

PATIENCE = 60.0  # seconds until a test that waits for something fails


class Recording(Dispatcher):
    def __init__(self) -> None:
        super().__init__()
        self.arrived: list[Request] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, Arrived):
            self.arrived.append(event.request)
        return super().handle(event, now)


class Nobody:
    def ended(self, reply: Reply, now: float) -> None: ...

    def ran(self, lane: LaneId, model: str, rows: int, since: float, ended: float, timing: Timing) -> None: ...


def test_deadline_leaves_the_time_that_writing_responses_takes() -> None:
    """The caller of the last one of a batch waits until those before it are written."""
    now = 0.0
    batches: list[tuple[LaneId, int]] = []

    def write(answer: object) -> None:
        nonlocal now
        now += 0.004

    def run(lane: LaneId, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        batches.append((lane, batch))

    async def main() -> None:
        nonlocal now
        dispatcher = Recording()
        driver = Driver(dispatcher, run, Nobody(), clock=lambda: now, drained=lambda lane: None)
        driver.tell(Applied((LaneSpec(id=LaneId.parse("cpu-0/0"), models=(LaneModel(model="m", latencies=(0.01,)),)),)))
        driver.tell(Ready(LaneId.parse("cpu-0/0")))
        for _ in range(2):
            driver.submit("m", (), write, within=0.1)
            now += 0.01
            driver.finished(*batches.pop(), [()], Timing(0, 0, 0, 0, 0, 0))
        first, second = dispatcher.arrived
        assert first.deadline - first.arrived == pytest.approx(0.1)
        assert second.deadline - second.arrived == pytest.approx(0.1 - GAIN * 0.004)

    asyncio.run(main())


LANE = (LaneSpec(id=LaneId.parse("cpu-0/0"), models=(LaneModel(model="m", latencies=(0.01,)),)),)


def test_response_that_cannot_be_written_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    batches: list[int] = []
    answers: list[object] = []

    def breaks(answer: object) -> None:
        raise ValueError("no such text")

    def run(lane: LaneId, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        batches.append(batch)

    async def main() -> None:
        driver = Driver(Dispatcher(), run, Nobody(), clock=lambda: 0.0, drained=lambda lane: None)
        driver.tell(Applied(LANE))
        driver.tell(Ready(LaneId.parse("cpu-0/0")))
        driver.submit("m", (), breaks, within=1.0)
        driver.submit("m", (), answers.append, within=1.0)
        driver.finished(LaneId.parse("cpu-0/0"), batches[-1], [()], Timing(0, 0, 0, 0, 0, 0))
        driver.finished(LaneId.parse("cpu-0/0"), batches[-1], [()], Timing(0, 0, 0, 0, 0, 0))
        assert len(batches) == 2 and answers == [()] and driver.in_flight == 0

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == ["the answer to request 1 for model 'm' was lost"]


def test_batch_that_cannot_be_handed_over_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    """When the lane comes up, the dispatcher asks for the batch of one model and rejects nothing of what waits."""
    batches: list[int] = []
    answers: dict[str, object] = {}

    def run(lane: LaneId, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        batches.append(batch)
        if len(batches) == 1:
            raise OSError("the connection is closed")

    async def main() -> None:
        driver = Driver(Dispatcher(), run, Nobody(), clock=lambda: 0.0, drained=lambda lane: None)
        driver.tell(Applied(LANE))
        driver.tell(Ready(LANE[0].id))
        driver.submit("m", (), lambda answer: answers.update(first=answer), within=1.0)
        assert str(answers["first"]) == "request for model 'm' failed: OSError: the connection is closed"
        assert driver.busy_since(LANE[0].id) is None
        driver.submit("m", (), lambda answer: answers.update(second=answer), within=1.0)
        driver.finished(LANE[0].id, batches[-1], [()], Timing(0, 0, 0, 0, 0, 0))
        assert answers["second"] == () and driver.in_flight == 0

    asyncio.run(main())
    assert [record.getMessage()[:30] for record in caplog.records] == ["a command was not carried out:"]


def test_driver_deadline_passes_while_the_lane_is_busy_answers_by_timer() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        expired: asyncio.Future[object] = loop.create_future()
        driver = Driver(Dispatcher(), lambda *run: None, Nobody(), clock=loop.time, drained=lambda lane: None)
        driver.tell(Applied(LANE))
        driver.tell(Ready(LaneId.parse("cpu-0/0")))
        driver.submit("m", (), lambda answer: None, within=60.0)  # its batch never ends
        driver.submit("m", (), expired.set_result, within=0.05)
        answer = await asyncio.wait_for(expired, PATIENCE)
        assert isinstance(answer, UnavailableError)
        assert "expired" in str(answer)

    asyncio.run(main())


def test_lane_that_died_while_a_response_was_written_is_not_busy() -> None:
    now = 0.0
    batches: list[int] = []

    def run(lane: LaneId, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        batches.append(batch)

    async def main() -> None:
        nonlocal now
        lane = LANE[0].id
        driver = Driver(Dispatcher(), run, Nobody(), clock=lambda: now, drained=lambda lane: None)
        driver.tell(Applied(LANE))
        driver.tell(Ready(lane))
        driver.submit("m", (), lambda answer: None, within=60.0)
        driver.submit("m", (), lambda answer: driver.tell(Died(lane, "of this")), within=0.05)
        driver.submit("m", (), lambda answer: None, within=60.0)
        now = 0.1  # too late for the second one, which is told before the third one runs
        driver.finished(lane, batches[-1], [()], Timing(0, 0, 0, 0, 0, 0))
        assert len(batches) == 1, "the dispatcher, which had not heard of it, gave the lane another"
        assert driver.busy_since(lane) is None
        driver.tell(Ready(lane))
        assert len(batches) == 2 and driver.busy_since(lane) is not None

    asyncio.run(main())


def test_full_disk_ends_the_event_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[object] = []
    batches: list[int] = []

    def run(lane: LaneId, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        batches.append(batch)

    async def main() -> None:
        with Path("/dev/full").open("wb", buffering=0) as log:
            driver = Driver(
                Dispatcher(), run, Nobody(), clock=lambda: 0.0, drained=lambda lane: None, log=EventLog(log)
            )
            driver.tell(Applied(LANE))
            driver.tell(Ready(LaneId.parse("cpu-0/0")))
            for _ in range(2):
                driver.submit("m", (), answers.append, within=1.0)
                driver.finished(LaneId.parse("cpu-0/0"), batches.pop(), [()], Timing(0, 0, 0, 0, 0, 0))

    asyncio.run(main())
    assert answers == [(), ()]
    (record,) = caplog.records
    assert record.getMessage() == "the event log ends here, and cannot be replayed further: No space left on device"


def test_event_after_the_end_of_the_event_log_is_not_written(tmp_path: Path) -> None:
    with (tmp_path / "events.jsonl").open("wb") as file:
        log = EventLog(file)
        log.write(b"first\n")
    log.write(b"late\n")
    assert (tmp_path / "events.jsonl").read_bytes() == b"first\n"


def test_driver_would_reject_what_it_then_rejects() -> None:
    async def main() -> None:
        answers: list[object] = []
        driver = Driver(Dispatcher(), lambda *batch: None, Nobody(), clock=lambda: 0.0, drained=lambda lane: None)
        assert not driver.would_reject("m", within=1.0), "no lane: for another reason"
        driver.tell(Applied(LANE))
        driver.tell(Ready(LANE[0].id))
        for within in (0.009, 0.011, 0.011, 0.021):
            expected = driver.would_reject("m", within=within)
            answers.clear()
            driver.submit("m", (), answers.append, within=within)
            assert [isinstance(answer, UnavailableError) for answer in answers] == [True] * expected
        assert driver.in_flight == 2

    asyncio.run(main())


def test_requests_of_one_round_of_the_loop_arrive_together() -> None:
    lane, now = LANE[0].id, 0.0
    batches: list[int] = []
    answers: list[object] = []

    def run(lane: LaneId, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        batches.append(len(payloads))

    async def main() -> None:
        nonlocal now
        dispatcher = Recording()
        driver = Driver(dispatcher, run, Nobody(), clock=lambda: now, drained=lambda lane: None, together=0.001)
        larger = LaneModel(model="m", latencies=(0.01,) * 8)
        driver.tell(Applied((LaneSpec(id=lane, models=(larger,)),)))
        driver.tell(Ready(lane))
        for _ in range(3):
            driver.submit("m", (), answers.append, within=1.0)
        assert not batches and driver.in_flight == 3
        await asyncio.sleep(0)
        assert batches == [3] and [request.id for request in dispatcher.arrived] == [1]

        # What comes later is told of before what happens next: a batch that ends, a caller that leaves, a question.
        driver.submit("m", (), answers.append, within=1.0)
        driver.finished(lane, 1, [()] * 3, Timing(0, 0, 0, 0, 0, 0))
        assert batches == [3, 1] and answers == [()] * 3
        driver.cancel(driver.submit("m", (), answers.append, within=1.0))
        assert isinstance(answers[-1], CancelledError)
        for _ in range(8):
            driver.submit("m", (), answers.append, within=0.025)
        assert driver.would_reject("m", within=0.025), "the batch that runs, those that wait, and one more"

        # None waits longer than it may, however long the round is.
        driver.submit("m", (), answers.append, within=1.0)
        told = len(dispatcher.arrived)
        now += 0.001
        driver.submit("m", (), answers.append, within=1.0)
        assert len(dispatcher.arrived) == told + 1

    asyncio.run(main())


def test_driver_tells_when_the_first_full_batch_should_have_ended() -> None:
    async def main() -> None:
        others = [LaneId.parse(f"cpu-0/{slot}") for slot in range(2)]
        driver = Driver(Dispatcher(), lambda *batch: None, Nobody(), clock=lambda: 5.0, drained=lambda lane: None)
        models = (LaneModel(model="m", latencies=(0.01, 0.02)),)
        driver.tell(Applied(tuple(LaneSpec(id=lane, models=models) for lane in others)))
        for lane in others:
            driver.tell(Ready(lane))
        driver.submit("m", (), lambda answer: None, within=1.0)
        assert driver.full_batch_due == math.inf, "another request would have been taken as well"
        driver.finished(others[0], 1, [()], Timing(0, 0, 0, 0, 0, 0))
        for _ in others:
            driver.submit("m", (), lambda answer: None, within=1.0, size=2)
        first = driver.full_batch_due
        assert 5.0 < first < 5.03
        driver.finished(others[0], 2, [()], Timing(0, 0, 0, 0, 0, 0))
        assert first <= driver.full_batch_due < 5.03, "the other lane's"
        driver.tell(Died(others[1], "it was killed"))
        assert driver.busy_since(others[0]) is not None and driver.full_batch_due < math.inf, "it runs there again"
        driver.failed(others[0], 4, "no")
        assert driver.full_batch_due == math.inf

    asyncio.run(main())


class Asked(Dispatcher):
    asked = 0

    def late_finish(self, model: str, deadline: float, now: float) -> float:
        self.asked += 1
        return super().late_finish(model, deadline, now)


def test_crowd_that_would_be_rejected_costs_one_prediction_until_something_ends() -> None:
    now, lane = 0.0, LANE[0].id

    async def main() -> None:
        nonlocal now
        dispatcher = Asked()
        driver = Driver(dispatcher, lambda *batch: None, Nobody(), clock=lambda: now, drained=lambda lane: None)
        driver.tell(Applied(LANE))
        driver.tell(Ready(lane))
        for _ in range(2):  # batches of one row, each 10 ms
            driver.submit("m", (), lambda answer: None, within=1.0)
        assert [driver.would_reject("m", within=0.025) for _ in range(9)] == [True] * 9
        assert dispatcher.asked == 1
        assert not driver.would_reject("m", within=0.035), "it would be done in 30 ms"
        now += 0.006
        assert not driver.would_reject("m", within=0.025), "in 24 ms now"
        assert driver.would_reject("m", within=0.0225)
        driver.finished(lane, 1, [()], Timing(0, 0, 0, 0, 0, 0))
        assert not driver.would_reject("m", within=0.0225), "the lane went on with the next batch"
        assert not driver.would_reject("other", within=0.0)

    asyncio.run(main())


def test_responses_that_once_took_long_to_write_do_not_stop_the_lane_for_ever() -> None:
    """With nothing admitted nothing would be written, and the server never learn that writing is fast again."""
    now, lane, batches = 0.0, LANE[0].id, []

    def write(answer: object) -> None:
        nonlocal now
        now += 30.0

    async def main() -> None:
        driver = Driver(
            Dispatcher(),
            lambda lane, batch, *rest: batches.append(batch),
            Nobody(),
            clock=lambda: now,
            drained=lambda lane: None,
        )
        driver.tell(Applied(LANE))
        driver.tell(Ready(lane))
        driver.submit("m", (), write, within=0.1)
        driver.finished(lane, batches[-1], [()], Timing(0, 0, 0, 0, 0, 0))
        assert not driver.would_reject("m", within=0.1)
        driver.submit("m", (), lambda answer: None, within=0.1)
        assert len(batches) == 2

    asyncio.run(main())


class Books:
    """Note what is counted, and who has an answer by then."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def ended(self, reply: Reply, now: float) -> None:
        self.noted.append(f"{reply.outcome.value} {len(reply.requests)}")

    def ran(self, lane: LaneId, model: str, rows: int, since: float, ended: float, timing: Timing) -> None:
        if ended - since > 1:
            raise ValueError("too long to be true")
        self.noted.append(f"ran {rows} in {ended - since:g}")


def test_answer_is_given_before_its_batch_and_its_request_are_counted() -> None:
    now, books = 0.0, Books()

    async def main() -> None:
        nonlocal now
        driver = Driver(Dispatcher(), lambda *batch: None, books, clock=lambda: now, drained=lambda lane: None)
        driver.tell(Applied(LANE))
        driver.tell(Ready(LANE[0].id))
        driver.submit("m", (), lambda answer: books.noted.append("answered"), within=1.0)
        now += 0.25
        driver.finished(LANE[0].id, 1, [()], Timing(0, 0, 0, 0, 0, 0))

    asyncio.run(main())
    assert books.noted == ["answered", "ran 1 in 0.25", "served 1"]


def test_batch_that_cannot_be_counted_is_answered_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    now, books, answers = 0.0, Books(), list[object]()

    async def main() -> None:
        nonlocal now
        driver = Driver(Dispatcher(), lambda *batch: None, books, clock=lambda: now, drained=lambda lane: None)
        driver.tell(Applied(LANE))
        driver.tell(Ready(LANE[0].id))
        driver.submit("m", (), answers.append, within=9.0)
        now += 5
        driver.finished(LANE[0].id, 1, [()], Timing(0, 0, 0, 0, 0, 0))

    asyncio.run(main())
    assert answers == [()] and books.noted == ["served 1"]
    assert [record.getMessage() for record in caplog.records] == ["batch 1 of model 'm' on cpu-0/0 was not counted"]


def test_request_of_a_lone_caller_does_not_wait_for_the_end_of_the_round() -> None:
    """Whoever is alone twice in a row is taken to be alone; two who come in one round arrive together again."""

    async def main() -> None:
        dispatcher = Recording()
        driver = Driver(
            dispatcher, lambda *batch: None, Nobody(), clock=lambda: 0.0, drained=lambda lane: None, together=0.001
        )
        driver.tell(Applied(LANE))
        driver.tell(Ready(LANE[0].id))
        told = []
        for number in range(1, 5):
            driver.submit("m", (), lambda answer: None, within=1.0)
            told.append(len(dispatcher.arrived) == number)
            await asyncio.sleep(0)
            driver.finished(LANE[0].id, number, [()], Timing(0, 0, 0, 0, 0, 0))
        assert told == [False, True, True, True]
        for _ in range(2):
            driver.submit("m", (), lambda answer: None, within=1.0)
        assert len(dispatcher.arrived) == 5, "the second waits for others of its round"
        await asyncio.sleep(0)
        driver.finished(LANE[0].id, 5, [()], Timing(0, 0, 0, 0, 0, 0))
        driver.finished(LANE[0].id, 6, [()], Timing(0, 0, 0, 0, 0, 0))
        driver.submit("m", (), lambda answer: None, within=1.0)
        assert len(dispatcher.arrived) == 6, "not taken to be alone any more"

    asyncio.run(main())
