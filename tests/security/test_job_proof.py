"""Only who can read the key can submit what reaches files, once, and nothing else with the same proof."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from cotenant.errors import ConfigError, ForbiddenError
from cotenant.live import job_proof
from cotenant.live.job_proof import JobKey

NOW = 1_800_000_000.0
PATH, BODY = "/cotenant/jobs", b'{"work":{}}'


@pytest.fixture
def key(tmp_path: Path) -> JobKey:
    return JobKey.of_file(tmp_path / "key")


def test_key_is_made_once_and_for_its_user_alone(tmp_path: Path, key: JobKey) -> None:
    assert stat.S_IMODE(key.path.stat().st_mode) == 0o600
    text = key.path.read_text()
    JobKey.of_file(tmp_path / "key").check(key.prove(PATH, BODY, NOW), PATH, BODY, NOW)
    assert key.path.read_text() == text


def test_proof_by_who_has_read_the_key_holds(key: JobKey) -> None:
    key.check(JobKey.read(key.path).prove(PATH, BODY, NOW), PATH, BODY, NOW + 59)


def test_proof_holds_once(key: JobKey) -> None:
    proof = key.prove(PATH, BODY, NOW)
    key.check(proof, PATH, BODY, NOW)
    with pytest.raises(ForbiddenError, match="expired"):
        key.check(proof, PATH, BODY, NOW)
    with pytest.raises(ForbiddenError, match="expired"):
        key.check(proof, PATH, BODY, NOW + 60)


@pytest.mark.parametrize(("path", "body"), [("/cotenant/other", BODY), (PATH, b'{"work":{"argv":["rm"]}}')])
def test_proof_is_for_one_request(key: JobKey, path: str, body: bytes) -> None:
    with pytest.raises(ForbiddenError, match="not by this server's key"):
        key.check(key.prove(PATH, BODY, NOW), path, body, NOW)


@pytest.mark.parametrize("passed", [-61.0, 61.0])
def test_proof_of_another_time_has_expired(key: JobKey, passed: float) -> None:
    with pytest.raises(ForbiddenError, match="the proof has expired; submit the job again"):
        key.check(key.prove(PATH, BODY, NOW), PATH, BODY, NOW + passed)


def test_proof_by_another_key_is_none(tmp_path: Path, key: JobKey) -> None:
    other = JobKey.of_file(tmp_path / "other")
    with pytest.raises(ForbiddenError, match="not by this server's key"):
        key.check(other.prove(PATH, BODY, NOW), PATH, BODY, NOW)


@pytest.mark.parametrize("proof", ["", "x", "1:2:3", f"{int(NOW)}:{'0' * 32}:{'g' * 64}", "é"])
def test_request_without_a_proof_is_told_the_way_out(key: JobKey, proof: str) -> None:
    with pytest.raises(ForbiddenError, match="submit it with `cotenant jobs submit` as that user"):
        key.check(proof, PATH, BODY, NOW)


def test_proof_says_nothing_of_the_key(key: JobKey) -> None:
    assert key.path.read_text().strip().removeprefix("cotenant-jobs-") not in key.prove(PATH, BODY, NOW)


def test_proofs_that_are_remembered_are_bounded_and_forgotten(key: JobKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_proof, "MOST_PROOFS", 2)
    for _ in range(2):
        key.check(key.prove(PATH, BODY, NOW), PATH, BODY, NOW)
    with pytest.raises(ForbiddenError, match="too many"):
        key.check(key.prove(PATH, BODY, NOW), PATH, BODY, NOW)
    key.check(key.prove(PATH, BODY, NOW + 300), PATH, BODY, NOW + 300)


def test_key_that_others_may_read_is_refused(key: JobKey) -> None:
    key.path.chmod(0o640)
    with pytest.raises(ConfigError, match="is not this user's alone; remove it"):
        JobKey.of_file(key.path)


def test_file_that_is_no_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("my password")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a key for jobs"):
        JobKey.read(path)


def test_disk_that_is_full_leaves_no_empty_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("cotenant.live.job_proof.secrets.token_hex", full)
        with pytest.raises(OSError, match="No space"):
            JobKey.of_file(tmp_path / "key")
    assert list(tmp_path.iterdir()) == []
    JobKey.of_file(tmp_path / "key")


def test_pipe_is_no_key(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key")
    with pytest.raises(ConfigError, match="is not a file"):
        JobKey.read(tmp_path / "key")
