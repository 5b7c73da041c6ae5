from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import ConfigError, PlanError
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample, read_samples, write_samples

HEADER = "kind,victim,batch,share_pct,colocated,colocated_batch,colocated_share_pct,alone_ms,together_ms"
ROW = "v100,resnet50,4,40,vgg19,8,60,4.5,5.25"

loads = st.builds(Load, st.sampled_from(("a", "b,c", 'd"')), st.just("k"), st.integers(1, 64), st.integers(1, 1000))
times = st.integers(1000, 1900).map(lambda ms: ms / 1e6)
several = st.lists(
    st.builds(Sample, loads, st.lists(loads, min_size=1, max_size=3).map(tuple), times, times), min_size=1, max_size=5
)


def read(text: str) -> list[Sample]:
    return read_samples(text.splitlines(keepends=True), "pairs.csv")


@settings(max_examples=40, deadline=None)
@given(several)
def test_write_samples_round_trips(samples: list[Sample]) -> None:
    for sample, again in zip(samples, read(write_samples(samples)), strict=True):
        assert (again.victim, again.colocated) == (sample.victim, sample.colocated)
        assert again.slowdown == pytest.approx(sample.slowdown)


def test_cells_of_sample_equal_documented_row() -> None:
    (sample,) = read(f"{HEADER}\n{ROW}\n\n")
    assert sample.victim == Load("resnet50", "v100", 4, 400)
    assert sample.colocated == (Load("vgg19", "v100", 8, 600),)
    assert sample.alone == pytest.approx(0.0045)
    assert sample.slowdown == pytest.approx(5.25 / 4.5)


def test_read_samples_with_suffixed_columns_reads_further_loads() -> None:
    header = HEADER.replace("alone", "colocated_2,colocated_batch_2,colocated_share_pct_2,alone")
    one, two = read(f"{header}\na,m,1,40,n,1,20,,,,1,2\na,m,1,40,n,1,20,o,2,12.5,1,2\n")
    assert len(one.colocated) == 1
    assert two.colocated[1] == Load("o", "a", 2, 125)
    with pytest.raises(ConfigError, match="colocated_2 is empty"):
        read(f"{header}\na,m,1,40,n,1,20,,2,12.5,1,2\n")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("alone_ms", "alone_s", "pairs.csv:1: column 'alone_ms' is missing; samples of pairs have kind, victim,"),
        ("kind,", "colour,kind,", "pairs.csv:1: column 'colour' is unknown"),
        ("alone_ms", "colocated_2,alone_ms", "column 'colocated_batch_2' is missing; further co-located models have"),
        ("5.25", "0", "pairs.csv:2: together_ms 0 must be above 0; remove the row if the pair did not fit"),
        ("4.5", "-4.5", "pairs.csv:2: alone_ms -4.5 must be above 0"),
        ("5.25", "much", "pairs.csv:2: together_ms: 'much' is not a number"),
        ("5.25", "inf", "pairs.csv:2: together_ms: 'inf' is not a finite number"),
        ("5.25", "5000", "pairs.csv:2: together_ms 5000 is more than 1000 times alone_ms 4.5; remove the row"),
        ("5.25", "2", "together_ms 2 is less than half of alone_ms 4.5; interference makes nothing faster"),
        ("resnet50", "", "pairs.csv:2: victim is empty"),
        ("vgg19", "", "pairs.csv:2: colocated is empty; a run without co-located models belongs in a profile"),
        (",8,", ",8.5,", "pairs.csv:2: colocated_batch 8.5 is not a whole number"),
        ("60", "160", "pairs.csv:2: colocated_share_pct: a share of 160 %"),
        (ROW, "v100,resnet50", "pairs.csv:2: 2 cells where the header names 9"),
        (ROW, "", "pairs.csv: no row below the header; measure some with"),
        (HEADER, HEADER.replace(",", ";"), "pairs.csv:1: columns are separated by ';'; write commas, and points in"),
    ],
)
def test_read_samples_of_invalid_rows_raises_config_error(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(f"{HEADER}\n{ROW}\n".replace(old, new, 1))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("alone", "together"),
    [(math.nan, 1), (1, math.nan), (0, 1), (1, 0), (-1, -1), (1, 2e3), (1, math.inf), (math.inf, math.inf), (1, 1e-4)],
)
def test_samples_that_no_run_can_have_are_refused(alone: float, together: float) -> None:
    one, other = Load("a", "k", 1, 500), Load("b", "k", 1, 500)
    with pytest.raises(PlanError, match=r"a sample of 'a' took .* remove it, or measure it again"):
        Sample(one, (other,), alone, together)
    with pytest.raises(PlanError, match="has no co-located load"):
        Sample(one, (), 1.0, 1.0)


@pytest.mark.parametrize(
    ("batch", "share"),
    [(0, 1), (-1, 1), (1.5, 1), (math.nan, 1), (1e9, 1), (1, 0), (1, -5), (1, 1001), (1, math.nan), (1, 0.5)],
)
def test_loads_that_none_can_have_are_refused(batch: int, share: int) -> None:
    with pytest.raises(PlanError, match=r"model 'a': (batch|share) .* is not a whole number"):
        Load("a", "k", batch, share)
