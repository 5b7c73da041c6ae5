"""Join network namespaces of this machine to it, as hosts of a network that can be slow, lossy or cut.

Needs root, `ip` and network namespaces. `veth` pairs are as fast as the kernel; a `Wire` is slower, and delays or drops
what passes: packets go through a thread of this process, since `netem` is not in every kernel.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 1, 0x1000
_MTU = 1500
_numbers = itertools.count()


def missing() -> str:
    """Return what keeps this machine from having namespaces; empty where nothing does."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and `ip`"
    name = f"ct{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)  # noqa: S607
    if tried.returncode:
        return f"this machine has no network namespaces: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return "" if os.path.exists("/dev/net/tun") else "this machine has no /dev/net/tun"  # noqa: PTH110


class Wire:
    """Carry packets between two TUN devices. delay: seconds each way. loss: the fraction that is dropped, by chance.
    is_cut: all are."""

    def __init__(self, ends: tuple[int, int], seed: int = 0) -> None:
        self.delay = 0.0
        self.loss = 0.0
        self.is_cut = False
        self._ends = ends
        self._chance = random.Random(seed)  # noqa: S311
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _carry(self) -> None:
        one, other = self._ends
        under_way: list[tuple[float, int, int, bytes]] = []
        for end in self._ends:
            os.set_blocking(end, False)
        order = itertools.count()
        while not self._stopped.is_set():
            wait = 0.05 if not under_way else max(min(under_way[0][0] - time.monotonic(), 0.05), 0.0)
            for end in select.select([one, other], [], [], wait)[0]:
                packet = os.read(end, _MTU)
                if not self.is_cut and self._chance.random() >= self.loss:
                    towards = other if end == one else one
                    heapq.heappush(under_way, (time.monotonic() + self.delay, next(order), towards, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, towards, packet = heapq.heappop(under_way)
                if not self.is_cut:
                    with suppress(OSError):  # that end is not up yet
                        os.write(towards, packet)


class Host:
    """A namespace that this machine reaches. address: its own; here: this machine's, as it sees it. wire: None where a
    veth pair joins them."""

    def __init__(self, name: str, here: str, address: str, wire: Wire | None, device: str) -> None:
        self.name = name
        self.here = here
        self.address = address
        self.wire = wire
        self._device = device

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program there."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], **options)  # noqa: S607

    def cut(self) -> None:
        """Let nothing through any more, without a word to either end."""
        if self.wire is not None:
            self.wire.is_cut = True
        else:
            _ip("link", "set", self._device, "down")

    def heal(self) -> None:
        if self.wire is not None:
            self.wire.is_cut = False
        else:
            _ip("link", "set", self._device, "up")


@contextmanager
def hosts(count: int, *, wires: bool = False) -> Iterator[list[Host]]:
    """Create namespaces, each joined to this machine by a veth pair, or by a wire. Removes them at the end."""
    with ExitStack() as stack:
        yield [_host(stack, wires=wires) for _ in range(count)]


def _host(stack: ExitStack, *, wires: bool) -> Host:
    number = next(_numbers)
    mark = f"{os.getpid() % 100_000}x{number}"
    name, near, far = f"cotenant-{mark}", f"cta{mark}", f"ctb{mark}"
    net = f"10.{64 + os.getpid() % 128}.{(os.getpid() // 128 + number) % 256}"
    here, there = f"{net}.1", f"{net}.2"
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "del", name)
    wire = None
    if wires:
        wire = Wire((_tun(near), _tun(far)))
        stack.callback(wire.stop)
        _ip("link", "set", far, "netns", name)
    else:
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        stack.callback(subprocess.run, ["ip", "link", "del", near], capture_output=True, check=False)
    _ip("addr", "add", f"{here}/24", "dev", near)
    _ip("link", "set", near, "up")
    for command in (
        ("addr", "add", f"{there}/24", "dev", far),
        ("link", "set", far, "up"),
        ("link", "set", "lo", "up"),
    ):
        _ip("-n", name, *command)
    return Host(name, here, there, wire, near)


def _tun(name: str) -> int:
    """Create a TUN device; return the descriptor that its packets pass through."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)  # noqa: S607
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
