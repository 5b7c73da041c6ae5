"""Scan the folders of a repository: its models, their versions, and the file of a version that holds the model."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from cotenant.errors import ConfigError, ModelError, NotFoundError
from cotenant.worker.python_model import DeclaredTensor, read_declaration
from cotenant.worker.repository.config import (
    CONFIG,
    Config,
    TensorConfig,
    Warmup,
    WarmupInput,
    read_config,
    stays_inside,
)

# Model file of a version → Triton's platform and backend. For the last two Triton has no platform, only the backend.
PLATFORMS = {
    "model.onnx": ("onnxruntime_onnx", "onnxruntime"),
    "model.pt": ("pytorch_libtorch", "pytorch"),
    "model.pt2": ("pytorch_export", "pytorch"),
    "model.py": ("pytorch_module", "pytorch"),
    # As Triton's FIL backend names them, which has no platforms.
    "xgboost.json": ("xgboost_json", "fil"),
    "model.txt": ("lightgbm_text", "fil"),
}
PICKLES = (".joblib", ".pickle", ".pkl")
ENSEMBLE = "ensemble"  # Triton's platform of a model that has steps and no file


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one version of a model.

    folder: the model's, which holds config.pbtxt and the versions. path: the model's file, or the place of the error.
    reason: why it cannot be served; empty where it can, as far as that is known without opening it. stamp: changes
    with the files of the version, and with those beside the versions.
    """

    name: str
    folder: Path
    path: Path
    version: str = ""
    platform: str = ""
    config: Config = Config()
    reason: str = ""
    stamp: str = ""


def scan_repository(root: Path, configs: Mapping[str, Config] = MappingProxyType({})) -> list[Entry]:
    """Return every version to serve of every model, by name and version. A model that cannot be served gives an entry
    with the reason, and does not affect others. configs: in place of `config.pbtxt`, by model. Raises ConfigError where
    there is no repository."""
    return [entry for name in sorted(_names(root)) for entry in _versions(root, name, configs.get(name))]


def find_model(root: Path, name: str, version: str = "") -> Entry:
    """Return the given version, or the latest that is served. It may have a `reason`.

    Raises NotFoundError for a version that is not served, and for a name that is not one of the repository's folders.
    """
    # Looked up, not joined: a name that leads out of the repository is simply not among them.
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


def _versions(root: Path, name: str, given: Config | None = None) -> list[Entry]:
    """Return at least one entry. Only an entry with the reason why no version can be served has no version."""
    folder = root / name
    try:
        stays_inside(root, folder)
        config = read_config(folder) if given is None else given
        numbers = sorted(
            int(path.name) for path in folder.iterdir() if re.fullmatch("[1-9][0-9]*", path.name) and path.is_dir()
        )
        if config.ensemble_scheduling is not None or config.platform == ENSEMBLE:
            return [_ensemble(folder, config, str(numbers[-1] if numbers else 1))]
        if not numbers:
            raise ModelError(f"{folder}: no version; put the model into {folder / '1' / next(iter(PLATFORMS))}")
        selected = config.version_policy.select(numbers)
        if not selected:
            raise ModelError(
                f"{folder / CONFIG}: version_policy asks for none of the versions that are there: {numbers}"
            )
    except ModelError as error:
        return [Entry(name=name, folder=folder, path=folder, reason=str(error))]
    except OSError as error:
        return [
            Entry(name=name, folder=folder, path=folder, reason=f"{folder}: {error.strerror}; let this user read it")
        ]
    return [_entry(root, folder, config, version) for version in map(str, selected)]


def _ensemble(folder: Path, config: Config, version: str) -> Entry:
    """Return the entry of an ensemble, which has no file; in Triton's layout its version is an empty folder."""
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
    platform = reason = stamp = ""
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
        stamp = _stamp(folder, folder / version)
        if path.suffix == ".py":
            platform, config = _with_declaration(path, platform, config)
    except ModelError as error:
        reason = str(error)
    except OSError as error:
        reason = f"{path}: {error.strerror}; let this user read it"
    return Entry(
        name=folder.name,
        folder=folder,
        path=path,
        version=version,
        platform=platform,
        config=config,
        reason=reason,
        stamp=stamp,
    )


def _with_declaration(path: Path, platform: str, config: Config) -> tuple[str, Config]:
    """Return platform and configuration of a model in Python: what a decorator says stands for what the configuration
    does not say. Raises ModelError where they differ."""
    declaration = read_declaration(path)
    if declaration is None:
        if platform == "python":
            raise ModelError(f"{path}: nothing in it is marked by @cotenant.model; mark the function or class to serve")
        return platform, config
    place = path.parent.parent / CONFIG
    own = {
        "max_batch_size": declaration.max_batch_size,
        "input": tuple(map(_tensor_config, declaration.inputs)),
        "output": tuple(map(_tensor_config, declaration.outputs)),
        "model_warmup": (Warmup({name: WarmupInput(dims) for name, dims in declaration.sample_dims.items()}),)
        if declaration.sample_dims
        else (),
    }
    for field, value in own.items():
        given = getattr(config, field)
        if given not in (None, ()) and value not in (None, ()) and given != value:
            raise ModelError(f"{place}: {field} differs from that of @cotenant.model in {path.name}; keep one of them")
    chosen = {field: value for field, value in own.items() if getattr(config, field) in (None, ())}
    if config.max_batch_size is None and declaration.max_batch_size is None:
        chosen["max_batch_size"] = 0
    return "python", msgspec.structs.replace(config, **chosen)


def _tensor_config(tensor: DeclaredTensor) -> TensorConfig:
    return TensorConfig(tensor.name, f"TYPE_{tensor.datatype.replace('BYTES', 'STRING')}", tensor.dims)


def _stamp(folder: Path, version: Path) -> str:
    """Hash sizes and times of a version's files, and of the files beside the versions, which hold labels.
    `config.pbtxt` counts by what it says."""
    files = [path for path in folder.iterdir() if path.is_file() and path.name != CONFIG]
    files += [path for path in version.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    seen = [(str(path.relative_to(folder)), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sorted(files)]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


def _file(version: Path, config: Config) -> tuple[str, str]:
    """Return the name of the model's file, and its platform."""
    configured = config.platform or config.backend
    if configured == "python":
        return config.default_model_filename or "model.py", "python"
    candidates = {
        file: platform
        for file, (platform, backend) in PLATFORMS.items()
        if config.platform in ("", platform) and config.backend in ("", backend)
    }
    if not candidates:
        known = " or ".join([f'platform: "{platform}"' for platform, _ in PLATFORMS.values()] + ['backend: "python"'])
        raise ModelError(f"{version.parent / CONFIG}: unsupported platform or backend {configured!r}; give {known}")
    if config.runtime in candidates:
        return config.runtime, candidates[config.runtime]
    name = config.default_model_filename
    present = [
        file for file in candidates if (Path(file).suffix == Path(name).suffix if name else (version / file).exists())
    ]
    if not present and not configured:
        if pickled := sorted(path.name for path in version.glob("*") if path.suffix in PICKLES):
            raise ModelError(
                f"{version / pickled[0]}: a pickle is a program, and is not run; convert a model of scikit-learn once, "
                "with cotenant.convert_sklearn, or save one of XGBoost or LightGBM in its own format"
            )
        raise ModelError(f"{version}: no model file; put {' or '.join(PLATFORMS)} there")
    file = next(iter(present or candidates))
    return name or file, candidates[file]


def read_labels(entry: Entry, output: str) -> tuple[str, ...]:
    """Return the class names of an output, one for each line of its `label_filename`; none where it has no such file.
    Raises ModelError."""
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
