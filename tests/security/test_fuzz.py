"""Some inputs of each target, the same each time; `make test-slow` tries more of them, and `make fuzz` any number."""

from __future__ import annotations

import random
import re

import pytest

from tests.live.stub import StubCore
from tests.security import fuzz

COUNTS = {
    "framing": 20_000,  # h11 takes most of the time
    "http-answers": 50_000,
    "http-json": 200_000,
    "http-binary": 200_000,
    "grpc": 200_000,
    "worker-protocol": 200_000,
    "http-processes": 2_000,
}


PART = 5  # of which every run of the tests tries the first


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_fuzzed_input_is_served_or_refused(target: str) -> None:
    failures = fuzz.failures(target, COUNTS[target] // PART, seed=0)
    assert failures == []


@pytest.mark.slow
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_more_fuzzed_input_is_served_or_refused(target: str) -> None:
    tried = COUNTS[target] // PART
    failures = fuzz.failures(target, COUNTS[target] - tried, seed=tried)
    assert failures == []


def test_failure_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(rng: random.Random) -> None:
        if rng.random() < 0.1:
            raise KeyError("x")

    monkeypatch.setitem(fuzz.TARGETS, "grpc", breaks)
    (failure,) = fuzz.failures("grpc", 1000, seed=0)
    assert re.match(r"grpc, seed \d+: KeyError\('x'\)", failure)


def test_bytes_behind_a_shorter_body_are_no_part_of_it() -> None:
    size = len(fuzz.BODY)
    smuggled = fuzz.REQUESTS[0].replace(b"Length: %d" % size, b"Length: %d" % (size - 4))
    assert smuggled != fuzz.REQUESTS[0]
    ours, refused = fuzz.ours(StubCore(), smuggled, 7)
    theirs, _ = fuzz.theirs(smuggled)
    assert ours == theirs and len(ours) == 1 and ours[0][2] == fuzz.BODY[:-4] and refused
