"""What a request needs before it is submitted: done at once where it is little, else in a thread, and ended once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from cotenant.core.request import Outcome
from cotenant.errors import CancelledError, FailedError, InvalidError, RequestError, UnavailableError
from cotenant.live.limits import MAX_AT_ONCE
from cotenant.live.oip import Done, InferResponse
from cotenant.live.preparation import Preparations

ANSWER = InferResponse(model="m", version="1", outputs=())


class Core:
    """Takes requests that are prepared. submitted: with what their preparation returned; ended: how requests did."""

    def __init__(self) -> None:
        self.preparations = Preparations(self.cancel, lambda _model, _began, outcome: self.counted.append(outcome))
        self.counted: list[Outcome] = []
        self.submitted: list[object] = []
        self.ended: list[InferResponse | RequestError] = []
        self.cancelled: list[int] = []
        self.done: Done | None = None

    def submit(self, result: object, done: Done) -> int:
        self.submitted.append(result)
        self.done = done
        return 7

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        assert self.done is not None
        self.done(CancelledError("it was submitted"))

    def prepare(self, work: Callable[[], object], size: int = MAX_AT_ONCE + 1, within: float = 60.0) -> int:
        return self.preparations.prepare("m", work, size, self.submit, self.ended.append, within=within)

    async def settled(self) -> None:
        for _ in range(200):
            await asyncio.sleep(0.005)
            if self.submitted or self.ended:
                return


def test_little_work_is_done_at_once() -> None:
    core = Core()
    assert core.prepare(threading.get_ident, MAX_AT_ONCE) == 7
    assert core.submitted == [threading.get_ident()] and not core.preparations

    def refuse() -> None:
        raise InvalidError("no")

    with pytest.raises(InvalidError):
        core.prepare(refuse, 0)


def test_much_work_is_done_in_a_thread_while_the_loop_goes_on() -> None:
    async def main() -> None:
        core, gate = Core(), threading.Event()

        def work() -> int:
            assert gate.wait(10)
            return threading.get_ident()

        handle = core.prepare(work)
        await asyncio.sleep(0.02)  # the loop runs, though the work waits
        assert handle < 0 and not core.submitted and len(core.preparations) == 1
        gate.set()
        await core.settled()
        assert core.submitted != [threading.get_ident()] and not core.ended and len(core.preparations) == 1
        assert core.done is not None
        core.done(ANSWER)
        assert core.ended == [ANSWER] and not core.preparations
        core.preparations.cancel(handle)
        assert len(core.ended) == 1 and not core.cancelled

    asyncio.run(main())


def test_request_that_is_cancelled_while_it_is_prepared_is_not_submitted() -> None:
    async def main() -> None:
        core, gate, worked = Core(), threading.Event(), threading.Event()

        def work() -> None:
            gate.wait(10)
            worked.set()

        handle = core.prepare(work)
        core.preparations.cancel(handle)
        core.preparations.cancel(handle)
        assert [type(end) for end in core.ended] == [CancelledError] and not core.preparations
        gate.set()
        await asyncio.to_thread(worked.wait, 10)
        await asyncio.sleep(0.02)
        assert not core.submitted and len(core.ended) == 1 and core.counted == [Outcome.CANCELLED]

    asyncio.run(main())


def test_request_expires_while_it_is_prepared() -> None:
    async def main() -> None:
        core, gate = Core(), threading.Event()
        core.prepare(lambda: gate.wait(10), within=0.01)
        await core.settled()
        (end,) = core.ended
        assert isinstance(end, UnavailableError) and "expired" in str(end)
        assert core.counted == [Outcome.EXPIRED] and not core.preparations
        gate.set()
        await asyncio.sleep(0.05)
        assert not core.submitted and len(core.ended) == 1

    asyncio.run(main())


def test_request_that_is_cancelled_after_it_was_prepared_ends_as_any_other() -> None:
    async def main() -> None:
        core = Core()
        handle = core.prepare(lambda: 1)
        await core.settled()
        core.preparations.cancel(handle)
        assert core.cancelled == [7] and [str(end) for end in core.ended] == ["it was submitted"]
        assert not core.preparations

    asyncio.run(main())


def test_work_that_fails_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    async def main(error: Exception) -> RequestError | InferResponse:
        core = Core()

        def work() -> None:
            raise error

        core.prepare(work)
        await core.settled()
        assert not core.submitted and not core.preparations
        (end,) = core.ended
        return end

    assert isinstance(asyncio.run(main(InvalidError("shrunk"))), InvalidError) and not caplog.records
    end = asyncio.run(main(ZeroDivisionError()))
    assert isinstance(end, FailedError) and "ZeroDivisionError" not in str(end)
    assert "could not be prepared" in caplog.text
