from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cotenant.errors import ConfigError
from cotenant.workload.arrivals import Floats, random_streams
from cotenant.workload.traces import Trace, TraceSource, TraceSummary, read_minutes

TRACE = """HashOwner,HashApp,HashFunction,Trigger,1,2,3
o,a,f,http,60,0,120
o,a,g,timer,1,1,1
o,a,f,queue,0,60,0
"""


@pytest.mark.parametrize("heading", ["", "minute_"])
def test_read_minutes_returns_rates_by_function(tmp_path: Path, heading: str) -> None:
    header, rows = TRACE.split("\n", 1)
    header = ",".join(heading + name if name.isdigit() else name for name in header.split(","))
    (tmp_path / "t.csv").write_text(f"{header}\n{rows}")
    rates = [(name, found.tolist()) for name, found in read_minutes(tmp_path / "t.csv")]
    assert [name for name, _ in rates] == ["f", "g", "f"]
    assert rates[0][1] == [1, 0, 2]
    assert rates[1][1] == pytest.approx([1 / 60] * 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t\.csv:1: column 'HashFunction' is missing; available: none$"),
        ("a,1\nx,2\n", r"t\.csv:1: column 'HashFunction' is missing; available: a, 1$"),
        ("HashFunction,rate\nx,2\n", r"t\.csv:1: no column is headed by the number of a minute: 1, 2, …$"),
        ("HashFunction,1,2,4\nx,2,1,1\n", r"t\.csv:1: minute 3 is missing: a column 4 is in its place$"),
        (
            "HashFunction,minute_1,minute_3\nx,2,1\n",
            r"t\.csv:1: minute 2 is missing: a column minute_3 is in its place$",
        ),
        ("HashFunction,1,2\nx,2\n", r"t\.csv:2: 2 cells where the header names 3$"),
        ("HashFunction,1\nx,2\ny,many\n", r"t\.csv:3: minute 1: 'many' is not a number of 0 or more$"),
        ("HashFunction,1\nx,-2\n", r"t\.csv:2: minute 1: '-2' is not a number of 0 or more$"),
    ],
)
def test_read_minutes_of_invalid_file_raises_config_error_with_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        list(read_minutes(tmp_path / "t.csv"))


def trace(folder: Path, text: str, column: str | int = "time", key: str | int | None = None, **more: float) -> Trace:
    file = folder / "t.csv"
    file.write_text(text)
    return Trace(file=file, column=column, key=key, **more)


def replayed(source: TraceSource, seed: int = 0) -> Floats:
    return np.concatenate([np.empty(0), *source.times(random_streams(seed, ["x"])["x"])])


def test_trace_source_replays_times_since_first_request(tmp_path: Path) -> None:
    known = trace(tmp_path, "func,time,duration\nf,100.5,1\ng,101,1\nf,103,1\n", key="func")
    summary = TraceSummary.of(known)
    assert summary == TraceSummary(100.5, 103.0, Counter(f=2, g=1))
    assert replayed(TraceSource(trace=known, summary=summary)).tolist() == [0.0, 0.5, 2.5]
    assert replayed(TraceSource(trace=known, summary=summary, names=frozenset("g"))).tolist() == [0.5]
    twice = TraceSource(trace=known, summary=summary, names=frozenset("f"), speed=2.0)
    assert replayed(twice).tolist() == [0.0, 1.25]
    assert twice.rate == pytest.approx(2 / 1.25)


@pytest.mark.parametrize(
    ("text", "column", "unit"),
    [
        ("time\n5\n7.25\n", "time", 1.0),
        ("5\n7.25\n", 1, 1.0),
        ("time\n5000\n7250\n", "time", 1e-3),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.6805900,9\n2023-11-16 18:15:48.9305900,3\n", "TIMESTAMP", 1.0),
        ("time\n2024-05-10T00:00:01+00:00\n2024-05-10T02:00:03.250+02:00\n", "time", 1.0),
        ("id,created_at\n1,Wed Oct 10 20:19:24 +0000 2018\n", "created_at", 1.0),
    ],
)
def test_trace_times_parse_as_numbers_dates_or_twitter_format(
    tmp_path: Path, text: str, column: str | int, unit: float
) -> None:
    known = trace(tmp_path, text, column, unit=unit)
    times = replayed(TraceSource(trace=known, summary=TraceSummary.of(known)))
    assert times == pytest.approx([0.0, 2.25][: times.size], abs=1e-6)


