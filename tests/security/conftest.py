from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.server import Served, served


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for all tests that must leave it as it was."""
    with served(tmp_path_factory.mktemp("server")) as running:
        yield running
