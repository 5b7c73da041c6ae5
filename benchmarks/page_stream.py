"""Measure what the page costs the event loop: 30 models on 20 partitions, each of whose models has answered
requests."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from benchmarks import onnx_models
from benchmarks.harness import show
from cotenant.backends.fake import Fake
from cotenant.core.identity import DeviceId
from cotenant.core.model import Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.core.tensor import Tensor
from cotenant.errors import FailedError
from cotenant.live.deployment import Deployment, ServableModel
from cotenant.live.oip import InferRequest
from cotenant.live.page.feed import PERIOD
from cotenant.live.page.history import POINTS, STEP
from cotenant.live.server import Server
from cotenant.planners import Problem
from cotenant.predictors.samples import Sample
from cotenant.worker.repository import describe, find_model

MODELS, PARTITIONS, STREAMS = 30, 20, 8
SHARE = 1000 // PARTITIONS


def deployment(root: Path) -> Deployment:
    """Place each model on one partition, two on every second."""
    names = [f"model-{number:02}" for number in range(MODELS)]
    for name in names:
        (root / name / "1").mkdir(parents=True)
        onnx_models.identity(root / name / "1" / "model.onnx")
    models = {name: Model(name=name, slo=1.0) for name in names}
    points = [Point(share=share, batch=batch, latency=0.001, memory=0) for share in (50, 1000) for batch in (1, 8)]
    problem = Problem(
        models=tuple(models.values()),
        rates=dict.fromkeys(names, 5.0),
        fleet=Fake().fleet(),
        profiles={(name, "fake"): Profile(name, "fake", points) for name in names},
    )
    cuts = [names[place::PARTITIONS] for place in range(PARTITIONS)]
    partitions = tuple(
        Partition(
            share=SHARE,
            placements=tuple(Placement(model=name, batch=8, rate=5.0, duty=0.002, latency=0.001) for name in held),
        )
        for held in cuts
    )
    entries = {name: find_model(root, name) for name in names}
    return Deployment(
        offered={
            name: ServableModel(entry=entry, info=describe(entry), model=models[name])
            for name, entry in entries.items()
        },
        problem=problem,
        plan=Plan(planner="by hand", devices=(Device(id=DeviceId("fake"), partitions=partitions),)),
        broken={},
    )


async def answer(server: Server, model: str, requests: int) -> None:
    tensor = Tensor("x", "FP32", (1, 16), np.zeros((1, 16), np.float32).tobytes())
    for _ in range(requests):
        answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        server.infer(InferRequest(model=model, inputs=(tensor,)), answered.set_result)
        await answered


async def measure(root: Path) -> None:
    async def prepare(wanted: Collection[str], seen: Sequence[Sample], configs: object, kept: object) -> Deployment:
        raise FailedError("nothing else is to be served")

    given = deployment(root)
    server = Server(given, Fake(), prepare)
    await server.start()
    try:
        await asyncio.gather(*(answer(server, name, 20) for name in given.offered))
        feed = server.page
        feed.stop()
        assert feed._timer is not None
        clock = time.monotonic()
        feed._clock = lambda: clock
        idle: list[float] = []
        ticks: list[float] = []
        points: list[float] = []
        sent = 0

        def send(data: bytes) -> None:
            nonlocal sent
            sent += len(data)

        for _ in range(POINTS):  # nobody listens
            clock += STEP
            idle.append(timed(feed._advance))
        opened = timed(lambda: feed.subscribe(send))
        first, sent = sent, 0
        for _ in range(STREAMS - 1):
            feed.subscribe(send)
        sent = 0
        for second in range(300):
            clock += PERIOD
            (ticks if second % 5 else points).append(timed(feed._advance))
        size = sent / STREAMS / 300
    finally:
        await server.drain(1.0)
        await server.stop(1.0)
    tick, point, rest = (statistics.median(each) for each in (ticks, points, idle))
    part = (tick * 4 + point) / 5 / PERIOD
    show(
        "page_stream",
        f"{MODELS} models, {PARTITIONS} partitions, {STREAMS} pages: a tick {tick * 1e3:.2f} ms, with a point"
        f" {point * 1e3:.2f} ms, {part:.2%} of the event loop, {size / 1024:.1f} KiB/s a page; a page that opens"
        f" {opened * 1e3:.1f} ms and {first / 1024:.0f} KiB; without pages {rest * 1e3:.2f} ms every {STEP:.0f} s",
        tick_ms=tick * 1e3,
        point_ms=point * 1e3,
        part=part,
        open_ms=opened * 1e3,
        first_bytes=first,
        bytes_per_second=size,
        idle_ms=rest * 1e3,
    )


def timed(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder)))


if __name__ == "__main__":
    main()
