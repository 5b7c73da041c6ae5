"""The API servers that tests run against: the double, and a real one where there is one."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.k8s.client import ApiClient, connected
from tests.k8s.api_double import ApiDouble, api_double
from tests.k8s.cluster import Cluster, defined
from tests.k8s.manifests import BASE, DEFINITIONS, documents, install

NUMBERS = itertools.count()


@dataclass
class ApiServer:
    """An API server with our resources. client: the administrator's, in a namespace of the test's own. kubeconfig: for
    others. double, cluster: the one that it is."""

    client: ApiClient
    kubeconfig: Path
    double: ApiDouble | None = None
    cluster: Cluster | None = None


Connect = Callable[[], AbstractAsyncContextManager[ApiServer]]
WithClient = Callable[[Callable[[ApiClient], Awaitable[Any]]], Any]


@asynccontextmanager
async def double_server(folder: Path) -> AsyncIterator[ApiServer]:
    async with api_double() as double:
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(
            json.dumps(
                {
                    "current-context": "test",
                    "contexts": [{"name": "test", "context": {"cluster": "test"}}],
                    "clusters": [{"name": "test", "cluster": {"server": double.url}}],
                }
            )
        )
        async with connected(kubeconfig=kubeconfig) as client:
            await install(client)
            yield ApiServer(client, kubeconfig, double=double)


@asynccontextmanager
async def real_server(cluster: Cluster) -> AsyncIterator[ApiServer]:
    namespace = f"test-{next(NUMBERS)}"
    async with cluster.client(namespace) as client:
        await cluster.namespace(client, namespace)
        for name in DEFINITIONS:
            (definition,) = documents(BASE / name)
            await defined(client, definition)
        yield ApiServer(client, cluster.kubeconfig(namespace=namespace), cluster=cluster)
