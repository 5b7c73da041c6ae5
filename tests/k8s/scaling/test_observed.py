"""What is read of rates, latencies and devices: of a real Prometheus that scrapes our own metrics and DCGM exporter's,
and by what their names and labels mean."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from cotenant.core.request import Outcome, Request
from cotenant.errors import PrometheusError
from cotenant.k8s.resource import ObjectKey
from cotenant.k8s.scaling.observed import (
    DeviceUse,
    GpuKey,
    MetricRepository,
    Observed,
    by_device,
    by_model,
)
from cotenant.k8s.scaling.prometheus import PrometheusClient, Sample
from cotenant.live.metrics import ServerCollector, render
from cotenant.live.statistics import ModelCounts
from cotenant.runtime.events import Reply
from tests.k8s.eventually import eventually
from tests.k8s.scaling.prometheus_server import pages, scraping

LIMIT = 100.0  # seconds, for a machine with much to do
RATE, LATENCY = 40.0, 0.035  # s, in the bucket from 0.02 to 0.05

# As DCGM exporter 3 writes it on Kubernetes, of a whole GPU and of MIG instances, with what it cannot tell.
DCGM = """\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",device="nvidia0",modelName="Tesla V100-SXM2-16GB",Hostname="n1",\
container="main",namespace="serving",pod="resnet-v100-0"} 50
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b",device="nvidia1",modelName="Tesla V100-SXM2-16GB",Hostname="n1"} 0
# HELP DCGM_FI_DEV_FB_USED Framebuffer memory used (in MiB).
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",device="nvidia0",Hostname="n1",\
container="main",namespace="serving",pod="resnet-v100-0"} 1420
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-b",device="nvidia1",Hostname="n1"} 9223372036854775794
# HELP DCGM_FI_PROF_GR_ENGINE_ACTIVE Ratio of time the graphics engine is active.
# TYPE DCGM_FI_PROF_GR_ENGINE_ACTIVE gauge
DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="2",UUID="GPU-c",device="nvidia2",GPU_I_PROFILE="3g.40gb",GPU_I_ID="1",\
Hostname="n2",container="main",namespace="serving",pod="bert-0"} 0.25
DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="2",UUID="GPU-c",device="nvidia2",GPU_I_PROFILE="3g.40gb",GPU_I_ID="2",\
Hostname="n2"} 0
"""

EXPORTER = """\
# TYPE cotenant_device_utilization_ratio gauge
cotenant_device_utilization_ratio{device="GPU-d"} 0.5
# TYPE cotenant_device_memory_used_bytes gauge
cotenant_device_memory_used_bytes{device="GPU-d"} 1048576
"""


class Server:
    """The metrics page of `cotenant serve`, by its own collector: a model at a steady rate, and one without requests.
    One request in four is rejected, which has arrived all the same."""

    def __init__(self) -> None:
        self.counts = ModelCounts("resnet", "1")
        self.started = time.monotonic()
        self.sent = 0

    def page(self) -> str:
        while self.sent < (time.monotonic() - self.started) * RATE:
            self.sent += 1
            request = Request(self.sent, "resnet", arrived=1.0, deadline=2.0)
            outcome = Outcome.REJECTED if self.sent % 4 == 0 else Outcome.SERVED
            self.counts.ended(Reply((request,), outcome, "" if self.sent % 4 else "full"), 1.0 + LATENCY)
        collector = ServerCollector([self.counts, ModelCounts("idle", "1")], [], backend="cpu", isolation="none")
        return render(collector, "text/plain")[0].decode()


def repository(client: PrometheusClient, **options: Any) -> MetricRepository:
    return MetricRepository(client, **{"window": 5.0} | options)


Scenario = Callable[[PrometheusClient], Awaitable[None]]
Play = Callable[[Scenario], None]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Run scenarios with one Prometheus, of devices alone: each would take five seconds until its first scrape."""
    with asyncio.Runner() as runner:
        texts = {"dcgm": lambda: DCGM, "exporter": lambda: EXPORTER}
        stack = AsyncExitStack()

        async def begin() -> PrometheusClient:
            target = await stack.enter_async_context(pages(texts))
            jobs = {name: (target, name) for name in texts}
            return await stack.enter_async_context(scraping(tmp_path_factory.mktemp("prometheus"), jobs))

        async def limited(scenario: Scenario) -> None:
            async with asyncio.timeout(LIMIT):
                await scenario(client)

        try:
            client = runner.run(begin())
            yield lambda scenario: runner.run(limited(scenario))
        finally:
            runner.run(stack.aclose())


