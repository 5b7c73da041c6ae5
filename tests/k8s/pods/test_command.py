"""`cotenant share-controller` as a process, against an API server's double."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import httpx2

from cotenant.core.profile import write_profiles
from cotenant.k8s.client import ApiClient
from tests.k8s.api_double import ApiDouble
from tests.k8s.eventually import eventually
from tests.k8s.play import play
from tests.k8s.pods.cluster import pod_object, profiles
from tests.k8s.pods.test_controller import cluster, whole

PROBLEM = """
profiles = ["profiles.csv"]
interference = { model = "margin", factor = 1.1 }

[[models]]
name = "tiny"
slo = "100ms"
rate = 1

[[devices]]
kind = "a100"
memory = "40GiB"
cuts = [10, 25, 50, 100]

[[devices]]
kind = "t4"
memory = "16GiB"
cuts = [10, 25, 50, 100]
"""


def write_problem(folder: Path) -> Path:
    known = [each for (_, kind), each in profiles().items() if kind in ("a100", "t4")]
    (folder / "profiles.csv").write_text(write_profiles(known))
    (folder / "problem.toml").write_text(PROBLEM)
    return folder / "problem.toml"


def write_kubeconfig(folder: Path, url: str) -> Path:
    """JSON is YAML."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
        "current-context": "x",
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    return folder / "kubeconfig"


def test_command_gives_shares_answers_schedulers_and_leaves_its_lease(tmp_path: Path) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        api.put("pods", pod_object("p", "tiny", "100ms", "20"))
        options = ["--kubeconfig", str(write_kubeconfig(tmp_path, api.url)), "--extender", "127.0.0.1:0"]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cotenant",
            "share-controller",
            str(write_problem(tmp_path)),
            *options,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            await eventually(lambda: whole(api, "p"), 60)
            said = ""
            while "scheduler extender at " not in said:
                said = (await process.stderr.readline()).decode()
            async with httpx2.AsyncClient(base_url=said.rpartition("extender at ")[2].strip()) as http:
                assert (await http.get("/healthz")).status_code == 200
            process.send_signal(signal.SIGTERM)
            await process.stderr.read()
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        [lease] = api.objects("leases")
        assert not lease["spec"].get("holderIdentity")

    play(scenario, 120)
