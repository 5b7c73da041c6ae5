import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import ConfigError
from cotenant.workload import Workload
from cotenant.workload.arrivals import Floats, Times, generate_arrivals, merge_arrivals, random_streams
from cotenant.workload.sources import Gamma, Poisson, Uniform


def rng() -> np.random.Generator:
    return random_streams(0, ["x"])["x"]


def first(times: Times, count: int) -> Floats:
    chunks = []
    while count > 0:
        chunks.append(next(times)[:count])
        count -= chunks[-1].size
    return np.concatenate(chunks)


def collected(rates: dict[str, float], seconds: float, seed: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in rates}
    names = list(rates)
    for times, sources in generate_arrivals(Workload.poisson(rates), seconds, seed):
        for time, source in zip(times.tolist(), sources.tolist(), strict=True):
            found[names[source]].append(time)
    return found


def test_poisson_gaps_have_exponential_mean_and_deviation() -> None:
    gaps = np.diff(first(Poisson(200.0).times(rng()), 100_000))
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 200, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("cv", [0.25, 2.0, 4.0])
def test_gamma_gaps_have_the_given_cv(cv: float) -> None:
    gaps = np.diff(first(Gamma(50.0, cv).times(rng()), 200_000))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_uniform_arrivals_are_evenly_spaced_across_chunks() -> None:
    times = first(Uniform(10.0).times(rng()), 10_000)
    assert 0 <= times[0] <= 0.1
    assert np.diff(times) == pytest.approx(0.1)


def test_sources_with_rate_0_generate_no_arrivals() -> None:
    assert list(Poisson(0.0).times(rng())) == []
    assert list(merge_arrivals([Poisson(0.0).times(rng())], 10.0)) == []
    assert list(merge_arrivals([], 10.0)) == []


def test_generate_arrivals_with_one_seed_is_reproducible() -> None:
    assert collected({"a": 30.0, "b": 90.0}, 20.0, 7) == collected({"a": 30.0, "b": 90.0}, 20.0, 7)
    assert collected({"a": 30.0}, 20.0, 7) != collected({"a": 30.0}, 20.0, 8)


def test_generate_arrivals_of_a_model_are_independent_of_others() -> None:
    alone = collected({"a": 30.0}, 20.0, 7)["a"]
    assert collected({"new": 5.0, "a": 30.0, "b": 900.0}, 20.0, 7)["a"] == alone


@given(
    st.lists(st.lists(st.floats(0, 100), max_size=30).map(sorted), max_size=5),
    st.integers(1, 7),
    st.floats(0.1, 120),
)
def test_merge_arrivals_orders_times_stably_before_the_end(
    sources: list[list[float]], size: int, seconds: float
) -> None:
    def chunks(times: list[float]) -> Times:
        return (np.array(times[start : start + size]) for start in range(0, len(times), size))

    merged = [
        (float(time), int(source))
        for times, indices in merge_arrivals([chunks(times) for times in sources], seconds)
        for time, source in zip(times, indices, strict=True)
    ]
    assert [time for time, _ in merged] == sorted(time for times in sources for time in times if time < seconds)
    for index, times in enumerate(sources):
        assert [time for time, source in merged if source == index] == [time for time in times if time < seconds]


def test_generate_arrivals_with_invalid_arguments_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"^a rate of -1 requests/s must be finite and at least 0$"):
        Poisson(-1.0)
    with pytest.raises(ConfigError, match=r"^cv 0 of the gaps between arrivals must be above 0$"):
        Gamma(1.0, 0.0)
    with pytest.raises(ConfigError, match=r"^a run of 0 s must be finite and longer than 0 s$"):
        next(generate_arrivals(Workload.poisson({"a": 1.0}), 0.0, 0))
    with pytest.raises(ConfigError, match=r"^seed -3 is negative; use 0 or more$"):
        random_streams(-3, ["a"])
