import math
from collections.abc import Callable

import numpy as np
import pytest

from cotenant.errors import ConfigError
from cotenant.workload import Source, Workload
from cotenant.workload.arrivals import Floats, generate_arrivals, merge_arrivals, random_streams
from cotenant.workload.shapes import gpulet_waves, hetsev_fluctuating, hetsev_production, hills, wave
from cotenant.workload.sources import ClosedLoop, Curve, Gamma, MarkovModulated, Offline, Poisson, Uniform


def times(source: Source, seconds: float, seed: int = 0) -> Floats:
    chunks = merge_arrivals([source.times(random_streams(seed, ["x"])["x"])], seconds)
    return np.concatenate([np.empty(0), *(times for times, _ in chunks)])


def rates(found: Floats, *edges: float) -> Floats:
    counts, _ = np.histogram(found, edges)
    return counts / np.diff(edges)


SOURCES: list[Source] = [
    Poisson(40.0),
    Gamma(40.0, 2.0),
    Uniform(40.0),
    MarkovModulated((20.0, 200.0), (8.0, 1.0)),
    Curve(((0, 0), (20, 80), (40, 0)), repeat=True),
    Curve(((0, 80), (30, 80), (30, 0), (60, 0)), repeat=True, cv=0.5),
]


@pytest.mark.parametrize("source", SOURCES)
def test_sources_generate_their_mean_rate_and_its_multiples(source: Source) -> None:
    assert source.rate == pytest.approx(40.0)
    assert times(source, 20_000.0).size / 20_000 == pytest.approx(40.0, rel=0.05)
    more = source.scaled(3.0)
    assert more.rate == pytest.approx(120.0)
    assert times(more, 20_000.0).size / 20_000 == pytest.approx(120.0, rel=0.05)
    assert times(source.scaled(0.0), 20_000.0).size == 0


@pytest.mark.parametrize("source", [*SOURCES, ClosedLoop(5, think=1.0), Offline(7)])
def test_sources_with_one_seed_generate_one_ascending_sequence(source: Source) -> None:
    found = times(source, 300.0)
    assert found.size and (np.diff(found) >= 0).all()
    assert found.tolist() == times(source, 300.0).tolist()
    if not isinstance(source, Offline):
        assert found.tolist() != times(source, 300.0, seed=1).tolist()


def test_sources_are_independent_of_other_sources() -> None:
    def of_a(workload: Workload) -> list[float]:
        index = list(workload.sources).index("a")
        return [t for found, at in generate_arrivals(workload, 100.0, 3) for t in found[at == index].tolist()]

    bursts = SOURCES[3]
    alone = of_a(Workload({"a": bursts}))
    assert alone
    assert of_a(Workload({"b": Gamma(900.0, 4.0), "a": bursts, "c": Offline(10)})) == alone


def test_markov_modulated_process_is_bursty_with_lasting_states() -> None:
    source = MarkovModulated((10.0, 1000.0), (9.0, 1.0))
    counts, _ = np.histogram(times(source, 5000.0), np.arange(5001.0))
    assert counts.mean() == pytest.approx(source.rate, rel=0.1)
    assert counts.var() / counts.mean() > 100  # 1 for Poisson
    assert np.median(counts) < 20
    # States are left at `leave` a second, so that rates are correlated as exp(-leave t); and counts of two seconds in a
    # row as its integral over both.
    leave = 1 / 9 + 1
    around = counts - counts.mean()
    expected = (1 - math.exp(-leave)) ** 2 / (2 * (leave - 1 + math.exp(-leave)))
    assert (around[1:] * around[:-1]).mean() / around.var() == pytest.approx(expected, abs=0.05)


def test_markov_modulated_process_enters_all_states_equally_often() -> None:
    source = MarkovModulated((0.0, 30.0, 300.0), (1.0, 2.0, 1.0))
    assert source.rate == pytest.approx(90.0)
    assert times(source, 4000.0).size / 4000 == pytest.approx(90.0, rel=0.1)
    assert times(MarkovModulated((50.0,), (1.0,)), 400.0).size / 400 == pytest.approx(50.0, rel=0.05)


def test_curve_arrivals_follow_lines_steps_and_pauses() -> None:
    source = Curve(((0, 100), (100, 100), (100, 2000), (200, 0), (300, 0), (300, 500)))
    found = times(source, 400.0)
    assert rates(found, 0, 100, 150, 200, 300, 400) == pytest.approx([100, 1500, 500, 0, 500], rel=0.05)
    assert [source.at(time) for time in (0, 99, 100, 150, 250, 300, 1000)] == [100, 100, 2000, 1000, 0, 500, 500]


def test_curve_with_repeat_starts_again() -> None:
    source = Curve(((0, 0), (30, 100), (60, 0)), repeat=True)
    found = times(source, 6000.0)
    assert rates(found % 60, 0, 20, 40, 60) / 100 == pytest.approx([100 / 3, 250 / 3, 100 / 3], rel=0.05)
    assert source.at(75) == 50


def test_curve_with_tiny_rate_terminates() -> None:
    rare = Curve(((0, 0), (1, 2), (2, 0)), repeat=True).scaled(1e-7)
    assert times(rare, 1e9).size == pytest.approx(100, abs=40)
    assert times(Curve(((0, 0), (10, 0), (10, 5)), repeat=True), 1e9).size == 0
    assert times(Curve(((0, 0), (10, 0), (10, 5))), 20.0).size == pytest.approx(50, abs=25)


