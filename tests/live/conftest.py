from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.stub import Running, running


@pytest.fixture(scope="module")
def front() -> Iterator[Running]:
    """Both front ends, before a core that answers in process."""
    with running() as served:
        yield served
