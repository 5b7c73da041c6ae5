"""The simulator and the live driver are strangers that carry out the commands of the same dispatcher: given the same
arrivals, both must get the same commands at the same times."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Outcome, Request
from cotenant.core.tensor import Tensor
from cotenant.errors import RequestError
from cotenant.live.driver import TOGETHER, Driver, Tensors
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Applied, Command, Event, LaneModel, LaneSpec, Ready, Reply, Run, Spawn, Split
from cotenant.sim.loop import Script, play
from cotenant.worker.wire import Timing
from tests.virtual_loop import virtual_loop

LANES = (
    LaneSpec(
        id=LaneId(DeviceId("cpu"), 0),
        models=(LaneModel(model="m", latencies=tuple(0.0101 + 0.0013 * n for n in range(1, 9))),),
    ),
    LaneSpec(
        id=LaneId(DeviceId("cpu"), 1),
        models=(
            LaneModel(model="m", latencies=tuple(0.0211 + 0.0017 * n for n in range(1, 5))),
            LaneModel(model="n", latencies=tuple(0.0047 + 0.0029 * n for n in range(1, 7)), max_queue_delay=0.0053),
        ),
    ),
)
TARGETS = {"m": 0.0803, "n": 0.0641}
LATENCIES = {(lane.id, model.model): model.latencies for lane in LANES for model in lane.models}
CAPACITY = {"m": 380.0, "n": 110.0}

Story = list[tuple[float, list[Command]]]


class Recorder(Dispatcher):
    def __init__(self) -> None:
        super().__init__()
        self.story: Story = []

    def handle(self, event: Event, now: float) -> list[Command]:
        commands = super().handle(event, now)
        self.invariants()
        if not isinstance(event, Applied | Ready):
            self.story.append((now, commands))
        return commands


def takes(run: Run) -> float:
    """Up to 30 % longer than planned, for no reason that the dispatcher could know."""
    rows = sum(request.size for request in run.requests)
    return LATENCIES[run.lane, run.model][rows - 1] * (1 + 0.3 * (run.batch * 0.6180339887 % 1))


def arrivals(load: float, seed: int, largest: int, count: int = 400) -> list[Request]:
    """largest: rows of a request, most of which have one."""
    rng = np.random.default_rng(seed)
    rate = load * sum(CAPACITY.values())
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    models = rng.choice(list(CAPACITY), count, p=[rate / sum(CAPACITY.values()) for rate in CAPACITY.values()])
    sizes = np.where(rng.random(count) < 0.2, rng.integers(1, largest + 1, count), 1).tolist()
    return [
        Request(number, model, time, time + TARGETS[model], size)
        for number, (time, model, size) in enumerate(zip(times, models.tolist(), sizes, strict=True), 1)
    ]


def simulated(requests: Iterable[Request]) -> Story:
    recorder = Recorder()
    events: list[tuple[float, Event]] = [(0.0, Applied(LANES)), *((0.0, Ready(lane.id)) for lane in LANES)]
    play(recorder.handle, requests, lambda run, now: takes(run), lambda reply, now: (), Script(events))
    return recorder.story


class Workers:
    """Answers each batch after the time that it takes."""

    driver: Driver

    def run(self, lane: LaneId, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        run = Run(lane, batch, model, tuple(Request(0, model, 0, 0, x.shape[0]) for (x,) in payloads))
        timing = Timing(0, 0, 0, 0, 0, 0)
        asyncio.get_running_loop().call_later(takes(run), self.driver.finished, lane, batch, list(payloads), timing)


class Nobody:
    def ended(self, reply: Reply, now: float) -> None: ...

    def ran(self, lane: LaneId, model: str, rows: int, since: float, ended: float, timing: Timing) -> None: ...


async def driven(requests: Sequence[Request], together: float) -> tuple[Story, dict[int, list[Tensors | RequestError]]]:
    loop = asyncio.get_running_loop()
    recorder, workers = Recorder(), Workers()
    start = loop.time()
    driver = workers.driver = Driver(
        recorder,
        workers.run,
        Nobody(),
        clock=lambda: loop.time() - start,
        drained=lambda lane: None,
        rounding=1e-9,
        together=together,
    )
    driver.tell(Applied(LANES))
    for lane in LANES:
        driver.tell(Ready(lane.id))
    answers: dict[int, list[Tensors | RequestError]] = {request.id: [] for request in requests}

    def submit(request: Request) -> None:
        payload = (Tensor("x", "UINT8", (request.size,), data(request)),)
        answered = answers[request.id].append
        driver.submit(request.model, payload, answered, within=TARGETS[request.model], size=request.size)

    for request in requests:
        loop.call_at(start + request.arrived, submit, request)
    await asyncio.sleep(requests[-1].arrived + 10.0)
    assert driver.in_flight == 0
    return recorder.story, answers


def data(request: Request) -> bytes:
    """Rows that tell of which request they are, and in which order."""
    return bytes((request.id + row) % 256 for row in range(request.size))


@pytest.mark.parametrize("load", [0.3, 0.9, 3.0])
@pytest.mark.parametrize(("seed", "largest"), [(1, 1), (2, 1), (3, 1), (4, 30)])
@pytest.mark.parametrize("together", [0.0, TOGETHER])
def test_simulator_and_driver_get_the_same_commands(load: float, seed: int, largest: int, together: float) -> None:
    requests = arrivals(load / (1 + 0.1 * (largest - 1)), seed, largest)
    loop = virtual_loop()
    try:
        live, answers = loop.run_until_complete(driven(requests, together))
    finally:
        loop.close()
    expected, got = in_order(simulated(requests)), in_order(live)
    assert [_shape(commands) for _, commands in got] == [_shape(commands) for _, commands in expected]
    # looptime keeps time in whole nanoseconds.
    assert [now for now, _ in got] == pytest.approx([now for now, _ in expected], abs=1e-6)

    served = {
        r.id for _, cs in got for c in cs if isinstance(c, Reply) and c.outcome is Outcome.SERVED for r in c.requests
    }
    assert served
    for request in requests:
        (answer,) = answers[request.id]  # exactly one
        if request.id in served:
            assert isinstance(answer, tuple)
            assert bytes(answer[0].data) == data(request)
        else:
            assert isinstance(answer, RequestError)


def in_order(story: Story) -> Story:
    """Leave out where there was nothing to do. Timers of one moment, as those of a request's parts, have no order."""
    told = [entry for entry in story if entry[1]]
    return sorted(told, key=lambda entry: (round(entry[0], 7), repr(_shape(entry[1]))))


def _shape(commands: list[Command]) -> list[tuple[object, ...]]:
    """What is to be done, without the times."""
    shapes: list[tuple[object, ...]] = []
    for command in commands:
        match command:
            case Run(lane, batch, model, requests):
                shapes.append(("run", lane, batch, model, *(request.id for request in requests)))
            case Reply(requests, outcome, reason):
                shapes.append(("reply", outcome, reason, *(request.id for request in requests)))
            case Spawn(whole, stage):
                shapes.append(("spawn", whole, stage))
            case Split(whole, parts):
                shapes.append(("split", whole, *(part.size for part in parts)))
            case _:
                shapes.append((type(command).__name__, command.lane))
    return shapes
