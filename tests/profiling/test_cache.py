from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cotenant.core.profile import Point, Profile
from cotenant.errors import ConfigError
from cotenant.profiling import cache

PROFILE = Profile("a", "cpu", [Point(share=500, batch=2, latency=0.01, memory=1 << 20, features={"cv_pct": 1.5})])


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_stored_profile_is_read_back(base: Path) -> None:
    assert cache.load_profile("key") is None
    path = cache.store_profile("key", PROFILE)
    assert path.is_relative_to(base)
    found = cache.load_profile("key")
    assert found is not None
    assert (found.model, found.kind, found.points) == ("a", "cpu", PROFILE.points)
    assert cache.load_profile("other") is None
    assert [file.name for file in path.parent.iterdir()] == ["key.csv"]  # nothing temporary is left


def test_cache_default_directory_is_in_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "cotenant" / "profiles"


def test_cache_key_depends_on_the_file_and_every_option(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"weights")
    keys = {
        cache.cache_key(cache.file_digest(file), "a", "b"),
        cache.cache_key(cache.file_digest(file), "a", "c"),
        cache.cache_key(cache.file_digest(file), "ab"),
        cache.cache_key(cache.file_digest(file)),
    }
    again = cache.cache_key(cache.file_digest(file), "a", "b")
    assert again in keys
    file.write_bytes(b"weightz")
    keys.add(cache.cache_key(cache.file_digest(file), "a", "b"))
    assert len(keys) == 5


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"model,kind\n", b"model,kind,share_pct,batch,latency_ms,memory_mib\na,cpu,50,1,fast,1\n"],
)
def test_cache_corrupt_file_counts_as_missing(content: bytes) -> None:
    cache.store_profile("key", PROFILE).write_bytes(content)
    assert cache.load_profile("key") is None


def test_cache_file_with_two_profiles_counts_as_missing() -> None:
    path = cache.store_profile("key", PROFILE)
    path.write_text(path.read_text() + path.read_text().splitlines()[-1].replace("a,", "b,") + "\n")
    assert cache.load_profile("key") is None


def test_cache_unwritable_directory_raises(base: Path) -> None:
    """Below a file, which is refused to root as well."""
    base.write_text("a file")
    with pytest.raises(
        ConfigError, match=r"key\.csv: cannot keep the profile: .*; set XDG_CACHE_HOME to a folder that"
    ):
        cache.store_profile("key", PROFILE)
    assert cache.load_profile("key") is None


def test_cache_failed_write_leaves_no_file(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        cache.store_profile("key", PROFILE)
    assert list(cache.cache_folder().iterdir()) == []
