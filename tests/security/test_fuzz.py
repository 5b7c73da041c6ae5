"""Some inputs of each target; `make fuzz` tries more."""

from __future__ import annotations

import random

import pytest

from tests.live.stub import StubCore
from tests.security import fuzz

COUNT = 1500


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_fuzzed_input_is_served_or_refused(target: str) -> None:
    fuzz.fuzz(target, COUNT, seed=0)


def test_failure_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(rng: random.Random) -> None:
        if rng.random() < 0.1:
            raise KeyError("x")

    monkeypatch.setitem(fuzz.TARGETS, "grpc", breaks)
    with pytest.raises(AssertionError, match=r"^grpc, seed \d+: KeyError\('x'\)"):
        fuzz.fuzz("grpc", 1000, seed=0)


def test_bytes_behind_a_shorter_body_are_no_part_of_it() -> None:
    size = len(fuzz.BODY)
    smuggled = fuzz.REQUESTS[0].replace(b"Length: %d" % size, b"Length: %d" % (size - 4))
    assert smuggled != fuzz.REQUESTS[0]
    ours, refused = fuzz.ours(StubCore(), smuggled, 7)
    theirs, _ = fuzz.theirs(smuggled)
    assert ours == theirs and len(ours) == 1 and ours[0][2] == fuzz.BODY[:-4] and refused
