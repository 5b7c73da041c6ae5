"""Read what HetSev's metric repository holds: request rates and latencies of models, utilisation of devices.

Each query covers a window that ends now. A series without a sample in it, of a server that is gone or that Prometheus
no longer reaches, has no value: stale is the same as unknown, and unknown is never 0. A target that two jobs scrape
counts once.

Devices are those of NVIDIA's DCGM exporter and of our own, by the UUID of the GPU. What DCGM cannot tell it says with
values out of all range, which are left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import msgspec

from cotenant.errors import PrometheusError
from cotenant.k8s.resource import ObjectKey
from cotenant.k8s.scaling.prometheus import PrometheusClient, Sample

logger = logging.getLogger(__name__)

WINDOW = 60.0  # seconds; at least four scrapes at Prometheus' usual 15 s
QUANTILE = 0.99
WINDOW_NAME = "$window"  # in a query: where the window stands

# Of `cotenant serve`; scraped twice, all of a series but `job` and what it brings is the same.
RATES = f"sum by (model) (max by (model, outcome, instance) (rate(cotenant_requests_total[{WINDOW_NAME}])))"
LATENCIES = (
    f"histogram_quantile({QUANTILE}, sum by (model, le) (max by (model, le, instance)"
    f" (rate(cotenant_request_latency_seconds_bucket[{WINDOW_NAME}]))))"
)

DCGM = "DCGM_"
MIB = 1 << 20
ROUNDING = 1.01  # of what is measured over a window

# Metric → factor to a part from 0 to 1, or to bytes; the earlier ones where a device has several. GPU_UTIL is not told
# of GPUs with MIG, and PROF fields not by every GPU.
UTILISATION = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 1.0,
    "DCGM_FI_DEV_GPU_UTIL": 0.01,
    "cotenant_device_utilization_ratio": 1.0,
}
MEMORY = {"DCGM_FI_DEV_FB_USED": float(MIB), "cotenant_device_memory_used_bytes": 1.0}
MAX_MEMORY = 1 << 46  # bytes; DCGM's blanks lie above, also in MiB


class GpuKey(msgspec.Struct, frozen=True, order=True):
    """Tell devices apart. uuid: of the GPU. instance: DCGM's number of a MIG instance on it; "" for the GPU."""

    uuid: str
    instance: str = ""


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """How a device was used. utilisation: part of the window in which a kernel ran, from 0 to 1; None: not known.
    memory: bytes in use; None: not known. pods: on it, as DCGM exporter tells."""

    utilisation: float | None = None
    memory: int | None = None
    pods: frozenset[ObjectKey] = frozenset()


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the last window. rates: requests/s that arrived; latencies: in seconds, 99 of 100 requests; both
    by model. What is not known is not there."""

    rates: dict[str, float] = {}
    latencies: dict[str, float] = {}
    devices: dict[GpuKey, DeviceUse] = {}

    @property
    def utilisation(self) -> float | None:
        """The mean utilisation of all devices of which one is known; None: of none."""
        known = [each.utilisation for each in self.devices.values() if each.utilisation is not None]
        return sum(known) / len(known) if known else None


class MetricRepository:
    """Read metrics of models and devices out of a Prometheus. rates, latencies: queries, of which each answers with one
    series for a model, with its name in the label `model`; `$window` in them stands for the window. window: seconds."""

    def __init__(
        self,
        client: PrometheusClient,
        *,
        rates: str = RATES,
        latencies: str = LATENCIES,
        window: float = WINDOW,
    ) -> None:
        self._client = client
        self._window = f"{max(1, round(window * 1000))}ms"
        self._rates = rates.replace(WINDOW_NAME, self._window)
        self._latencies = latencies.replace(WINDOW_NAME, self._window)
        self._told = ""

    async def read(self) -> Observed:
        """Return what is known now. Raises PrometheusError where Prometheus does not tell the rates. Nothing else
        enters a decision: where it is not told, it is not there, and a warning says why, once."""
        names = (*UTILISATION, *MEMORY)
        queries = (self._rates, self._latencies, *(f"avg_over_time({name}[{self._window}])" for name in names))
        first, *others = await asyncio.gather(*map(self._client.query, queries), return_exceptions=True)
        if isinstance(first, BaseException):
            raise first
        rates, missing = by_model(first, self._rates), ""
        answers: list[tuple[Sample, ...]] = []
        for answer in others:
            if isinstance(answer, PrometheusError):
                missing = missing or str(answer)
                answers.append(())
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers.append(answer)
        try:
            latencies = by_model(answers[0], self._latencies)
        except PrometheusError as error:
            latencies, missing = {}, missing or str(error)
        if missing and missing != self._told:
            logger.warning("not all latencies and utilisations are known: %s", missing)
        self._told = missing
        return Observed(rates=rates, latencies=latencies, devices=by_device(dict(zip(names, answers[1:], strict=True))))


def by_model(samples: Iterable[Sample], query: str) -> dict[str, float]:
    """Return values by model. Raises PrometheusError for a series without a model, two of one model, or a value below
    0."""
    found: dict[str, float] = {}
    for each in samples:
        model = each.labels.get("model")
        if not model:
            raise PrometheusError(
                f"{query}: a series has no label 'model'; write sum by (model) (…), or label_replace() another", 200
            )
        if model in found:
            raise PrometheusError(f"{query}: model {model!r} has two series; write sum by (model) (…)", 200)
        if each.value < 0:
            raise PrometheusError(f"{query}: model {model!r} has {each.value:g}, which is below 0", 200)
        found[model] = each.value
    return found


def by_device(answers: dict[str, tuple[Sample, ...]]) -> dict[GpuKey, DeviceUse]:
    """Return the use of devices by what each metric of `UTILISATION` and `MEMORY` has. Of one that is told twice, such
    as by two jobs that scrape one exporter, or for each pod that shares it, the larger value counts."""
    utilisation: dict[GpuKey, float] = {}
    memory: dict[GpuKey, float] = {}
    pods: dict[GpuKey, set[ObjectKey]] = {}
    for metrics, limit, values in ((UTILISATION, 1.0, utilisation), (MEMORY, float(MAX_MEMORY), memory)):
        for name, factor in metrics.items():
            samples = answers.get(name, ())
            renamed = any("exported_pod" in each.labels for each in samples)
            known: dict[GpuKey, float] = {}
            for each in samples:
                device = _device(name, each.labels)
                if device is None:
                    continue
                if name.startswith(DCGM) and (pod := _pod(each.labels, renamed)) is not None:
                    pods.setdefault(device, set()).add(pod)
                value = each.value * factor
                if 0 <= value <= limit * ROUNDING:
                    known[device] = max(known.get(device, 0.0), min(value, limit))
            for device, value in known.items():
                values.setdefault(device, value)
    return {
        device: DeviceUse(
            utilisation=utilisation.get(device),
            memory=round(memory[device]) if device in memory else None,
            pods=frozenset(pods.get(device, ())),
        )
        for device in sorted(utilisation.keys() | memory.keys() | pods.keys())
    }


def _device(metric: str, labels: dict[str, str]) -> GpuKey | None:
    uuid = labels.get("UUID" if metric.startswith(DCGM) else "device")
    return GpuKey(uuid, labels.get("GPU_I_ID", "")) if uuid else None


def _pod(labels: dict[str, str], renamed: bool) -> ObjectKey | None:
    """Return the pod that uses a device. renamed: Prometheus keeps `pod` for the exporter's own, and what the exporter
    says is in `exported_pod`, which is missing where no pod uses the device."""
    prefix = "exported_" if renamed else ""
    name = labels.get(f"{prefix}pod")
    return ObjectKey(labels.get(f"{prefix}namespace", ""), name) if name else None
