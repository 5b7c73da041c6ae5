"""The folders of a repository: which models there are, in which versions, and which file of a version is the model."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from cotenant.errors import ConfigError, ModelError, NotFoundError
from cotenant.worker.repository.config import CONFIG, Config, read_config, stays_inside

# File that a version holds → Triton's platform and backend. It has no platform for the last two, only the backend.
PLATFORMS = {
    "model.onnx": ("onnxruntime_onnx", "onnxruntime"),
    "model.pt": ("pytorch_libtorch", "pytorch"),
    "model.pt2": ("pytorch_export", "pytorch"),
    "model.py": ("pytorch_module", "pytorch"),
}
ENSEMBLE = "ensemble"  # Triton's platform of what has steps and no file (ensemble.py)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a model.

    folder: the model's, which holds config.pbtxt and the versions. path: the model's file, or the place of the trouble.
    reason: why it cannot be served; empty where it can, as far as looking at it without opening it tells.
    """

    name: str
    folder: Path
    path: Path
    version: str = ""
    platform: str = ""
    config: Config = Config()
    reason: str = ""


def scan_repository(root: Path) -> list[Entry]:
    """Every version to serve of every model, by name and version. A bad model gives an entry that says why, and stops
    no other. Raises ConfigError where there is no repository."""
    return [entry for name in sorted(_names(root)) for entry in _versions(root, name)]


def find_model(root: Path, name: str, version: str = "") -> Entry:
    """The version asked for, or the latest that is served. It may have a `reason`.

    Raises NotFoundError for what is not there or not one folder of the repository.
    """
    # Looked up, not joined: a name that climbs out, or is no name at all, is simply not among them.
    if name not in _names(root):
        raise NotFoundError(f"no model {name!r} in {str(root)!r}; a model is one of its folders")
    entries = _versions(root, name)
    if not version or not entries[-1].version:
        return entries[-1]
    for entry in entries:
        if entry.version == version:
            return entry
    served = ", ".join(entry.version for entry in entries)
    raise NotFoundError(f"model {name!r} has no version {version!r} to serve; it has {served}")


def _names(root: Path) -> list[str]:
    try:
        return [path.name for path in root.iterdir() if not path.name.startswith(".") and path.is_dir()]
    except OSError as error:
        raise ConfigError(
            f"no model repository at {str(root)!r}: {error.strerror}; name a folder of <model>/<version>/model.onnx"
        ) from None


def _versions(root: Path, name: str) -> list[Entry]:
    """At least one entry. Only one that says why nothing can be served has no version."""
    folder = root / name
    try:
        stays_inside(root, folder)
        config = read_config(folder)
        numbers = sorted(
            int(path.name) for path in folder.iterdir() if re.fullmatch("[1-9][0-9]*", path.name) and path.is_dir()
        )
        if config.ensemble_scheduling is not None or config.platform == ENSEMBLE:
            return [_ensemble(folder, config, str(numbers[-1] if numbers else 1))]
        if not numbers:
            raise ModelError(f"{folder}: no version; put the model into {folder / '1' / next(iter(PLATFORMS))}")
        chosen = config.version_policy.select(numbers)
        if not chosen:
            raise ModelError(
                f"{folder / CONFIG}: version_policy asks for none of the versions that are there: {numbers}"
            )
    except ModelError as error:
        return [Entry(name=name, folder=folder, path=folder, reason=str(error))]
    except OSError as error:
        return [
            Entry(name=name, folder=folder, path=folder, reason=f"{folder}: {error.strerror}; let this user read it")
        ]
    return [_entry(root, folder, config, version) for version in map(str, chosen)]


def _ensemble(folder: Path, config: Config, version: str) -> Entry:
    """An ensemble has no file. In Triton's layout it has an empty folder for its version."""
    path = folder / CONFIG
    reason = ""
    if config.platform != ENSEMBLE:
        reason = f'{path}: ensemble_scheduling in a model of platform {config.platform!r}; write platform: "{ENSEMBLE}"'
    elif config.ensemble_scheduling is None or not config.ensemble_scheduling.step:
        reason = f"{path}: an ensemble without steps; list them in ensemble_scheduling"
    return Entry(
        name=folder.name, folder=folder, path=folder, version=version, platform=ENSEMBLE, config=config, reason=reason
    )


def _entry(root: Path, folder: Path, config: Config, version: str) -> Entry:
    path = folder / version
    platform = reason = ""
    try:
        file, platform = _file(path, config)
        path /= file
        stays_inside(root, path)
        if not path.is_file():
            raise ModelError(f"{path}: no such file; a version holds {' or '.join(PLATFORMS)}")
        if not path.stat().st_size:
            raise ModelError(f"{path}: the file is empty; export the model again")
        if not os.access(path, os.R_OK):
            raise ModelError(f"{path}: no permission to read it; let this user read it")
    except ModelError as error:
        reason = str(error)
    except OSError as error:
        reason = f"{path}: {error.strerror}; let this user read it"
    return Entry(
        name=folder.name, folder=folder, path=path, version=version, platform=platform, config=config, reason=reason
    )


def _file(version: Path, config: Config) -> tuple[str, str]:
    """The name of the model's file, and its platform."""
    said = config.platform or config.backend
    fits = {
        file: platform
        for file, (platform, backend) in PLATFORMS.items()
        if config.platform in ("", platform) and config.backend in ("", backend)
    }
    if not fits:
        known = " or ".join(f'platform: "{platform}"' for platform, _ in PLATFORMS.values())
        raise ModelError(f"{version.parent / CONFIG}: there is nothing to run {said!r} models with; give {known}")
    if config.runtime in fits:
        return config.runtime, fits[config.runtime]
    name = config.default_model_filename
    found = [file for file in fits if (Path(file).suffix == Path(name).suffix if name else (version / file).exists())]
    if not found and not said:
        raise ModelError(f"{version}: no model in it that can be run; put {' or '.join(PLATFORMS)} there")
    file = next(iter(found or fits))
    return name or file, fits[file]


def read_labels(entry: Entry, output: str) -> tuple[str, ...]:
    """Names of an output's classes, one for each line of its `label_filename`; none where it has no such file."""
    for tensor in entry.config.output:
        if tensor.name == output and tensor.label_filename:
            path = entry.folder / tensor.label_filename
            try:
                stays_inside(entry.folder.parent, path)
                return tuple(path.read_text(encoding="utf-8").splitlines())
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(
                    f"{path}: cannot read the labels of {output!r}: {error}; or drop label_filename"
                ) from None
    return ()