def test_real_prometheus_tells_rates_and_latencies_of_our_own_metrics(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT), pages({"server": Server().page}) as target:
            jobs = {"server": (target, "server"), "twice": (target, "server")}
            async with scraping(tmp_path, jobs) as client:

                async def filled() -> Observed | None:
                    found = await repository(client).read()
                    return found if found.rates.get("resnet") == pytest.approx(RATE, rel=0.15) else None

                found: Observed = await eventually(filled)  # and not twice that, though two jobs scrape it
                # What the docs give for Triton, whose names our server has, too; of one of the jobs.
                triton = (
                    'sum by (model) (rate({__name__=~"nv_inference_request_(success|failure)",job="server"}[$window]))'
                )
                assert (await repository(client, rates=triton).read()).rates["resnet"] == pytest.approx(RATE, rel=0.3)
        assert found.latencies.keys() == {"resnet"} and 0.02 < found.latencies["resnet"] <= 0.05
        assert found.rates.keys() <= {"resnet", "idle"} and found.devices == {} and found.utilisation is None

    asyncio.run(main())


def test_real_prometheus_tells_devices_by_the_names_of_dcgm_exporter(play: Play) -> None:
    async def scenario(client: PrometheusClient) -> None:
        async def filled() -> Observed | None:
            found = await repository(client).read()
            return found if len(found.devices) == 5 else None

        await eventually(filled)
        found = await repository(client).read()  # what came with a scrape between two queries is there for all now
        assert found.devices == {
            GpuKey("GPU-a"): DeviceUse(
                utilisation=0.5,
                memory=1420 << 20,
                pods=frozenset([ObjectKey("serving", "resnet-v100-0")]),
            ),
            GpuKey("GPU-b"): DeviceUse(utilisation=0.0),
            GpuKey("GPU-c", "1"): DeviceUse(utilisation=0.25, pods=frozenset([ObjectKey("serving", "bert-0")])),
            GpuKey("GPU-c", "2"): DeviceUse(utilisation=0.0),
            GpuKey("GPU-d"): DeviceUse(utilisation=0.5, memory=1 << 20),
        }
        assert found.utilisation == pytest.approx((0.5 + 0 + 0.25 + 0 + 0.5) / 5)
        assert found.rates == {}  # not known, which is not 0

    play(scenario)


def test_real_prometheus_forgets_what_is_stale(tmp_path: Path) -> None:
    """Series of a target that is gone end within the window, long before Prometheus' own five minutes."""

    async def main() -> None:
        async with asyncio.timeout(LIMIT), pages({"server": Server().page}) as target, AsyncExitStack() as node:
            gone = await node.enter_async_context(pages({"dcgm": lambda: DCGM}))
            async with scraping(tmp_path, {"server": (target, "server"), "dcgm": (gone, "dcgm")}) as client:
                known = repository(client, window=2.0)

                async def all_devices() -> bool:
                    return len((await known.read()).devices) == 4  # scraped one after the other

                async def only_rates() -> bool:
                    found = await known.read()
                    return not found.devices and found.rates.get("resnet", 0.0) > 0

                await eventually(all_devices)
                await node.aclose()
                await eventually(only_rates)
                assert (await known.read()).utilisation is None

    asyncio.run(main())


def test_real_prometheus_refuses_a_query_that_is_none(play: Play) -> None:
    async def scenario(client: PrometheusClient) -> None:
        with pytest.raises(PrometheusError, match=r"does not answer sum\( \(400\): bad_data: .*parse error"):
            await repository(client, rates="sum(").read()
        with pytest.raises(PrometheusError, match="is a matrix and no instant vector"):
            await repository(client, rates="up[$window]").read()
        with pytest.raises(PrometheusError, match="a series has no label 'model'; write sum by"):
            await repository(client, rates="up").read()
        assert await client.query("up * NaN") == () == await client.query("up / 0")

    play(scenario)


