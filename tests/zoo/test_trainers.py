from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cotenant.errors import ConfigError
from cotenant.worker.jobs.context import JobContext, Step
from cotenant.zoo import trainers

pytest.importorskip("torch")


def train(folder: Path, steps: int, take: int) -> list[Step]:
    """Take some steps, and stop the job there."""
    job = trainers.digits(JobContext(folder, steps=steps, batch=128))
    taken = list(itertools.islice(job, take))
    job.close()
    assert all(isinstance(step, Step) for step in taken)
    return taken  # type: ignore[return-value]


def test_digits_are_learnt_and_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    first = train(tmp_path, 60, 33)
    assert [step.done for step in first] == list(range(1, 34))
    rest = train(tmp_path, 60, 100)
    assert [step.done for step in rest] == list(range(34, 61))
    assert rest[-1].metrics["accuracy"] > 0.85 > 0.5 > rest[-1].metrics["loss"] > 0
    assert not train(tmp_path, 60, 100)  # it is done


def test_damaged_checkpoint_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 60, 3)
    (tmp_path / "checkpoint.pt").write_bytes(b"half")
    assert train(tmp_path, 60, 1)[0].done == 1
    assert "the checkpoint is not used" in capsys.readouterr().out


def test_crash_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    train(tmp_path, 60, 3)
    (tmp_path / "checkpoint.new").write_bytes(b"half")
    assert train(tmp_path, 60, 1)[0].done == 4


def test_unknown_trainer_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"^source: the zoo trains no 'letters'; it trains digits, bert_train, "):
        trainers.trainer("letters")
