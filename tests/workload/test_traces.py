import numpy as np
import pytest

from cotenant.errors import ConfigError
from cotenant.workload.arrivals import merge, streams, varying
from cotenant.workload.traces import read_minutes, scaled

TRACE = """HashOwner,HashApp,HashFunction,Trigger,1,2,3
o,a,f,http,60,0,120
o,a,g,timer,1,1,1
o,a,f,queue,0,60,0
"""


def test_counts_a_minute_become_rates_by_function() -> None:
    rates = read_minutes(TRACE.splitlines(), "trace.csv")
    assert rates.keys() == {"f", "g"}
    assert rates["f"].tolist() == [1, 1, 2]
    assert rates["g"] == pytest.approx(1 / 60)


def test_a_scaled_trace_keeps_its_shape() -> None:
    assert scaled(np.array([1.0, 1.0, 2.0]), 40.0).tolist() == [30.0, 30.0, 60.0]
    assert scaled(np.zeros(3), 40.0).tolist() == [0.0, 0.0, 0.0]
    assert scaled(np.empty(0), 40.0).size == 0


def test_arrivals_follow_the_rates_step_by_step() -> None:
    rates = np.array([100.0, 0.0, 400.0])
    chunks = list(merge([varying(rates, 60.0, streams(0, ["f"])["f"])], 1e9))
    times = np.concatenate([times for times, _ in chunks])
    assert (np.diff(times) >= 0).all()
    counts, _ = np.histogram(times, [0.0, 60.0, 120.0, 180.0])
    assert counts == pytest.approx(rates * 60, rel=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"^t\.csv:1: column 'HashFunction' is missing; there are none$"),
        ("a,1\nx,2\n", r"^t\.csv:1: column 'HashFunction' is missing; there are a, 1$"),
        ("HashFunction,rate\nx,2\n", r"^t\.csv:1: no column is headed by the number of a minute: 1, 2, …$"),
        ("HashFunction,1,2\nx,2\n", r"^t\.csv:2: 2 cells where the header names 3$"),
        ("HashFunction,1\nx,2\ny,many\n", r"^t\.csv:3: could not convert string to float: 'many'$"),
        ("HashFunction,1\nx,-2\n", r"^t\.csv:2: a count is not a finite number of 0 or more$"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_minutes(text.splitlines(), "t.csv")


def test_rates_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="not all rates are finite numbers of 0 or more"):
        varying(np.array([1.0, -1.0]), 60.0, streams(0, ["f"])["f"])
    with pytest.raises(ConfigError, match=r"^a mean rate of nan requests/s is none; take 0 or more$"):
        scaled(np.ones(2), float("nan"))
