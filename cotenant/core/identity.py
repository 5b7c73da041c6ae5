"""Name devices and lanes: values with one spelling each, which is built and parsed here and nowhere else.

| | on this machine | on another node |
|---|---|---|
| device | ``h200-0`` | ``node-a/h200-0`` |
| lane: partition 1 of that device | ``h200-0/1`` | ``node-a/h200-0/1`` |
| lane of that partition's second worker | ``h200-0/1.2`` | ``node-a/h200-0/1.2`` |

Both are strings that know their parts, not structs: the dispatcher and the simulator look lanes up for every batch, and
a string has its hash at hand and compares in C. Each spelling has one meaning, so equal strings are equal values. Order
is that of the parts (``h200-2`` before ``h200-10``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn, Self

from cotenant.errors import ConfigError

_NUMBER = "0|[1-9][0-9]*"
_DEVICE = re.compile(rf"(?:(?P<node>[^/]+)/)?(?P<kind>[^/]+)-(?P<index>{_NUMBER})")
_LANE = re.compile(rf"(?P<device>.+)/(?P<slot>{_NUMBER})(?:\.(?P<worker>[2-9]|[1-9][0-9]+))?", re.DOTALL)


class _Identity(str):
    """Compare and order a string by its parts; immutable."""

    __slots__ = ()

    def _parts(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} {self!r} is immutable; create another")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} {self!r} is immutable; create another")

    def __reduce__(self) -> tuple[Callable[[str], Self], tuple[str]]:
        return type(self).parse, (str(self),)

    @classmethod
    def parse(cls, text: str) -> Self:
        raise NotImplementedError

    def __lt__(self, other: str) -> bool:
        return self._parts() < other._parts() if isinstance(other, type(self)) else NotImplemented

    def __le__(self, other: str) -> bool:
        return self._parts() <= other._parts() if isinstance(other, type(self)) else NotImplemented

    def __gt__(self, other: str) -> bool:
        return self._parts() > other._parts() if isinstance(other, type(self)) else NotImplemented

    def __ge__(self, other: str) -> bool:
        return self._parts() >= other._parts() if isinstance(other, type(self)) else NotImplemented


class DeviceId(_Identity):
    """Identify a device: the one with that index, from 0, among those of its kind on a node ("": this machine).

    kind: as problems and profiles name it, which is ``node-a/h200`` on a node: what a batch takes there differs by the
    network. It may be given so, or by its own name and the node's.

    Raises ConfigError for a kind or node that is empty or contains another slash, or an index below 0.
    """

    __slots__ = ("index", "kind", "node")

    node: str
    kind: str
    index: int  # type: ignore[assignment]  # hides a search for text, which an identity has no use for

    def __new__(cls, kind: str, index: int = 0, *, node: str = "") -> Self:
        given, slash, own = kind.rpartition("/")
        if not own or "/" in given or "/" in node or index < 0 or (slash and (not given or node)):
            where = f" of node {node!r}" if node else ""
            raise ConfigError(
                f"device {index} of kind {kind!r}{where}: a kind is KIND or NODE/KIND, neither of which may contain"
                " another '/', and the first index is 0; rename it"
            )
        node = node or given
        qualified = f"{node}/{own}" if node else own
        identity = super().__new__(cls, f"{qualified}-{index}")
        object.__setattr__(identity, "node", node)
        object.__setattr__(identity, "kind", qualified)
        object.__setattr__(identity, "index", index)
        return identity

    @property
    def local(self) -> DeviceId:
        """The same device as its own machine names it."""
        return DeviceId(own_kind(self.kind), self.index) if self.node else self

    def on(self, node: str) -> DeviceId:
        """Return what a device of this machine is called elsewhere, where this machine is a node of that name."""
        return DeviceId(self.kind, self.index, node=node)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the spelling that `str` gives. Raises ConfigError, with the text, for anything else."""
        match = _DEVICE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} names no device; write KIND-INDEX, such as h200-0, or NODE/KIND-INDEX")
        return cls(match["kind"], int(match["index"]), node=match["node"] or "")

    def _parts(self) -> tuple[str, str, int]:
        return self.node, self.kind, self.index


def own_kind(kind: str) -> str:
    """Return a kind's name on its own machine: ``h200`` of ``node-a/h200``."""
    return kind.rpartition("/")[2]


class LaneId(_Identity):
    """Identify a lane: the worker with that number, from 0, of the partition in a slot, from 0, of a device.

    Raises ConfigError for a slot or worker below 0.
    """

    __slots__ = ("device", "slot", "worker")

    device: DeviceId
    slot: int
    worker: int

    def __new__(cls, device: DeviceId, slot: int, worker: int = 0) -> Self:
        if slot < 0 or worker < 0:
            raise ConfigError(f"worker {worker} of slot {slot} of {device}: both count from 0")
        identity = super().__new__(cls, f"{device}/{slot}.{worker + 1}" if worker else f"{device}/{slot}")
        object.__setattr__(identity, "device", device)
        object.__setattr__(identity, "slot", slot)
        object.__setattr__(identity, "worker", worker)
        return identity

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the spelling that `str` gives. Raises ConfigError, with the text, for anything else."""
        match = _LANE.fullmatch(text)
        if match is None or _DEVICE.fullmatch(match["device"]) is None:
            raise ConfigError(
                f"{text!r} names no lane; write DEVICE/SLOT, such as h200-0/1, or DEVICE/SLOT.WORKER, such as"
                " h200-0/1.2 for the second worker"
            )
        return cls(DeviceId.parse(match["device"]), int(match["slot"]), int(match["worker"] or 1) - 1)

    @property
    def local(self) -> LaneId:
        """The same lane as its device's own machine names it."""
        return LaneId(self.device.local, self.slot, self.worker) if self.device.node else self

    def on(self, node: str) -> LaneId:
        """Return what a lane of this machine is called elsewhere, where this machine is a node of that name."""
        return LaneId(self.device.on(node), self.slot, self.worker)

    def _parts(self) -> tuple[DeviceId, int, int]:
        return self.device, self.slot, self.worker


def parse_identity(text: str) -> DeviceId | LaneId:
    """Read the spelling of a device or of a lane. Raises ConfigError, with the text, for anything else."""
    if _DEVICE.fullmatch(text):
        return DeviceId.parse(text)
    if _LANE.fullmatch(text):
        return LaneId.parse(text)
    raise ConfigError(f"{text!r} names neither a device, such as h200-0, nor a lane, such as h200-0/1")


def decode_identity(kind: type[Any], value: Any) -> Any:
    """Read an identity from what `str` has written of it: a `dec_hook` of msgspec, whose `enc_hook` is `str`. Raises
    ConfigError for text that names none, TypeError for anything else."""
    assert issubclass(kind, _Identity), kind
    return kind.parse(value)
