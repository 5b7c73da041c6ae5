from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cotenant.core.request import Request
from cotenant.live.driver import GAIN, Driver, Tensors
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Arrived, Command, Event, LaneModel, LaneSpec, Reply
from cotenant.worker.wire import Timing


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

    def ran(self, lane: str, model: str, rows: int, seconds: float, timing: Timing) -> None: ...


def test_the_time_to_write_answers_is_part_of_what_was_promised() -> None:
    """The caller of the last one of a batch waits until those before it are written."""
    now = 0.0
    batches: list[tuple[str, int]] = []

    def write(answer: object) -> None:
        nonlocal now
        now += 0.004

    def run(lane: str, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        batches.append((lane, batch))

    async def main() -> None:
        nonlocal now
        dispatcher = Recording()
        driver = Driver(dispatcher, run, Nobody(), clock=lambda: now, drained=lambda lane: None)
        driver.apply((LaneSpec(id="cpu0/0", models=(LaneModel(model="m", latencies=(0.01,)),)),))
        driver.ready("cpu0/0")
        for _ in range(2):
            driver.submit("m", (), write, within=0.1)
            now += 0.01
            driver.finished(*batches.pop(), [()], Timing(0, 0, 0, 0, 0, 0))
        first, second = dispatcher.arrived
        assert first.deadline - first.arrived == pytest.approx(0.1)
        assert second.deadline - second.arrived == pytest.approx(0.1 - GAIN * 0.004)

    asyncio.run(main())
