from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.profile import MIB, Point, Profile, read_profiles, slowed_profiles, write_profiles
from cotenant.errors import ConfigError

HEADER = "model,kind,share_pct,batch,latency_ms,memory_mib\n"


def point(share: int, batch: int, latency: float, memory: int = MIB, procs: int = 1) -> Point:
    return Point(share=share, batch=batch, latency=latency, memory=memory, procs=procs)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Draw measured points with gaps, noise, and batches that some shares lack."""
    keys = draw(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 24)), min_size=1, max_size=12, unique=True))
    return Profile("m", "k", [point(share, batch, draw(st.floats(1e-4, 10.0))) for share, batch in keys])


@given(profiles(), st.integers(1, 24), st.integers(1, 24), st.integers(1, 1000), st.integers(1, 1000))
def test_profile_latency_is_monotone_in_batch_and_share(profile: Profile, a: int, b: int, p: int, q: int) -> None:
    small, large = sorted((a, b))
    less, more = sorted((p, q))
    assert profile.latency(small, more) <= profile.latency(large, less) * (1 + 1e-12)


@given(profiles())
def test_profile_latency_below_a_measurement_is_told(profile: Profile) -> None:
    told = {(measured.batch, measured.share) for measured, _ in profile.smoothed()}
    for measured in profile.points:
        seconds = profile.latency(measured.batch, measured.share)
        assert seconds >= measured.latency * 0.98 or (measured.batch, measured.share) in told


@given(st.lists(st.lists(st.floats(1e-3, 1.0), min_size=4, max_size=4), min_size=1, max_size=4))
def test_profile_latency_is_at_most_the_slowest_point_with_fewer_rows_or_more_share(grid: list[list[float]]) -> None:
    points = [point(100 * n, 2**m, latency) for n, row in enumerate(grid, 1) for m, latency in enumerate(row)]
    profile = Profile("m", "k", points)
    for measured in points:
        slowest = max(p.latency for p in points if p.batch <= measured.batch and p.share >= measured.share)
        assert profile.latency(measured.batch, measured.share) <= slowest * (1 + 1e-12)


def test_profile_with_one_slow_outlier_counts_larger_batches_nearly_as_measured() -> None:
    points = [point(share, batch, 0.010 + 1e-5 * batch) for share in (250, 500, 750) for batch in (1, 2, 4, 8, 16)]
    slow = [*points, point(1000, 1, 0.030), *(point(1000, batch, 0.009) for batch in (2, 4, 8, 16))]
    profile = Profile("m", "k", slow)
    # Averaged over the batches and shares that it contradicts, plus the deviation around that.
    assert 0.010 < profile.latency(16, 250) < 0.016
    assert profile.smoothed()[0] == (slow[15], profile.latency(1, 1000))


def test_profile_padded_batch_takes_as_long_as_the_size_that_it_is_padded_to() -> None:
    measured = Profile("m", "k", [point(1000, batch, batch / 1000) for batch in (1, 8, 16)])
    padded = measured.padded_to([(16, 11), (4, 2), (1, 1), (32, 17)])
    assert padded.curve(1000)[:4] == pytest.approx((0.001, 0.004, 0.004, 0.004))
    # No size is captured that holds 5 to 10 rows, or that so few are padded to.
    assert padded.curve(1000)[4:10] == measured.curve(1000)[4:10]
    assert padded.curve(1000)[10:] == (measured.latency(16, 1000),) * 6
    assert padded.on("node/k", 1.0).latency(2, 1000) == pytest.approx(1.004)
    assert slowed_profiles({("m", "k"): padded}, {"m": 2.0})["m", "k"].latency(2, 1000) == pytest.approx(0.008)


def test_profile_of_two_contradicting_points_counts_as_the_slower_one() -> None:
    profile = Profile("m", "k", [point(1000, 1, 0.04), point(1000, 2, 0.01)])
    assert [profile.latency(batch, 1000) for batch in (1, 2)] == pytest.approx([0.04, 0.04])


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=5, unique=True).map(sorted),
    st.lists(st.integers(1, 24), min_size=1, max_size=5, unique=True).map(sorted),
    st.floats(1e-4, 1.0),
    st.floats(1e-4, 1.0),
)
def test_profile_of_monotone_grid_reproduces_it(
    shares: list[int], batches: list[int], work: float, fixed: float
) -> None:
    profile = Profile("m", "k", [point(s, b, fixed + work * b * 1000 / s) for s in shares for b in batches])
    for share in shares:
        for batch in batches:
            assert profile.latency(batch, share) == fixed + work * batch * 1000 / share


def test_profile_between_points_is_linear_in_batch_and_inverse_share() -> None:
    profile = Profile("m", "k", [point(s, b, 0.001 + 0.002 * b * 1000 / s) for s in (200, 1000) for b in (1, 5)])
    assert profile.latency(3, 500) == pytest.approx(0.001 + 0.002 * 3 * 2)


def test_profile_outside_grid_is_infinite() -> None:
    profile = Profile("m", "k", [point(200, 1, 0.01), point(500, 1, 0.005), point(500, 4, 0.01)])
    assert profile.latency(1, 199) == math.inf
    assert profile.latency(5, 500) == math.inf
    assert profile.latency(0, 500) == math.inf
    assert profile.latency(1, 500, procs=2) == math.inf
    assert profile.latency(4, 200) == math.inf
    assert profile.latency(1, 1000) == 0.005


def test_profile_of_one_point_covers_easier_points() -> None:
    profile = read_profiles((HEADER + "m,k,50,4,10,3\n").splitlines(), "p.csv")["m", "k"]
    assert [profile.latency(batch, share) for batch, share in ((1, 500), (4, 500), (4, 1000))] == [0.01] * 3
    assert {profile.latency(batch, share) for batch, share in ((5, 500), (4, 499))} == {math.inf}


def test_profile_with_missing_points_is_bounded_by_others() -> None:
    # Of 50 % and batch 4 nothing was measured: no faster than batch 1 there, no slower than batch 4 on 20 %.
    rows = "m,k,20,1,10,3\nm,k,20,4,25,3\nm,k,50,1,5,3\nm,k,100,1,3,3\nm,k,100,4,8,3\n"
    profile = read_profiles((HEADER + rows).splitlines(), "p.csv")["m", "k"]
    assert 0.005 <= profile.latency(4, 500) <= 0.025
    assert math.isfinite(profile.latency(2, 300))


def test_profile_of_non_monotone_points_is_their_mean_and_deviation() -> None:
    rows = "m,k,50,1,9,3\nm,k,50,2,7,3\nm,k,50,4,12,3\nm,k,100,1,10,3\n"
    profile = read_profiles((HEADER + rows).splitlines(), "p.csv")["m", "k"]
    logs = [math.log(latency) for latency in (0.009, 0.007, 0.010)]
    mean = math.fsum(logs) / 3
    counted = math.exp(mean + math.sqrt(math.fsum((log - mean) ** 2 for log in logs) / 3))
    assert [profile.latency(batch, 500) for batch in (1, 2, 4)] == pytest.approx([counted, counted, 0.012], rel=1e-4)
    assert profile.latency(1, 1000) == pytest.approx(counted, rel=1e-4)


def test_profile_below_smallest_batch_is_constant() -> None:
    assert Profile("m", "k", [point(1000, 4, 0.01)]).latency(1, 1000) == 0.01


def test_profile_memory_rounds_up_to_next_measured_batch() -> None:
    profile = Profile("m", "k", [point(1000, 1, 0.01, 30), point(1000, 4, 0.02, 20), point(1000, 8, 0.03, 50)])
    assert [profile.memory(batch) for batch in (1, 2, 4, 5, 8)] == [30, 30, 30, 50, 50]


def test_profile_features_are_of_the_nearest_point() -> None:
    points = [
        Point(share=200, batch=1, latency=0.1, memory=1, features={"l2": 1.0}),
        Point(share=800, batch=8, latency=0.1, memory=1, features={"l2": 2.0}),
    ]
    assert Profile("m", "k", points).features(batch=8, share=300) == {"l2": 1.0}


def test_profile_without_points_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"^the profile of 'm' on 'k' has no point$"):
        Profile("m", "k", [])


@given(profiles())
def test_write_profiles_round_trips(profile: Profile) -> None:
    text = write_profiles([profile])
    (read,) = read_profiles(text.splitlines(), "p.csv").values()
    assert (read.model, read.kind) == (profile.model, profile.kind)
    assert [(p.share, p.batch, p.memory, p.procs) for p in read.points] == [
        (p.share, p.batch, p.memory, p.procs) for p in profile.points
    ]
    assert [p.latency for p in read.points] == pytest.approx([p.latency for p in profile.points], rel=1e-5)
    assert write_profiles([read]) == text


@given(st.text(alphabet='ab ,"\n#;', max_size=8).map(lambda text: f"m{text}m"))
def test_write_profiles_of_any_name_round_trips(name: str) -> None:
    profile = Profile(name, "k", [point(1000, 1, 0.01)])
    text = write_profiles([profile])
    assert (name, "k") in read_profiles(text.splitlines(keepends=True), "p.csv")


def test_read_profiles_keeps_further_columns_as_features() -> None:
    text = "model,kind,share_pct,batch,latency_ms,memory_mib,procs,l2_util_pct\nm,k,14.2,1,2,3,2,55.5\nm,k,20,1,2,3,,\n"
    profile = read_profiles(text.splitlines(), "p.csv")["m", "k"]
    assert [(p.share, p.procs, p.features) for p in profile.points] == [(200, 1, {}), (142, 2, {"l2_util_pct": 55.5})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.csv:1: column 'model' is missing; a profile has model, kind, share_pct, batch, latency_ms, memory_mib"),
        (HEADER.replace("batch", "rows"), "p.csv:1: column 'batch' is missing"),
        (HEADER.strip() + ",batch\n", "p.csv:1: two columns have the same name"),
        (HEADER + "m,k,20,1,2\n", "p.csv:2: 5 cells where the header names 6"),
        (HEADER + "m,k,20,1,2,3,4\n", "p.csv:2: 7 cells where the header names 6"),
        (HEADER + "m,k,20,1,fast,3\n", "p.csv:2: latency_ms: 'fast' is not a number"),
        (HEADER + "m,k,20,1,2,lots\n", "p.csv:2: memory_mib: 'lots' is not a number"),
        (HEADER + "m,k,20,1,2,3\nm,k,20,2,nan,3\n", "p.csv:3: latency_ms: 'nan' is not a finite number"),
        (HEADER + "m,k,20,1,-2,3\n", "p.csv:2: latency_ms -2 must be above 0"),
        (HEADER + "m,k,20,1,2,1e308\n", "p.csv:2: memory_mib 1e+308 is above 1e+09; write what was measured"),
        (HEADER + "m,k,20,1,1e300,3\n", "p.csv:2: latency_ms 1e+300 is above 1e+12; write what was measured"),
        (
            (HEADER + "m,k,20,1,2,3\n").replace(",", ";"),
            "p.csv:1: ';' separates the columns; write commas, and points in numbers",
        ),
        (
            HEADER.strip() + ",gpu_name\nm,k,20,1,2,3,Tesla\n",
            "p.csv:2: gpu_name: 'Tesla' is not a number; further columns are features of a point, in numbers",
        ),
        (HEADER.strip() + ",\nm,k,20,1,2,3,\n", "p.csv:1: column 7 has no name; give it one, or remove it"),
        ("m,k,20,1,2,3\n", "p.csv:1: column 'model' is missing"),
        (HEADER + "m,k,20,1,inf,3\n", "p.csv:2: latency_ms: 'inf' is not a finite number"),
        (HEADER + "m,k,20,1,,3\n", "p.csv:2: latency_ms is empty"),
        (HEADER + "m,k,20,1,0,3\nm,k,20,2,4,3\nm,k,20,4,0,3\n", "p.csv:2: latency_ms is 0 in 2 rows"),
        (HEADER + "m,k,20,1,-1,3\n", "p.csv:2: latency_ms -1 must be above 0"),
        (HEADER + "m\0,k,20,1,1,3\n", "p.csv:2: model 'm\\x00' contains a NUL character"),
        (HEADER + "m,k,20,1.5,2,3\n", "p.csv:2: batch 1.5 is not a whole number from 1 to 65536"),
        (HEADER + "m,k,20,1e9,2,3\n", "p.csv:2: batch 1e+09 is not a whole number from 1 to 65536"),
        (HEADER + "m,k,20,1,2,-3\n", "p.csv:2: memory_mib -3 must not be negative"),
        (HEADER + "m,k,0,1,2,3\n", "p.csv:2: share_pct: a share of 0 % must be above 0 and at most 100"),
        (HEADER + "\nm,k,20,1,2,3\n\nm,k,20,1,2,3\n", "p.csv:5: m on k at 20 % and batch 1 appears twice"),
        (HEADER + ",k,20,1,2,3\n", "p.csv:2: model is empty"),
        (HEADER + "m,k,20,1,2," + 200_000 * "3", "p.csv:2: is not CSV: field larger than field limit"),
        (HEADER, "p.csv: no row below the header; a profile has at least one point"),
    ],
)
def test_read_profiles_of_invalid_rows_raises_config_error_with_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        read_profiles(text.splitlines(), "p.csv")


def test_read_profiles_on_request_leaves_out_rows_of_latency_0() -> None:
    text = "model,kind,share_pct,batch,latency_ms,memory_mib\nm,k,20,1,2,3\nm,k,20,2,0,3\n"
    profile = read_profiles(text.splitlines(), "p.csv", skip_zero_latency=True)["m", "k"]
    assert [p.batch for p in profile.points] == [1]


@pytest.mark.parametrize(("percent", "share"), [("14.2857", 142), ("14.29", 142), ("28.5714", 285), ("85.71", 857)])
def test_read_profiles_counts_sevenths_as_mig_does(percent: str, share: int) -> None:
    text = f"model,kind,share_pct,batch,latency_ms,memory_mib\nm,k,{percent},1,2,3\nm,k,14.3,2,3,3\n"
    profile = read_profiles(text.splitlines(), "p.csv")["m", "k"]
    assert sorted(p.share for p in profile.points) == sorted([share, 143])


def test_smoothed_lists_points_that_count_otherwise_than_measured() -> None:
    points = [
        point(1000, 1, 0.01),
        point(1000, 2, 0.009),
        point(1000, 4, 0.005),
        point(500, 4, 0.004),
        point(500, 8, 0.02),
    ]
    profile = Profile("m", "k", points)
    counted = [profile.latency(each.batch, each.share) for each in points]
    mean = math.fsum(math.log(each.latency) for each in points[:4]) / 4
    deviation = math.sqrt(math.fsum((math.log(each.latency) - mean) ** 2 for each in points[:4]) / 4)
    assert counted == pytest.approx([math.exp(mean + deviation)] * 4 + [0.02], rel=1e-4)
    assert profile.smoothed() == [(points[3], counted[3]), (points[2], counted[2]), (points[0], counted[0])]
    assert Profile("m", "k", [point(1000, 1, 0.01), point(1000, 4, 0.02)]).smoothed() == []