def test_only_rates_have_to_be_told(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    """What enters no decision may fail, in the query or in what it answers with, and is said once."""
    rates = "label_replace(vector(3), 'model', 'a', '', '')"

    async def scenario(client: PrometheusClient) -> None:
        for latencies, said in (("sum(", "parse error"), ("vector(1)", "a series has no label 'model'")):
            known = repository(client, rates=rates, latencies=latencies)
            for _ in range(2):
                found = await known.read()
                assert found.rates == {"a": 3.0} and found.latencies == {}
            (record,) = caplog.records
            assert record.getMessage().startswith("not all latencies and utilisations are known: ")
            assert said in record.getMessage()
            caplog.clear()

    with caplog.at_level(logging.WARNING):
        play(scenario)


def samples(**values: float) -> list[Sample]:
    return [Sample({"model": model}, value) for model, value in values.items()]


def test_values_by_model_are_one_each_and_none_below_0() -> None:
    assert by_model(samples(a=1.0, b=0.0), "q") == {"a": 1.0, "b": 0.0}
    with pytest.raises(PrometheusError, match="q: model 'a' has two series"):
        by_model([*samples(a=1.0), *samples(a=1.0)], "q")
    with pytest.raises(PrometheusError, match="q: model 'a' has -1, which is below 0"):
        by_model(samples(a=-1.0), "q")


def dcgm(value: float, **labels: str) -> Sample:
    return Sample({"UUID": "GPU-a"} | labels, value)


def test_device_that_is_told_twice_counts_once() -> None:
    found = by_device(
        {
            "DCGM_FI_DEV_GPU_UTIL": (dcgm(40, pod="x", namespace="n"), dcgm(50, pod="y", namespace="n")),
            "cotenant_device_utilization_ratio": (Sample({"device": "GPU-a"}, 0.9),),
        }
    )
    pods = frozenset([ObjectKey("n", "x"), ObjectKey("n", "y")])
    assert found == {GpuKey("GPU-a"): DeviceUse(utilisation=0.5, pods=pods)}


def test_profiling_metric_is_preferred_where_a_device_has_both() -> None:
    found = by_device({"DCGM_FI_DEV_GPU_UTIL": (dcgm(90),), "DCGM_FI_PROF_GR_ENGINE_ACTIVE": (dcgm(0.3),)})
    assert found[GpuKey("GPU-a")].utilisation == 0.3


@pytest.mark.parametrize("blank", [9223372036854775792.0, 140737488355328.0, 2147483632.0, -1.0])
def test_value_out_of_range_is_not_known(blank: float) -> None:
    found = by_device(
        {
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE": (dcgm(blank),),
            "DCGM_FI_DEV_FB_USED": (dcgm(blank),),
            "DCGM_FI_DEV_GPU_UTIL": (dcgm(75),),
        }
    )
    assert found == {GpuKey("GPU-a"): DeviceUse(utilisation=0.75)}


def test_labels_that_prometheus_renames_are_the_exporters_own() -> None:
    """Without `honor_labels`, `pod` is the exporter's pod, also of a device that nobody uses."""
    found = by_device(
        {
            "DCGM_FI_DEV_GPU_UTIL": (
                dcgm(10, pod="dcgm-x", namespace="gpu", exported_pod="bert", exported_namespace="serving"),
                Sample({"UUID": "GPU-b", "pod": "dcgm-x", "namespace": "gpu"}, 0.0),
                Sample({"gpu": "3"}, 5.0),  # of no device that could be told from others
            )
        }
    )
    assert found == {
        GpuKey("GPU-a"): DeviceUse(utilisation=0.1, pods=frozenset([ObjectKey("serving", "bert")])),
        GpuKey("GPU-b"): DeviceUse(utilisation=0.0),
    }
