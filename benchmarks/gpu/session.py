"""Hold what all stages of `benchmarks.gpu` share: folder of results, time left, models and backends."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from cotenant.app.backend import create_backend
from cotenant.backends import Backend, nvidia
from cotenant.config import Settings, read_settings
from cotenant.core.model import Kind, Model
from cotenant.errors import CotenantError, DeviceError
from cotenant.live.deployment import ServableModel
from cotenant.profiling.cache import machine_fingerprint
from cotenant.worker.repository import describe, find_model
from cotenant.zoo import GPULET, TORCH, build_models

PACKAGES = ("torch", "torchvision", "transformers", "onnxruntime", "cuda-bindings", "nvidia-ml-py", "numpy", "highspy")


class Target(msgspec.Struct, frozen=True):
    """Hold a model's SLO in seconds, and the weight of its rate."""

    slo: float
    weight: float = 1.0


# gpulet's models at its targets and equal rates.
PAPER = {name: Target(TORCH[name].slo) for name in GPULET}
# For the same stages without a GPU: SLOs for shares of a few cores.
SMALL = {"lenet": Target(0.05, 10.0), "mnasnet": Target(0.5), "mobilenet_v2": Target(0.5)}


class Session:
    """Run stages.

    out: folder of results, including earlier ones, which are continued; seconds: time limit of all stages.
    """

    def __init__(
        self, out: Path, repository: Path, targets: Mapping[str, Target], backends: tuple[str, ...], seconds: float
    ) -> None:
        self.out = out
        self.repository = repository
        self.targets = targets
        self.backends = backends
        self.missing: list[str] = []
        self._until = self._end = time.monotonic() + seconds
        out.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        """Return the seconds left for the current stage."""
        return self._until - time.monotonic()

    def allot(self, part: float) -> None:
        """Give the next stage that fraction of the remaining time."""
        now = time.monotonic()
        self._until = now + part * (self._end - now)

    @property
    def cpu(self) -> bool:
        return self.backends == ("cpu",)

    def say(self, text: str) -> None:
        print(f"[{self.left:4.0f} s left] {text}", flush=True)

    def lacks(self, text: str) -> None:
        """Record something missing that another run can continue."""
        self.missing.append(text)
        self.say(f"missing: {text}")

    def write(self, name: str, text: str | bytes) -> None:
        """Write a file atomically, as a run may be stopped at any time."""
        path = self.out / name
        part = path.with_name(f".{name}.new")
        part.write_bytes(text if isinstance(text, bytes) else text.encode())
        part.replace(path)

    def settings(self, backend: str, **lines: str) -> Settings:
        """Return settings as a user would write them. lines: further ones."""
        said = [f'backend = "{backend}"', f'model_repository = "{self.repository.absolute()}"', 'objective = "rate"']
        said += [f"{key} = {value}" for key, value in lines.items()]
        for name, target in self.targets.items():
            said += ["[[models]]", f'name = "{name}"', f'slo = "{target.slo * 1e3:g}ms"', f"rate = {target.weight}"]
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write("\n".join(said) + "\n")
            file.flush()
            return read_settings(Path(file.name))

    def build(self) -> dict[str, ServableModel]:
        """Build and describe the models; record those that fail as missing."""
        known = {}
        begun = time.monotonic()
        for name, target in self.targets.items():
            try:
                build_models(self.repository, [name], torch=True)
                entry = find_model(self.repository, name)
                known[name] = ServableModel(entry=entry, info=describe(entry), model=Model(name=name, slo=target.slo))
            except CotenantError as error:
                self.lacks(f"{name}: {error}")
        self.say(f"{len(known)} models are in {self.repository}, after {time.monotonic() - begun:.0f} s")
        return known

    @contextmanager
    def backend(self, name: str) -> Iterator[Backend | None]:
        """Yield a backend, or None and record it as missing. Stop it at the end, as another may need the device."""
        try:
            found = create_backend(self.settings(name))
        except DeviceError as error:
            self.lacks(f"{name}: {error}")
            yield None
            return
        try:
            yield found
        finally:
            found.stop()

    def provenance(self, stages: Iterable[int]) -> dict[str, Any]:
        """Describe machine, software and command of this run."""
        fields: dict[str, Any] = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join([Path(sys.executable).name, "-m", "benchmarks.gpu", *sys.argv[1:]]),
            "stages": list(stages),
            "commit": commit(),
            "processor": f"{len(os.sched_getaffinity(0))} x {machine_fingerprint()}",
            "kernel": platform.release(),
            "python": platform.python_version(),
            "packages": {name: known for name in PACKAGES if (known := _version(name))},
        }
        if not self.cpu:
            fields["driver"], fields["cuda"] = nvidia.driver_version()
            fields["gpus"] = msgspec.to_builtins(nvidia.list_gpus())
        return fields


def first(backend: Backend) -> Kind:
    """Return the kind of the device that is measured."""
    return backend.fleet()[0]


def commit() -> str:
    """Return the commit of this checkout, or of the variable COMMIT on a machine that has only its files."""
    if known := os.environ.get("COMMIT"):
        return known
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
