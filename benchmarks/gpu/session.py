"""What all stages of `benchmarks.gpu` share: where results go, how much time is left, and what serves."""

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
    """slo: seconds. weight: of its rate among all."""

    slo: float
    weight: float = 1.0


# gpulet's models at its targets and equal rates.
PAPER = {name: Target(TORCH[name].slo) for name in GPULET}
# To run the same stages where there is no GPU: targets that suit a share of a few cores.
SMALL = {"lenet": Target(0.05, 10.0), "mnasnet": Target(0.5), "mobilenet_v2": Target(0.5)}


class Session:
    """out: gets the results, and has those of earlier runs, which are gone on with. seconds: until all must be done."""

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
        """Seconds for the stage that runs."""
        return self._until - time.monotonic()

    def allot(self, part: float) -> None:
        """To the stage that begins, that part of all the time that is left."""
        now = time.monotonic()
        self._until = now + part * (self._end - now)

    @property
    def cpu(self) -> bool:
        return self.backends == ("cpu",)

    def say(self, text: str) -> None:
        print(f"[{self.left:4.0f} s left] {text}", flush=True)

    def lacks(self, text: str) -> None:
        """Something that another run has to go on with."""
        self.missing.append(text)
        self.say(f"missing: {text}")

    def write(self, name: str, text: str | bytes) -> None:
        """Whole or not at all: a run may be stopped at any time."""
        path = self.out / name
        part = path.with_name(f".{name}.new")
        part.write_bytes(text if isinstance(text, bytes) else text.encode())
        part.replace(path)

    def settings(self, backend: str, **lines: str) -> Settings:
        """As a user writes them. lines: further ones."""
        said = [f'backend = "{backend}"', f'model_repository = "{self.repository.absolute()}"', 'objective = "rate"']
        said += [f"{key} = {value}" for key, value in lines.items()]
        for name, target in self.targets.items():
            said += ["[[models]]", f'name = "{name}"', f'slo = "{target.slo * 1e3:g}ms"', f"rate = {target.weight}"]
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write("\n".join(said) + "\n")
            file.flush()
            return read_settings(Path(file.name))

    def build(self) -> dict[str, ServableModel]:
        """The models, in the repository. One that cannot be built or described is said to be missing."""
        known = {}
        begun = time.monotonic()
        for name, target in self.targets.items():
            try:
                build_models(self.repository, [name], torch=True)
                entry = find_model(self.repository, name)
                known[name] = ServableModel(entry=entry, info=describe(entry), model=Model(name=name, slo=target.slo))
            except CotenantError as error:
                self.lacks(f"{name}: {error}")
        self.say(f"{len(known)} models stand in {self.repository}, after {time.monotonic() - begun:.0f} s")
        return known

    @contextmanager
    def backend(self, name: str) -> Iterator[Backend | None]:
        """None, and said to be missing, where this machine cannot do it. What it started ends with it: another backend
        may want the same device."""
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
        """On what, with what, by what."""
        found: dict[str, Any] = {
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
            found["driver"], found["cuda"] = nvidia.driver_version()
            found["gpus"] = msgspec.to_builtins(nvidia.list_gpus())
        return found


def first(backend: Backend) -> Kind:
    """The kind of the device that is measured."""
    return backend.fleet()[0]


def commit() -> str:
    """Of this checkout; a machine that got only its files is told by the variable COMMIT."""
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
