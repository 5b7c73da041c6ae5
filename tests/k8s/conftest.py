from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate.utils
import pytest

from cotenant.k8s.client import ApiClient
from tests.k8s.cluster import BINARIES, Cluster
from tests.k8s.cluster import cluster as running
from tests.k8s.servers import Connect, WithClient, double_server, real_server

# It reads the schemas of a release, some megabytes, each time it holds an object against them.
kubernetes_validate.utils.schema_contents = functools.lru_cache(64)(kubernetes_validate.utils.schema_contents)
kubernetes_validate.utils.all_versions = functools.cache(kubernetes_validate.utils.all_versions)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real API server, for all tests of the session; each takes a namespace of its own."""
    if not (BINARIES / "kube-apiserver").exists():
        pytest.fail(f"there is no kube-apiserver in {BINARIES}; `make kube` builds it")
    with running(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.cluster)])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """Return a function that connects to a server with our resources."""
    if request.param == "double":
        return lambda: double_server(tmp_path)
    cluster: Cluster = request.getfixturevalue("cluster")
    return lambda: real_server(cluster)


@pytest.fixture
def with_client(connect: Connect) -> WithClient:
    """Return a function that runs a scenario with a client of the server."""

    def run(scenario: Callable[[ApiClient], Awaitable[Any]]) -> Any:
        async def connected() -> Any:
            async with asyncio.timeout(60), connect() as server:
                return await scenario(server.client)

        return asyncio.run(connected())

    return run