def test_curve_with_pauses_generates_ascending_times() -> None:
    found = times(Curve(((0, 300), (0.01, 300), (0.01, 0), (0.02, 0)), repeat=True), 2000.0)
    assert (np.diff(found) >= 0).all()
    assert found.size == pytest.approx(300_000, rel=0.01)
    assert (found % 0.02 < 0.01 + 1e-6).all()


def test_curve_steps_without_repeat_end() -> None:
    source = Curve.steps([100.0, 0.0, 400.0], 60.0)
    assert source.rate == pytest.approx(500 / 3)
    assert rates(times(source, 1e9), 0, 60, 120, 180, 1e9) == pytest.approx([100, 0, 400, 0], rel=0.05)
    again = Curve.steps([100.0, 0.0, 400.0], 60.0, repeat=True)
    assert rates(times(again, 240.0), 0, 60, 120, 180, 240) == pytest.approx([100, 0, 400, 100], rel=0.05)
    assert times(Curve.steps([], 60.0), 100.0).size == 0


def test_curve_with_cv_is_burstier_or_steadier_than_poisson() -> None:
    for cv in (0.25, 1.0, 3.0):
        gaps = np.diff(times(Curve(((0, 500.0),), cv=cv), 200.0))
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize(
    ("curve", "length", "known"),
    [
        (gpulet_waves(100, 300, 500), 3200, {0: 100, 600: 300, 1200: 100, 1300: 100, 1400: 100, 2300: 500, 3200: 100}),
        (hetsev_fluctuating(100, 300, 500), 2500, {0: 100, 500: 300, 1000: 100, 1100: 100, 1850: 500, 2500: 100}),
        (hetsev_production(200), 6000, {0: 200, 3500: 200, 3600: 800, 5000: 800, 6000: 200}),
        (wave(10, 30, 60), 60, {0: 10, 15: 20, 30: 30, 45: 20, 90: 30}),
    ],
)
def test_paper_curves_match_their_texts(curve: Curve, length: float, known: dict[float, float]) -> None:
    assert curve.points[-1][0] == length
    assert {time: pytest.approx(curve.at(time)) for time in known} == known


def test_hills_follow_a_cosine() -> None:
    curve = hills(10, [(100, 200, 50)])
    for time in np.linspace(100, 200, 37).tolist():
        assert curve.at(time) == pytest.approx(30 - 20 * math.cos(math.tau * (time - 100) / 100), abs=0.1)


def test_scaled_closed_loop_and_offline_round_to_whole_numbers() -> None:
    assert ClosedLoop(5).rate is None
    assert [ClosedLoop(5).scaled(factor).callers for factor in (0.0, 0.01, 0.5, 1.0, 1.5)] == [0, 1, 2, 5, 8]
    assert Offline(5).scaled(2.0) == Offline(10)
    assert times(ClosedLoop(3, samples=2), 1.0).tolist() == [0.0] * 6
    assert times(Offline(4), 1.0).tolist() == [0.0] * 4


def test_workload_scaled_multiplies_every_source() -> None:
    workload = Workload({"a": Poisson(3.0), "b": Gamma(2.0, 2.0)}, {"a": 0.1})
    assert workload.scaled(2.0) == Workload({"a": Poisson(6.0), "b": Gamma(4.0, 2.0)}, {"a": 0.1})
    assert Workload.poisson({"a": 3.0}) == Workload({"a": Poisson(3.0)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(math.nan), r"^a rate of nan requests/s must be finite and at least 0$"),
        (lambda: Poisson(1e300), r"^a rate of 1e\+300 requests/s is too high to simulate; at most 1e\+09$"),
        (lambda: Uniform(math.inf), r"^a rate of inf requests/s must be finite and at least 0$"),
        (lambda: Gamma(1.0, -1.0), r"^cv -1 of the gaps between arrivals must be above 0$"),
        (lambda: MarkovModulated((1.0, 2.0), (1.0,)), r"^2 rates and 1 stays; give one stay for each rate$"),
        (lambda: MarkovModulated((1.0,), (0.0,)), r"^stays of 0 s; all must be above 0$"),
        (lambda: Curve(((1, 5),)), r"^a curve begins at 0 s; give the rate there$"),
        (lambda: Curve(()), r"^a curve begins at 0 s; give the rate there$"),
        (lambda: Curve(((0, 5), (2, 5), (1, 5))), r"^a curve goes from 2 s to 1 s; points go in the order of time$"),
        (lambda: Curve(((0, 5),), repeat=True), r"^a curve that repeats must last longer than 0 s$"),
        (lambda: Curve(((0, -5),)), r"^a rate of -5 requests/s must be finite and at least 0$"),
        (lambda: Offline(10**12), r"^1e\+12 callers or samples; use 0 to 10,000,000$"),
        (lambda: ClosedLoop(10**6, samples=100), r"^1e\+08 callers or samples; use 0 to 10,000,000$"),
        (lambda: ClosedLoop(-1), r"^-1 callers or samples; use 0 to 10,000,000$"),
        (lambda: ClosedLoop(1, think=math.inf), r"^a think time of inf s must be finite and at least 0$"),
        (lambda: ClosedLoop(1, samples=0), r"^queries of 0 samples must have at least 1$"),
        (lambda: ClosedLoop(1).scaled(math.inf), r"^inf callers or samples; use 0 to 10,000,000$"),
        (lambda: Offline(1).scaled(-2), r"^-2 callers or samples; use 0 to 10,000,000$"),
        (lambda: Offline(-1), r"^-1 callers or samples; use 0 to 10,000,000$"),
    ],
)
def test_sources_with_invalid_arguments_raise_config_error(make: Callable[[], Source], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
