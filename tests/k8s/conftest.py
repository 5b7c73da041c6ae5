from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.k8s.cluster import BINARIES, Cluster
from tests.k8s.cluster import cluster as running


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real API server, for all tests of the session; each takes a namespace of its own."""
    if not (BINARIES / "kube-apiserver").exists():
        pytest.fail(f"there is no kube-apiserver in {BINARIES}; `make kube` builds it")
    with running(tmp_path_factory.mktemp("cluster")) as started:
        yield started
