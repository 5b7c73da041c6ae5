"""`config.read_workload`: TOML to the sources of `cotenant.workload`."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

import cotenant
from cotenant.config.workload import read_failures, read_workload
from cotenant.core.identity import DeviceId, LaneId
from cotenant.errors import ConfigError
from cotenant.workload import Source, Workload
from cotenant.workload.failures import Failure
from cotenant.workload.shapes import hills, wave
from cotenant.workload.sources import ClosedLoop, Curve, Gamma, MarkovModulated, Offline, Poisson, Uniform
from cotenant.workload.traces import TraceSource

NAMES = ["resnet50", "minilm", "game"]
MINUTES = "HashFunction,1,2\nf,60,0\ng,60,120\nf,60,60\n"
TIMES = "func,end_timestamp\nf,10\ng,11\nf,14\n"


def read(folder: Path, text: str) -> Workload:
    (folder / "minutes.csv").write_text(MINUTES)
    (folder / "times.csv").write_text(TIMES)
    file = folder / "w.toml"
    file.write_text(text)
    return read_workload(file, NAMES)


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ("rate = 20", Poisson(20)),
        ("arrivals = 'poisson'\nrate = 20\nscale = 0.5", Poisson(10)),
        ("arrivals = 'gamma'\nrate = 20\ncv = 2", Gamma(20, 2)),
        ("arrivals = 'uniform'\nrate = 20", Uniform(20)),
        ("arrivals = 'modulated'\nrates = [10, 90]\nstays = ['10s', '1min']", MarkovModulated((10, 90), (10, 60))),
        ("arrivals = 'curve'\npoints = [['0s', 5], ['1h', 9]]\nrepeat = true", Curve(((0, 5), (3600, 9)), True)),
        ("arrivals = 'steps'\nrates = [5, 9]\nevery = '1min'", Curve.steps([5, 9], 60)),
        ("arrivals = 'wave'\nlow = 5\nhigh = 9\nperiod = '1h'", wave(5, 9, 3600)),
        ("arrivals = 'hills'\nlow = 5\npeaks = [['0s', '20min', 9]]", hills(5, [(0, 1200, 9)])),
        ("arrivals = 'minutes'\nfile = 'minutes.csv'\nnames = ['f']", Curve.steps([2, 1], 60)),
        (
            "arrivals = 'minutes'\nfile = 'minutes.csv'\nrate = 30\nrepeat = true",
            Curve.steps([30, 30], 60, repeat=True),
        ),
        ("arrivals = 'closed'\ncallers = 3\nthink = '50ms'", ClosedLoop(3, 0.05)),
        ("arrivals = 'server'\nrate = 20", Poisson(20)),
    ],
)
def test_read_workload_reads_every_arrival_process(tmp_path: Path, entry: str, source: Source) -> None:
    workload = read(tmp_path, f"[[workload]]\nmodel = 'minilm'\n{entry}\n")
    assert workload == Workload({"minilm": source})


def test_read_workload_of_patient_mlperf_scenarios_never_times_out(tmp_path: Path) -> None:
    workload = read(
        tmp_path,
        """
        [[workload]]
        model = "resnet50"
        arrivals = "single_stream"
        [[workload]]
        model = "minilm"
        arrivals = "multi_stream"
        [[workload]]
        model = "game"
        arrivals = "offline"
        samples = 100
        timeout = "1min"
        """,
    )
    sources: dict[str, Source] = {"resnet50": ClosedLoop(1), "minilm": ClosedLoop(1, samples=8), "game": Offline(100)}
    assert workload == Workload(sources, {"resnet50": math.inf, "minilm": math.inf, "game": 60.0})


def test_read_workload_of_a_trace_splits_it_by_name_and_rescales(tmp_path: Path) -> None:
    head = "arrivals = 'times'\nfile = 'times.csv'\ncolumn = 'end_timestamp'\nkey = 'func'\n"
    workload = read(
        tmp_path,
        f"[[workload]]\nmodel = 'resnet50'\n{head}names = ['f']\nrate = 3\n"
        f"[[workload]]\nmodel = 'minilm'\n{head}names = ['g', 'f']\nspeed = 2\n",
    )
    resnet50, minilm = workload.sources.values()
    assert isinstance(resnet50, TraceSource)
    assert isinstance(minilm, TraceSource)
    assert (resnet50.names, resnet50.factor, resnet50.rate) == (frozenset("f"), 6.0, 3.0)
    assert (minilm.names, minilm.speed, minilm.rate) == (frozenset("fg"), 2.0, 1.5)


def test_read_workload_applies_scale_and_timeouts(tmp_path: Path) -> None:
    workload = read(
        tmp_path,
        """
        scale = 1.5
        [[workload]]
        model = "resnet50"
        rate = 20
        scale = 2
        timeout = "80ms"
        [[workload]]
        model = "minilm"
        rate = 10
        timeout = "never"
        """,
    )
    assert workload.sources == {"resnet50": Poisson(60.0), "minilm": Poisson(15.0)}
    assert workload.timeouts == {"resnet50": 0.08, "minilm": math.inf}


def test_read_failures_reads_the_workload_file(tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    file.write_text(
        """
        workload = []
        [[failures]]
        parts = ["v100-0", "v100-1"]
        time = "1min"
        back = "30s"
        [[failures]]
        parts = ["v100-2/1"]
        time = "0s"
        """
    )
    assert read_failures(file) == (
        Failure(parts=(DeviceId.parse("v100-0"), DeviceId.parse("v100-1")), time=60.0, back=30.0),
        Failure(parts=(LaneId.parse("v100-2/1"),), time=0.0),
    )
    file.write_text(
        "workload = []\n[[failures]]\nnodes = ['node-a']\ntime = '1s'\nback = '5s'\n"
        "[[failures]]\nnodes = ['node-a', 'node-b']\ntime = '2s'\nnoticed = '0s'\n"
    )
    assert read_failures(file) == (
        Failure(nodes=("node-a",), time=1.0, back=5.0, noticed=0.8),
        Failure(nodes=("node-a", "node-b"), time=2.0, noticed=0.0),
    )
    file.write_text("workload = []\n[[failures]]\nparts = ['v100-0']\ntime = '1s'\nnoticed = '1s'\n")
    with pytest.raises(ConfigError, match=r"failures\[0\]: noticed: it applies to nodes, and none are named"):
        read_failures(file)
    file.write_text("workload = []\n[[failures]]\nparts = []\ntime = '1s'\n")
    with pytest.raises(ConfigError, match=r"w\.toml: failures\[0\]: a failure of nothing; name a worker such as"):
        read_failures(file)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("model = 'resnet5'\nrate = 1", "model 'resnet5' is unknown; did you mean 'resnet50'?"),
        ("model = 'minilm'\narrivals = 'gama'\nrate = 1", "arrivals 'gama' are unknown; did you mean 'gamma'?"),
        (
            "model = 'minilm'\narrivals = 3",
            "arrivals 3 are unknown; available: poisson, gamma, uniform, modulated, curve, steps, wave, hills, "
            "minutes, times, closed, single_stream, multi_stream, server, offline",
        ),
        ("model = 'minilm'\nrat = 1", "unknown key 'rat'; did you mean 'rate'? (arrivals = 'poisson')"),
        (
            "model = 'minilm'\nrate = 1\ncv = 2",
            "unknown key 'cv'; available: model, arrivals, timeout, scale, rate (arrivals = 'poisson')",
        ),
        ("model = 'minilm'", "key 'rate' is missing (arrivals = 'poisson')"),
        ("model = 'minilm'\nrate = 'much'", "rate: found text in quotes; write a number (arrivals = 'poisson')"),
        ("model = 'minilm'\nrate = -1", "a rate of -1 requests/s must be finite and at least 0"),
        (
            "model = 'minilm'\narrivals = 'closed'\ncallers = 1\nthink = 5",
            'think: \'5\' has no unit of time; write it as "25ms" or "1.5s"',
        ),
        ("model = 'minilm'\nrate = 1\ntimeout = '0s'", "timeout: '0s' must be above 0"),
        (
            "model = 'minilm'\narrivals = 'minutes'\nfile = 'minutes.csv'\nnames = ['h']",
            "names: nothing in minutes.csv is called 'h'",
        ),
        (
            "model = 'minilm'\narrivals = 'times'\nfile = 'times.csv'\ncolumn = 'end_timestamp'\nnames = ['f']",
            "names without a key; set `key` to the column that holds them",
        ),
        ("model = 'minilm'\narrivals = 'steps'\nrates = [5]\nevery = '0s'", "steps of 0 s; use more than 0"),
        (
            "model = 'minilm'\narrivals = 'times'\nfile = 'times.csv'\ncolumn = 1\nkey = 2\nnames = []",
            "names: none; leave it out to use all, or leave out the entry to use none",
        ),
    ],
)
def test_read_workload_with_a_mistake_names_its_place(tmp_path: Path, entry: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f"[[workload]]\n{entry}\n")
    assert str(caught.value) == f"{tmp_path / 'w.toml'}: workload[0]: {message}"


def test_read_workload_with_a_wrong_trace_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "back.csv").write_text("t\n2\n1\n")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "[[workload]]\nmodel = 'minilm'\narrivals = 'times'\nfile = 'back.csv'\ncolumn = 't'\n")
    told = (
        f"{tmp_path / 'w.toml'}: workload[0]: {tmp_path / 'back.csv'}:3: time goes back by 1 s; sort the file by time"
    )
    assert str(caught.value) == told


def test_read_workload_with_a_model_twice_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload\[1\]: model 'minilm' appears twice; keep one entry$"):
        read(tmp_path, "[[workload]]\nmodel = 'minilm'\nrate = 1\n" * 2)


def test_example_workload_is_simulated() -> None:
    examples = Path(__file__).parents[1] / "docs" / "examples"
    problem = cotenant.read_problem(examples / "problem.toml")
    workload = cotenant.read_workload(examples / "workload.toml", problem.rates)
    assert len({type(source) for source in workload.sources.values()}) >= 5
    assert [failure.time for failure in cotenant.read_failures(examples / "workload.toml")] == [300.0]
    assert all(next(source.times(np.random.default_rng(0))).size for source in workload.sources.values())


def test_read_workload_of_a_csv_trace_needs_no_toml(tmp_path: Path) -> None:
    minutes, times = tmp_path / "minutes.csv", tmp_path / "times.csv"
    minutes.write_text("model,1,2\nresnet50,60,0\nminilm,60,120\nresnet50,60,60\n")
    times.write_text("time,model\n10,resnet50\n11,game\n14,resnet50\n")
    assert read_workload(minutes, NAMES).sources == {
        "resnet50": Curve.steps([2, 1], 60),
        "minilm": Curve.steps([1, 2], 60),
    }
    replayed = read_workload(times, NAMES).sources
    rng = np.random.default_rng(0)
    assert {name: np.concatenate(list(it.times(rng))).tolist() for name, it in replayed.items()} == {
        "resnet50": [0, 4],
        "game": [1],
    }
    assert read_failures(times) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,who\n1,resnet50\n", "t.csv:1: no column 'model' says what was asked for; available: time, who"),
        ("", "t.csv:1: no column 'model' says what was asked for; available: none"),
        ("model\nresnet50\n", "t.csv:1: no column of times, or of minutes headed 1, 2, …, is next to 'model'"),
        ("time,model\n1,resnet\n", "t.csv: model 'resnet' is unknown; did you mean 'resnet50'?"),
        ("model,1,3\nresnet50,1,1\n", "t.csv:1: minute 2 is missing"),
        ("time,model\n2,minilm\n1,minilm\n", "t.csv:3: time goes back by 1 s"),
    ],
)
def test_read_workload_of_a_trace_without_models_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_workload(tmp_path / "t.csv", NAMES)
