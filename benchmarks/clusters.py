"""Start nodes in network namespaces and a server before them, as processes; shared by what measures and shows them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.network import Host

TOKEN = "a-token-of-a-benchmark-0123456789"  # noqa: S105
_CUT = re.compile(r"^(\S+) ERROR: (\S+) is cut off", re.MULTILINE)


@contextmanager
def node_at(host: Host, folder: Path, settings: str, *, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `cotenant node` in a namespace; yield the process and its address. folder: for its files. settings: TOML."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token").write_text(TOKEN)
    path = folder / "node.toml"
    path.write_text(
        f'{settings}\n[cluster]\ntoken = "token"\n[node]\nhost = "{host.address}"\nport = {port}\ncache = "models"\n'
    )
    node = host.start(
        [sys.executable, "-m", "cotenant", "node", str(path), "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert node.stdout is not None
        yield node, json.loads(node.stdout.readline())["address"]
    finally:
        node.kill()
        node.communicate()


class FrontEnd:
    """A running `cotenant serve`. pid: of its process. addresses: by front end. plan: as it was started with."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            sys.exit(f"the server did not start: {log.read_text()}")
        up = json.loads(line)
        self.pid = process.pid
        self.http = str(up["addresses"]["http"])
        self.plan = up["plan"]
        self._log = log

    def cut_seen(self, node: str) -> datetime | None:
        """Return when it noticed, for the last time, that a node was cut off."""
        times = [at for at, name in _CUT.findall(self._log.read_text()) if name == node]
        return datetime.fromisoformat(times[-1]) if times else None


@contextmanager
def front_end(folder: Path, settings: str, nodes: Sequence[str] = ()) -> Iterator[FrontEnd]:
    """Run `cotenant serve` with the nodes at these addresses, which are called node-a, node-b, …"""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token").write_text(TOKEN)
    listed = "".join(
        f'[[nodes]]\nname = "node-{letter}"\naddress = "{address}"\n'
        for letter, address in zip("abcdefgh", nodes, strict=False)
    )
    path = folder / "serve.toml"
    path.write_text(f'state = "state.sqlite"\n{settings}\n{listed}[cluster]\ntoken = "token"\n')
    ports = [f"--{front}-port=0" for front in ("http", "grpc", "metrics")]
    log = folder / "serve.log"
    with log.open("w") as written:
        server = subprocess.Popen(
            [sys.executable, "-m", "cotenant", "serve", str(path), *ports, "--json"],
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
        )
        try:
            yield FrontEnd(server, log)
        finally:
            server.terminate()
            server.communicate()


def profile_csv(model: str, kind: str, latencies: Mapping[int, float]) -> str:
    """Return a profile of a whole device, in seconds by batch."""
    rows = [f"{model},{kind},100,{batch},{1e3 * latency:g},1" for batch, latency in latencies.items()]
    return "\n".join(["model,kind,share_pct,batch,latency_ms,memory_mib", *rows, ""])


def now() -> datetime:
    """Return the time as logs have it."""
    return datetime.now(UTC)
