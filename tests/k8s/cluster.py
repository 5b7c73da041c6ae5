"""A real API server of Kubernetes for tests: etcd and kube-apiserver, and kube-scheduler where asked for, as processes.

`make kube` builds them, into the folder that ``COTENANT_KUBE`` names.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from ssl import create_default_context
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from cotenant.errors import KubernetesError
from cotenant.k8s.client import ApiClient, connected
from cotenant.k8s.resource import CUSTOM_RESOURCES, Resource

BINARIES = Path(os.environ.get("COTENANT_KUBE") or Path.home() / ".cache" / "cotenant" / "kube") / "bin"
ADMIN, USER = "admin-token", "user-token"
PATIENCE = 120.0  # seconds for a start on a busy machine

NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")


class Cluster:
    """One API server, whose parts tests may stop, kill and start again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self._etcd_port, self._peer_port = _free_port(), _free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start what does not run, and wait until it answers. Raises AssertionError, with its log, where it does
        not."""
        etcd = f"http://127.0.0.1:{self._etcd_port}"
        if "etcd" not in self._processes:
            peer = f"http://127.0.0.1:{self._peer_port}"
            self._run(
                "etcd",
                shutil.which("etcd") or "etcd",
                f"--data-dir={self.folder / 'etcd-data'}",
                f"--listen-client-urls={etcd}",
                f"--advertise-client-urls={etcd}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--unsafe-no-fsync",
            )
        if "kube-apiserver" not in self._processes:
            key, tokens = self.folder / "key.pem", self.folder / "tokens.csv"
            if not key.exists():
                key.write_bytes(_private_key())
                tokens.write_text(f'{ADMIN},admin,1,"system:masters"\n{USER},user,2\n')
            self._run(
                "kube-apiserver",
                BINARIES / "kube-apiserver",
                f"--etcd-servers={etcd}",
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                f"--secure-port={self.port}",
                f"--cert-dir={self.folder / 'certificates'}",
                f"--token-auth-file={tokens}",
                "--authorization-mode=RBAC",
                "--disable-admission-plugins=ServiceAccount",  # whose accounts the controller manager makes
                f"--service-account-key-file={key}",
                f"--service-account-signing-key-file={key}",
                "--service-account-issuer=https://cotenant.test",
                "--service-cluster-ip-range=10.0.0.0/24",
                "--watch-cache-sizes=leases.coordination.k8s.io#5",
            )
        self._wait()

    def schedule(self) -> None:
        """Start the scheduler."""
        self._run(
            "kube-scheduler", BINARIES / "kube-scheduler", f"--kubeconfig={self.kubeconfig()}", "--leader-elect=false"
        )

    def kill(self, *names: str) -> None:
        """Kill parts at once."""
        for name in names or tuple(self._processes):
            process = self._processes.pop(name)
            process.kill()
            process.wait()

    def kubeconfig(self, token: str = ADMIN, namespace: str = "default") -> Path:
        """Return a configuration for clients."""
        path = self.folder / f"kubeconfig-{token}-{namespace}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "clusters": [
                {
                    "name": "test",
                    "cluster": {
                        "server": f"https://127.0.0.1:{self.port}",
                        "certificate-authority": str(self.folder / "certificates" / "apiserver.crt"),
                    },
                }
            ],
            "users": [{"name": "test", "user": {"token": token}}],
        }
        path.write_text(json.dumps(config))
        return path

    def kubectl(self, *arguments: str | Path) -> str:
        """Run kubectl as the administrator, and return what it prints."""
        command = [BINARIES / "kubectl", f"--kubeconfig={self.kubeconfig()}", *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    @asynccontextmanager
    async def client(self, namespace: str = "default", token: str = ADMIN) -> AsyncIterator[ApiClient]:
        """Call the server within the block."""
        async with connected(kubeconfig=self.kubeconfig(token, namespace)) as client:
            yield client

    async def namespace(self, client: ApiClient, name: str) -> None:
        """Create a namespace."""
        await client.create(NAMESPACES, {"metadata": {"name": name}})

    def _run(self, name: str, *command: str | Path) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)

    def _wait(self) -> None:
        end = time.monotonic() + PATIENCE
        certificate = self.folder / "certificates" / "apiserver.crt"
        while time.monotonic() < end:
            for name, process in self._processes.items():
                assert process.poll() is None, f"{name} ended: {self._log(name)}"
            if certificate.exists():
                request = urllib.request.Request(
                    f"https://127.0.0.1:{self.port}/readyz", headers={"Authorization": f"Bearer {ADMIN}"}
                )
                try:
                    context = create_default_context(cafile=str(certificate))
                    with urllib.request.urlopen(request, timeout=5, context=context) as answer:  # noqa: S310
                        if answer.status == 200:
                            return
                except (OSError, urllib.error.URLError):
                    pass
            time.sleep(0.2)
        raise AssertionError(f"kube-apiserver is not ready: {self._log('kube-apiserver')}")

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Run an API server within the block."""
    started = Cluster(folder)
    try:
        started.start()
        yield started
    finally:
        started.kill()


async def defined(client: ApiClient, definition: dict[str, Any]) -> None:
    """Define a resource where it is not yet, and wait until the server knows it."""
    name = definition["metadata"]["name"]
    try:
        await client.create(CUSTOM_RESOURCES, definition)
    except KubernetesError as error:
        if error.status != 409:
            raise
    while True:
        found = await client.get(CUSTOM_RESOURCES, name)
        conditions = (found.get("status") or {}).get("conditions") or ()
        if any(each["type"] == "Established" and each["status"] == "True" for each in conditions):
            return
        await asyncio.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _private_key() -> bytes:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
