"""Long random runs of the dispatcher, each told in one hash: of all that it answered, and when.

    python -m tests.same.stories

prints them as JSON, for whichever build of the package is the first on the path. Two builds that make the same
decisions print the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator

import numpy as np

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Request
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import (
    Applied,
    Cancelled,
    Command,
    Died,
    Event,
    Failed,
    LaneModel,
    LaneSpec,
    Ready,
    Reply,
    Restarting,
    Run,
)
from cotenant.runtime.log import encode
from cotenant.sim.loop import Script, play

Events = list[tuple[float, Event]]


def told(
    specs: tuple[LaneSpec, ...],
    requests: Iterator[Request],
    events: Events,
    followers: Callable[[Reply, float], list[Request]],
) -> str:
    digest = hashlib.sha256()
    dispatcher = Dispatcher()

    def handle(event: Event, now: float) -> list[Command]:
        commands = dispatcher.handle(event, now)
        digest.update(encode((now, commands)))
        return commands

    planned = {(lane.id, model.model): model.latencies for lane in specs for model in lane.models}
    noise = np.random.default_rng(1)

    def service(run: Run, now: float) -> float:
        rows = sum(request.size for request in run.requests)
        return planned[run.lane, run.model][rows - 1] * float(noise.lognormal(0.0, 0.2))

    up: Events = [(0.0, Applied(specs)), *((0.0, Ready(lane.id)) for lane in specs)]
    events = up + sorted(events, key=lambda entry: entry[0])
    play(handle, requests, service, followers, Script(events))
    dispatcher.invariants()
    return digest.hexdigest()


def latencies(rng: np.random.Generator, batch: int) -> tuple[float, ...]:
    fixed, row = rng.uniform(0.002, 0.02), rng.uniform(0.0005, 0.004)
    return tuple(float(fixed + row * rows) for rows in range(1, batch + 1))


def fleet(rng: np.random.Generator, lanes: int, models: int, each: int) -> tuple[LaneSpec, ...]:
    """Lanes of `each` of the models, some of which wait for their batches to fill."""
    return tuple(
        LaneSpec(
            id=LaneId(DeviceId("k", lane // 2), lane % 2),
            models=tuple(
                LaneModel(
                    model=f"m{model}",
                    latencies=latencies(rng, int(rng.integers(1, 17))),
                    max_queue_delay=float(rng.choice((0.0, 0.0, 0.004))),
                )
                for model in rng.choice(models, each, replace=False)
            ),
        )
        for lane in range(lanes)
    )


def capacity(specs: tuple[LaneSpec, ...]) -> float:
    """Requests/s that the lanes could answer in full batches, about."""
    return sum(
        sum(len(model.latencies) for model in lane.models) / sum(model.latencies[-1] for model in lane.models)
        for lane in specs
    )


def arriving(
    rng: np.random.Generator, count: int, rate: float, models: int, *, largest: int = 1, priorities: int = 1
) -> Iterator[Request]:
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    names = rng.integers(0, models, count).tolist()
    within = rng.uniform(0.03, 0.15, count).tolist()
    sizes = rng.integers(1, largest + 1, count).tolist()
    urgency = rng.integers(0, priorities, count).tolist()
    for number, time in enumerate(times):
        deadline = time + within[number]
        yield Request(number, f"m{names[number]}", time, deadline, sizes[number], urgency[number])


def mishaps(rng: np.random.Generator, specs: tuple[LaneSpec, ...], seconds: float, count: int) -> Events:
    """Deaths and restarts, batches that fail, callers that leave, and other plans."""
    events: Events = []
    for time in rng.uniform(0, seconds, count).tolist():
        lane = specs[int(rng.integers(len(specs)))].id
        match int(rng.integers(4)):
            case 0:
                back = Restarting(lane, time + float(rng.uniform(0, 0.1)))
                events += [(time, Died(lane, "killed")), (time, back), (time + 0.05, Ready(lane))]
            case 1:
                events.append((time, Failed(lane, int(rng.integers(count * 20)), "broken")))
            case 2:
                events += [(time, Cancelled(int(number))) for number in rng.integers(0, count * 100, 50)]
            case 3:
                kept = tuple(spec for spec in specs if rng.random() < 0.8)
                events += [(time, Applied(kept)), (time + 0.02, Applied(specs))]
                events += [(time + 0.03, Ready(spec.id)) for spec in specs if spec not in kept]
    return events


def story(seed: int, count: int = 8000) -> str:
    rng = np.random.default_rng(seed)
    lanes, each = int(rng.choice((1, 3, 8, 40))), int(rng.integers(1, 4))
    models = each if lanes > 20 else int(rng.integers(each, 6))
    specs = fleet(rng, lanes, models, each)
    rate = capacity(specs) * float(rng.choice((0.1, 0.5, 0.9, 1.5)))
    plain = seed % 2 == 0
    requests = arriving(rng, count, rate, models, largest=1 if plain else 40, priorities=1 if plain else 2)
    events = [] if plain else mishaps(rng, specs, count / rate, count // 100)
    extra = iter(range(count, 2 * count))

    def followers(reply: Reply, now: float) -> list[Request]:
        """Some callers ask again at once, or a little later."""
        if seed % 3:
            return []
        asked = [request for request in reply.requests if request.id % 5 == 0]
        return [
            Request(next(extra), request.model, now + 0.001 * (request.id % 2), now + 0.1)
            for request in asked
            if request.id < count
        ]

    return told(specs, requests, events, followers)


def main() -> None:
    import cotenant.runtime.dispatcher as module

    print(json.dumps({"module": module.__file__, "stories": [story(seed) for seed in range(24)]}))  # noqa: T201


if __name__ == "__main__":
    main()
