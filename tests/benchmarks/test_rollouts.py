"""What `benchmarks.rollouts` reports of a series of runs, and which arguments and files it refuses."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.rollouts import Result, Run, main

RUN = Run(
    kind="workers",
    models=("other", "text"),
    requests_without=100,
    within_without=100,
    outcomes_without=(),
    requests=200,
    within=199,
    failed=0,
    outcomes={},
    switches=[0.001],
    processor=[0.0005],
    wholes=[0.3],
    memory_before=2**20,
    memory_after=2**20,
    load_average=0.5,
)


def report(monkeypatch: pytest.MonkeyPatch, series: Path, *options: str, models: str = "text other") -> None:
    """Report a series that has the one rollout that is asked for, so that no server is needed."""
    given = ["--series", str(series), "--rollouts", "1", "--models", *models.split(), "--json", *options]
    monkeypatch.setattr("sys.argv", ["rollouts", *given])
    main()


@pytest.fixture
def series(tmp_path: Path) -> Path:
    path = tmp_path / "series.jsonl"
    path.write_bytes(msgspec.json.encode(RUN) + b"\n")
    return path


def test_series_of_the_same_models_in_any_order_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], series: Path
) -> None:
    report(monkeypatch, series)
    result = msgspec.json.decode(capsys.readouterr().out, type=Result)
    assert (result.runs, result.rollouts, result.requests) == (1, 1, 200)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--rollouts", "0"], "argument --rollouts: 0 is not 1 or more"),
        (["--rollouts", "-3"], "argument --rollouts: -3 is not 1 or more"),
        (["--limit", "0"], "argument --limit: 0 is not above 0 seconds"),
        (["--limit", "nan"], "argument --limit: nan is not above 0 seconds"),
        (["--limit", "soon"], "argument --limit: invalid"),
    ],
)
def test_no_rollouts_or_no_time_for_them_is_an_error_of_the_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], series: Path, options: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as exited:
        report(monkeypatch, series, *options)
    assert exited.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "models", "reason"),
    [
        (["--kind", "shares"], "text other", "has runs of another --kind"),
        ([], "text", r"has runs of other --models \(other text\)"),
        ([], "text other third", r"has runs of other --models \(other text\)"),
    ],
)
def test_series_of_another_kind_or_of_other_models_is_refused(
    monkeypatch: pytest.MonkeyPatch, series: Path, options: list[str], models: str, reason: str
) -> None:
    with pytest.raises(SystemExit, match=reason):
        report(monkeypatch, series, *options, models=models)


@pytest.mark.parametrize("line", [b'{"kind":"workers"}', b"no JSON"])
def test_file_that_is_no_series_is_refused(monkeypatch: pytest.MonkeyPatch, series: Path, line: bytes) -> None:
    series.write_bytes(line + b"\n")
    with pytest.raises(SystemExit, match="is not a series of runs"):
        report(monkeypatch, series)
