"""A real Prometheus, Debian's, that scrapes pages of the test's own."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from cotenant.errors import PrometheusError
from cotenant.k8s.scaling.prometheus import PrometheusClient, prometheus
from tests.k8s.eventually import eventually

SCRAPE_SECONDS = 0.2
TYPE = "text/plain; version=0.0.4; charset=utf-8"


def needs_prometheus() -> str:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs Debian's prometheus (apt-get install prometheus)")
    return program


@asynccontextmanager
async def pages(texts: Mapping[str, Callable[[], str]]) -> AsyncIterator[str]:
    """Serve exposition formats by path; yields HOST:PORT."""

    async def answer(request: web.Request) -> web.Response:
        body = texts[request.match_info["name"]]().encode()
        return web.Response(body=body, headers={"Content-Type": TYPE})

    app = web.Application()
    app.router.add_get("/{name}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def scraping(folder: Path, jobs: Mapping[str, tuple[str, str]]) -> AsyncIterator[PrometheusClient]:
    """Run a Prometheus within the block. jobs: by name, the target and the path of its metrics."""
    program = needs_prometheus()
    configuration = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS * 1000:.0f}ms", "scrape_timeout": "200ms"},
        "scrape_configs": [
            {"job_name": name, "metrics_path": f"/{path}", "static_configs": [{"targets": [target]}]}
            for name, (target, path) in jobs.items()
        ],
    }
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(configuration))  # which is YAML, too
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
        )
    try:
        async with prometheus(f"http://127.0.0.1:{port}") as client:

            async def ready() -> bool:
                assert process.returncode is None, (folder / "prometheus.log").read_text()
                try:
                    return bool(await client.query("up == 1"))
                except PrometheusError:
                    return False

            await eventually(ready)
            yield client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
