"""Tell Prometheus of devices, their partitions and who uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CollectorRegistry, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from cotenant.core.units import WHOLE
from cotenant.k8s.exporter.readings import DeviceReading
from cotenant.k8s.pods.request import SharePlacement
from cotenant.k8s.resource import ObjectKey

Users = Mapping[ObjectKey, SharePlacement]
# Name, what it is, and its value; None where the GPU does not report it.
_READINGS: tuple[tuple[str, str, Callable[[DeviceReading], float | None]], ...] = (
    ("memory_bytes", "Memory of the GPU.", lambda r: r.report.memory),
    ("memory_used_bytes", "Used memory of the GPU.", lambda r: r.used.get(r.report.uuid)),
    ("utilization_ratio", "Part of the time in which a kernel ran.", lambda r: r.utilisation),
    ("memory_bandwidth_ratio", "Part of the time in which memory was accessed.", lambda r: r.bandwidth),
    ("power_watts", "Power draw.", lambda r: r.power),
    ("processes", "Processes computing on it.", lambda r: r.processes),
)


class DeviceCollector(Collector):
    """Collect the metrics of one node. readings, users: return what is known now: the devices, and the shares of pods
    on this node."""

    def __init__(self, node: str, readings: Callable[[], Sequence[DeviceReading]], users: Callable[[], Users]) -> None:
        self._node = node
        self._readings = readings
        self._users = users

    def registry(self) -> CollectorRegistry:
        """Return a registry with these metrics."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def describe(self) -> list[Metric]:
        return []  # what there is, is known once it is asked for

    def collect(self) -> Iterator[Metric]:
        readings, users = self._readings(), self._users()
        info = InfoMetricFamily("cotenant_device", "A GPU.", labels=("device", "node", "kind", "product", "mig"))
        for each in readings:
            report = each.report
            info.add_metric((report.uuid, self._node, report.kind, each.name, str(report.mig).lower()), {})
        yield info
        for name, text, value in _READINGS:
            family = GaugeMetricFamily(f"cotenant_device_{name}", text, labels=("device",))
            for each in readings:
                if (number := value(each)) is not None:
                    family.add_metric((each.report.uuid,), number)
            yield family
        yield from self._partitions(readings, users)

    def _partitions(self, readings: Sequence[DeviceReading], users: Users) -> Iterator[Metric]:
        labels = ("device", "partition")
        share = GaugeMetricFamily("cotenant_device_partition_share_ratio", "Share of a partition.", labels=labels)
        used = GaugeMetricFamily("cotenant_device_partition_memory_used_bytes", "Memory taken.", labels=labels)
        count = GaugeMetricFamily("cotenant_device_partition_users", "Pods that have it.", labels=labels)
        rate = GaugeMetricFamily(
            "cotenant_device_partition_user_rate",
            "Requests/s that a pod has asked for.",
            labels=(*labels, "namespace", "pod", "model"),
        )
        free = GaugeMetricFamily("cotenant_device_free_share_ratio", "Unassigned share.", labels=("device",))
        for each in readings:
            report = each.report
            own = {key: placed for key, placed in users.items() if placed.device == report.uuid}
            shares = {one.uuid: one.share for one in report.instances}
            held = set()
            for key, placed in own.items():
                partition = placed.visible if report.mig else str(placed.slot)
                shares.setdefault(partition, placed.share)
                held.add(partition)
                rate.add_metric((report.uuid, partition, key.namespace, key.name, placed.model), placed.rate)
            for partition, thousandths in shares.items():
                share.add_metric((report.uuid, partition), thousandths / WHOLE)
                users_here = sum((p.visible if report.mig else str(p.slot)) == partition for p in own.values())
                count.add_metric((report.uuid, partition), users_here)
                if partition in each.used:
                    used.add_metric((report.uuid, partition), each.used[partition])
            taken = sum(thousandths for partition, thousandths in shares.items() if partition in held)
            free.add_metric((report.uuid,), max(0, WHOLE - taken) / WHOLE)
        yield from (share, used, count, rate, free)
