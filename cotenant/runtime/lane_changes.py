"""Change a dispatcher's lanes to those of another plan: new ones, ones that drain, requests that lose their place."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.identity import LaneId
from cotenant.core.request import Request
from cotenant.runtime.events import Command, Drained, LaneSpec
from cotenant.runtime.lane import Lane, Queue
from cotenant.runtime.routing import ModelRoutes


def change_lanes(
    lanes: dict[LaneId, Lane], specs: Sequence[LaneSpec], commands: list[Command]
) -> list[tuple[Lane, list[Request]]]:
    """Change `lanes` to those of a plan; return the requests to route anew, with the lanes that they waited for.

    A lane that is in no plan any more drains until its batch has ended, and reports in `commands` that it is drained.
    New queues learn from the queue that ran their model last.
    """
    displaced: list[tuple[Lane, list[Request]]] = []
    observed: dict[str, Queue] = {}  # the queue that ran each model last
    for lane in lanes.values():
        for queue in lane.queue_list:
            if queue.ran and (queue.model not in observed or queue.ran > observed[queue.model].ran):
                observed[queue.model] = queue
    wanted = {spec.id: spec for spec in specs}
    for lane in list(lanes.values()):
        spec = wanted.get(lane.id)
        if spec is None and not lane.draining:
            displaced.append((lane, lane.take_all()))
            if lane.batch is None:
                del lanes[lane.id]
                commands.append(Drained(lane.id))
            else:
                lane.draining = True
        elif spec is not None:
            lane.draining = False
            displaced.append((lane, lane.update(spec)))
    for spec in specs:
        if spec.id not in lanes:
            fresh = lanes[spec.id] = Lane(spec)
            for queue in fresh.queue_list:
                if queue.model in observed:
                    queue.learn_from(observed[queue.model])
    return displaced


def routes_by_model(lanes: dict[LaneId, Lane], specs: Sequence[LaneSpec]) -> dict[str, ModelRoutes]:
    """Return the routes of each model over the lanes of a plan, in its order. Lanes that drain have none."""
    for lane in lanes.values():
        lane.routed = []
    holding: dict[str, list[Queue]] = {}
    for spec in specs:
        for queue in lanes[spec.id].queues.values():
            holding.setdefault(queue.model, []).append(queue)
    return {model: ModelRoutes(queues) for model, queues in holding.items()}