def test_trace_of_many_rows_streams_unchanged(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(0.01, 20_000))
    names = rng.choice(["f", "g"], times.size)
    known = trace(tmp_path, "".join(f"{n},{t!r}\n" for n, t in zip(names, times.tolist(), strict=True)), 2, 1)
    summary = TraceSummary.of(known)
    source = TraceSource(trace=known, summary=summary, names=frozenset("g"))
    assert replayed(source) == pytest.approx(times[names == "g"] - times[0])
    assert max(chunk.size for chunk in source.times(rng)) < 5000
    assert source.rate == pytest.approx(50, rel=0.05)


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 2.0, 2.5])
def test_trace_source_scaled_drops_or_repeats_requests(tmp_path: Path, factor: float) -> None:
    times = [n * 0.01 for n in range(10_000)] + [100 + n * 0.1 for n in range(1000)]
    known = trace(tmp_path, "time\n" + "".join(f"{time!r}\n" for time in times))
    source = TraceSource(trace=known, summary=TraceSummary.of(known)).scaled(factor)
    found = replayed(source)
    assert (np.diff(found) >= 0).all()
    busy, calm = (found < 100).sum(), (found >= 100).sum()
    assert busy == pytest.approx(10_000 * factor, rel=0.05)
    assert calm == pytest.approx(1000 * factor, rel=0.15)
    assert np.unique(found[found < 199.9]).size == (found < 199.9).sum()  # copies of the last have no time left
    assert replayed(source).tolist() == found.tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("when\n1\n", r"t\.csv:1: column 'time' is missing; available: when$"),
        ("", r"t\.csv:1: column 'time' is missing; available: none$"),
        ("time\n", r"t\.csv: it contains no request$"),
        ('f,time\na,1\n"b', r"t\.csv:3: 1 cells; column 2 is missing$"),
        ("f,time\na,1\nb\n", r"t\.csv:3: 1 cells; column 2 is missing$"),
        ("time\n1\nsoon\n", r"t\.csv:3: 'soon' is not a time in the format of those before it$"),
        ("time\nsoon\n", r"t\.csv:2: 'soon' is neither a number nor a date and time$"),
        ("time\n1\nnan\n", r"t\.csv:3: a time is not a finite number$"),
        ("time\n5\n3\n", r"t\.csv:3: time goes back by 2 s; sort the file by time$"),
        ("time\n5\n9000\n", r"t\.csv:3: nothing for 8,995 s before this line; put in what is missing, or allow"),
        ("time\n" + "1\n" * 5000 + "0.5\n", r"t\.csv:5002: time goes back by 0\.5 s; sort the file by time$"),
    ],
)
def test_trace_with_invalid_times_raises_config_error_with_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TraceSummary.of(trace(tmp_path, text))


def test_trace_source_with_unknown_name_or_factor_raises_config_error(tmp_path: Path) -> None:
    known = trace(tmp_path, "func,time\nf,1\nf,2\ng,2\n", key="func")
    with pytest.raises(ConfigError, match=r"t\.csv: no requests for 'h'; most frequent are f, g$"):
        TraceSource(trace=known, summary=TraceSummary.of(known), names=frozenset("h"))
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read: No such file or directory$"):
        TraceSummary.of(Trace(file=tmp_path / "none.csv", column="time"))
    with pytest.raises(ConfigError, match=r"t\.csv: column 0; the first is 1$"):
        TraceSummary.of(trace(tmp_path, "1\n", 0))


def test_trace_changed_between_reads_raises_config_error(tmp_path: Path) -> None:
    known = trace(tmp_path, "func,time\nf,1\nf,2\n", key="func")
    source = TraceSource(trace=known, summary=TraceSummary.of(known))
    known.file.write_text("func,time\nf,1\nf,gone\n")
    with pytest.raises(ConfigError, match=r"t\.csv: it has changed since it was first read; start again$"):
        replayed(source)
