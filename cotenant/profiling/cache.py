"""Cache measured profiles by what they depend on: the model, the machine and the runtime."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from contextlib import ExitStack
from pathlib import Path

from cotenant.core.profile import Profile, read_profiles, write_profiles
from cotenant.errors import ConfigError


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/cotenant/profiles``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cotenant" / "profiles"


def machine_fingerprint() -> str:
    """Describe this machine's CPU, in words that change when the CPU does."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)


def file_digest(model: Path) -> str:
    """Hash a model file."""
    with model.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_key(model: str, *circumstances: str) -> str:
    """Hash everything that a model's profile depends on. model: the digest of its file."""
    digest = hashlib.sha256(model.encode())
    for words in circumstances:
        digest.update(b"\0" + words.encode())
    return digest.hexdigest()[:32]


def load_profile(name: str) -> Profile | None:
    """Return the profile cached under a key; None if there is none, or if it cannot be read."""
    path = cache_folder() / f"{name}.csv"
    try:
        (profile,) = read_profiles(path.read_text().splitlines(), str(path)).values()
    except (OSError, UnicodeDecodeError, ConfigError, ValueError):
        return None
    return profile


def load_number(name: str) -> float | None:
    """Return a number that was measured beside profiles and cached under a key; None if there is none."""
    try:
        return float((cache_folder() / f"{name}.txt").read_text())
    except (OSError, UnicodeDecodeError, ValueError):
        return None


def store_number(name: str, value: float) -> Path:
    """Cache a number under a key, atomically. Raises ConfigError if the folder cannot be written."""
    return _store(f"{name}.txt", f"{value!r}\n")


def store_profile(name: str, profile: Profile) -> Path:
    """Cache a profile under a key, atomically. Raises ConfigError if the folder cannot be written."""
    return _store(f"{name}.csv", write_profiles([profile]))


def _store(name: str, text: str) -> Path:
    path = cache_folder() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
        with ExitStack() as failed:
            failed.callback(Path(temporary).unlink)
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(temporary).replace(path)
            failed.pop_all()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot keep the profile: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    return path
