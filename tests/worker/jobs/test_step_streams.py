"""Steps of a job on a GPU's multiprocessors, through the real cuda-bindings over the fake driver."""

from __future__ import annotations

import pytest

from cotenant.worker.jobs.step_streams import groups_for
from tests.worker.test_green import ran

H200 = (8,) * 16 + (4,)


@pytest.mark.parametrize(
    ("share", "groups"),
    [
        (1.0, tuple(range(17))),
        (0.999, tuple(range(16))),  # the remainder is no partition of its own, nor part of one
        (0.5, tuple(range(8, 16))),  # 64 of 132 multiprocessors; one group more would be 72
        (0.07, (15,)),
        (0.01, (15,)),  # a step that runs takes at least one group
    ],
)
def test_share_is_the_last_groups_of_one_size(share: float, groups: tuple[int, ...]) -> None:
    assert groups_for(share, H200) == groups


def test_share_changes_at_the_next_step_and_streams_are_given_back() -> None:
    told = ran("""
from pathlib import Path
from cotenant.worker.jobs.context import JobContext
from cotenant.worker.jobs.messages import write_share
from cotenant.worker.jobs.step_streams import StepStreams
import mmap
share = mmap.mmap(-1, mmap.PAGESIZE)
with StepStreams(JobContext(Path(), granted=share), enabled=True, processors=processors) as streams:
    for granted in (500, 500, 250, 1000, 500):
        write_share(share, granted)
        handle = streams.handle()
        out([handle, groups(handle)])
out(counts()["streams"])
""")
    *steps, streams = told
    assert [groups for _, groups in steps] == [
        list(range(8, 16)), list(range(8, 16)), list(range(12, 16)), list(range(17)), list(range(8, 16))
    ]  # fmt: skip
    assert steps[0][0] == steps[1][0] == steps[4][0] and streams == 3
