"""A request goes to the lane that will be done first, however many there are and in whatever order they are asked."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Request
from cotenant.runtime.admission import finish_time
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import (
    Applied,
    Arrived,
    Cancelled,
    Command,
    Died,
    Finished,
    LaneModel,
    LaneSpec,
    Ready,
    Restarting,
    Run,
)
from cotenant.runtime.lane import Lane
from cotenant.runtime.routing import LINEAR_SCAN
from cotenant.runtime.turns import runs_in_time_before_its_turn


def fleet(lanes: int, alike: bool) -> tuple[LaneSpec, ...]:
    """Each holds "m", every third "n" too."""
    return tuple(
        LaneSpec(
            id=LaneId(DeviceId("cpu"), lane),
            models=tuple(
                LaneModel(
                    model=model,
                    latencies=tuple(0.01 + 0.002 * rows + (0 if alike else 0.001 * (lane % 5)) for rows in range(1, 5)),
                )
                for model in ("mn" if lane % 3 == 0 else "m")
            ),
        )
        for lane in range(lanes)
    )


def by_asking_all(lanes: dict[LaneId, Lane], request: Request, now: float) -> tuple[LaneId, float] | None:
    """The first in the order of the plan of those that are done first."""
    asked = [
        (finish_time(queue, queue.ahead(request.priority, request.deadline) + request.size, now), number, lane.id)
        for number, lane in enumerate(lanes.values())
        if (lane.up or lane.back_at > now)
        and (queue := lane.queues.get(request.model)) is not None
        and request.size <= queue.batch
    ]
    return (min(asked)[2], min(asked)[0]) if asked else None


def before_their_turn(lanes: dict[LaneId, Lane], request: Request, now: float) -> list[LaneId]:
    """Those that can run it in time before its turn, in the order of the plan."""
    return [
        lane.id
        for lane in lanes.values()
        if (lane.up or lane.back_at > now)
        and (queue := lane.queues.get(request.model)) is not None
        and request.size <= queue.batch
        and runs_in_time_before_its_turn(
            queue, queue.ahead(request.priority, request.deadline) + request.size, request.deadline, now
        )
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lanes=st.integers(LINEAR_SCAN - 1, 4 * LINEAR_SCAN),
    alike=st.booleans(),
    plain=st.booleans(),
)
def test_routing_chooses_the_lane_that_exhaustive_search_does(seed: int, lanes: int, alike: bool, plain: bool) -> None:
    rng = np.random.default_rng(seed)
    specs = fleet(lanes, alike)
    dispatcher = Dispatcher()
    running: dict[LaneId, int] = {}
    now = 0.0

    def note(commands: list[Command]) -> None:
        dispatcher.invariants()
        running.update({command.lane: command.batch for command in commands if isinstance(command, Run)})

    note(dispatcher.handle(Applied(specs), now))
    for spec in specs:
        note(dispatcher.handle(Ready(spec.id), now))
    for number in range(200):
        now += float(rng.exponential(0.0005)) * int(rng.integers(2))
        what = rng.random()
        if what < 0.7:
            size, priority = (1, 0) if plain else (int(rng.integers(1, 4)), int(rng.integers(2)))
            within = 0.1 if plain else float(rng.uniform(0.02, 0.2))
            request = Request(number, str(rng.choice(["m", "m", "n"])), now, now + within, size, priority)
            best = by_asking_all(dispatcher.lanes, request, now)
            early = before_their_turn(dispatcher.lanes, request, now)
            commands = dispatcher.handle(Arrived(request), now)
            if best is None or best[1] > request.deadline:
                assert [dispatcher._held[number].lane.id] == early[:1] if number in dispatcher._held else not early
            elif number in dispatcher._held:  # or it ended at once, with a batch that was thinned out
                assert dispatcher._held[number].lane.id == best[0]
            note(commands)
        elif what < 0.9 and running:
            lane = sorted(running)[int(rng.integers(len(running)))]
            note(dispatcher.handle(Finished(lane, running.pop(lane)), now))
        elif what < 0.95:
            note(dispatcher.handle(Cancelled(int(rng.integers(number + 1))), now))
        else:
            lane = specs[int(rng.integers(lanes))].id
            if dispatcher.lanes[lane].up:
                running.pop(lane, None)
                note(dispatcher.handle(Died(lane, "killed"), now))
                if rng.random() < 0.5:
                    note(dispatcher.handle(Restarting(lane, now + float(rng.uniform(0, 0.05))), now))
            else:
                note(dispatcher.handle(Ready(lane), now))
