"""Work over processes: every result in its place, progress to the end, and errors that come through."""

from __future__ import annotations

import pytest

from cotenant.errors import ConfigError
from experiments.parallel import Options, run_tasks


def square(x: int) -> int:
    if x < 0:
        raise ConfigError(f"{x} is below 0")
    return x * x


@pytest.mark.parametrize("jobs", [1, 2])
def test_run_tasks_returns_results_in_order_and_reports_progress(jobs: int) -> None:
    features: list[tuple[str, int, int]] = []
    assert run_tasks(square, range(5), Options(jobs=jobs, progress=lambda *it: features.append(it)), "squares") == [
        0,
        1,
        4,
        9,
        16,
    ]
    assert features == [("squares", done, 5) for done in range(6)]


@pytest.mark.parametrize("jobs", [1, 2])
def test_run_tasks_error_in_a_task_is_raised(jobs: int) -> None:
    with pytest.raises(ConfigError, match="-1 is below 0"):
        run_tasks(square, [1, -1, 2], Options(jobs=jobs), "squares")
