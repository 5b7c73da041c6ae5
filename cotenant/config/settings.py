"""Read the settings of a server, with all their defaults."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from cotenant.config.cluster import (
    ClusterEntry,
    ClusterSettings,
    NodeAddressEntry,
    NodeEntry,
    NodeSettings,
    read_cluster_settings,
    read_node_settings,
)
from cotenant.config.devices import DeviceEntry, DeviceSettings, read_devices
from cotenant.config.interference import PredictorChoice, read_interference
from cotenant.config.jobs import JobsEntry, JobSettings, read_job_settings
from cotenant.config.kubernetes import KubernetesEntry, KubernetesSettings, read_kubernetes
from cotenant.config.models import ModelEntry, ModelSettings, read_model
from cotenant.config.toml import (
    check_exclusive,
    check_one_of,
    decode_toml,
    parse_cuts,
    parse_target,
    read_text,
)
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.model_watch import MAX_HEADROOM
from cotenant.control.rate_forecast import ForecastOptions, HoltWintersOptions, TrendOptions
from cotenant.core import units
from cotenant.errors import ConfigError
from cotenant.planners import PLANNERS, Objective, planner_names

Enforcement = Literal["throttle", "quota"]
RolloutMemory = Literal["refuse", "gap", "oversubscribe"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
ForecastModel = Literal["trend", "holt-winters"]
ControlFrom = Literal["loopback", "any"]
BackendName = Literal["cpu", "fake", "mps", "green", "mig", "none"]
ModelControlMode = Literal["explicit", "poll", "none", "kubernetes"]


MIN_WORKER_MEMORY = 256 << 20  # bytes
MAX_HTTP_PROCESSES = 64


class MpsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Configure MPS; see `backends.mps`. directory: for its pipes and logs; None: the system's temporary one."""

    static: bool = False
    memory_limits: bool = False
    protocol: Literal[2, 3] = 2
    directory: Path | None = None


class AccessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Configure who may do what, and encryption. control: from where a server without tokens is controlled.

    tokens: files of tokens, one a line, by role. certificate, key: PEM files; None: no TLS.
    """

    control: ControlFrom = "loopback"
    tokens: dict[str, Path] = {}
    certificate: Path | None = None
    key: Path | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the settings of a server. The defaults are those of `read_settings(None)`.

    remote_repository: URL of an object store that is mirrored into `model_repository`; None: that is the repository.
    remote_options: fsspec's for it.
    model_control_mode: whether models are loaded and unloaded by request, by what changes in the repository, by
    resources of Kubernetes, or not at all. load_models: those to begin with; None: all. repository_poll_interval:
    seconds between two looks at the repository.
    profiles: a CSV file; None: what was measured on this machine.
    objective: None: the largest multiple of the rates if any model has no rate, else the fewest devices.
    host: address that HTTP and gRPC bind to; metrics_host: that of metrics; None: the same.
    http_port, grpc_port, metrics_port: 0 for any that is free. http_processes: processes that accept HTTP; with 1 the
    server's own does.
    enforcement: how CPU shares are limited: workers throttle themselves, or cgroup quotas. reserve: the fraction of CPU
    time kept for the server. lend: CPU shares are floors, and what others leave idle is lent. cuts: legal shares of a
    device, in ‰; None: those that the hardware has.
    gpus: indexes or UUIDs; empty: all. create: whether to create MIG instances on a GPU that has none.
    warm_workers: pre-started worker processes for each set of libraries that models need. standby_workers: workers for
    each device that have loaded the models of a partition, and take over when its worker dies.
    adapt: whether the server plans again while it serves, for the rates and latencies that it sees. headroom: factor on
    these rates that it plans for. forecast: of these rates. refine_profiles: whether it measures, while the machine is
    quiet, what a first profile left out.
    worker_memory: bytes that a worker process may have of its own; None: no limit. worker_environment: variables that
    workers get besides the usual ones.
    rollout_memory: what to do where a device cannot hold the workers of the old and the new plan at once.
    max_queue_delay: seconds, for models that set none themselves; None: 0.
    response_cache: bytes of answers that are kept; None: none.
    allow_client_shm: whether callers of this machine may register shared memory.
    max_body: bytes of a request. max_memory: bytes of all large bodies and responses at once.
    grace: seconds that a stop waits for requests in flight. event_log: file to write every event to; None: no log.
    access_log: write a line for each request. otlp_endpoint: URL that traces are exported to; None: no traces.
    state: SQLite file of what is kept over a restart; None: one for each repository beside the profile cache.
    cluster: nodes that the server dials. node: what this machine offers as a node.
    devices: what plans may make of them. kubernetes: for model_control_mode = "kubernetes".
    """

    model_repository: Path
    remote_repository: str | None
    remote_options: dict[str, Any]
    model_control_mode: ModelControlMode
    load_models: tuple[str, ...] | None
    repository_poll_interval: float
    profiles: Path | None
    planner: str
    objective: Objective | None
    interference: PredictorChoice
    backend: BackendName
    host: str
    metrics_host: str | None
    http_port: int
    grpc_port: int
    metrics_port: int
    http_processes: int
    enforcement: Enforcement
    reserve: float
    lend: bool
    cuts: tuple[int, ...] | None
    gpus: tuple[str, ...]
    mps: MpsSettings
    create: bool
    warm_workers: int
    standby_workers: int
    worker_memory: int | None
    worker_environment: tuple[str, ...]
    adapt: bool
    refine_profiles: bool
    headroom: float
    forecast: ForecastOptions
    rollout_memory: RolloutMemory
    max_queue_delay: float | None
    response_cache: int | None
    allow_client_shm: bool
    max_body: int
    max_memory: int
    grace: float
    event_log: Path | None
    state: Path | None
    log_level: LogLevel
    log_format: LogFormat
    access_log: bool
    otlp_endpoint: str | None
    access: AccessSettings
    jobs: JobSettings
    cluster: ClusterSettings
    node: NodeSettings
    kubernetes: KubernetesSettings
    devices: tuple[DeviceSettings, ...]
    models: tuple[ModelSettings, ...]


# Processors share caches, memory bandwidth and, where there are fewer cores than threads, cores; partitions of a GPU
# share its second-level cache and its memory bandwidth. Instances of MIG share neither. On processors every batch has
# room for noise besides (`planners.front_end`), the server being there, too.
MARGIN = {"model": "margin", "factor": 1.2}
USUAL_INTERFERENCE: dict[BackendName, Any] = {"cpu": {"model": "margin", "factor": 1.1}, "mig": "none"}

# The file as it is written.


class _CpuEntry(msgspec.Struct, forbid_unknown_fields=True):
    enforcement: str = "throttle"
    reserve: str | int | float = "15%"
    lend: bool = True
    cuts: tuple[float, ...] = tuple(range(5, 101, 5))


class _GpuEntry(msgspec.Struct, forbid_unknown_fields=True):
    devices: list[str | int] = []


class _MpsEntry(msgspec.Struct, forbid_unknown_fields=True):
    cuts: tuple[float, ...] = tuple(range(10, 101, 10))
    static: bool = False
    memory_limits: bool = False
    protocol: int = 2
    directory: str | None = None


class _MigEntry(msgspec.Struct, forbid_unknown_fields=True):
    create: bool = False


class _ForecastEntry(msgspec.Struct, forbid_unknown_fields=True):
    headroom: float = ControllerOptions().headroom
    model: str = "trend"
    season: str | int | float | None = None
    horizon: str | int | float | None = None
    period: str | int | float | None = None


class _TokensEntry(msgspec.Struct, forbid_unknown_fields=True):
    infer: str | None = None
    observe: str | None = None
    control: str | None = None


class _TlsEntry(msgspec.Struct, forbid_unknown_fields=True):
    certificate: str
    key: str


class _SettingsFile(msgspec.Struct, forbid_unknown_fields=True):
    model_repository: str | None = None
    remote_repository: str | None = None
    remote_options: dict[str, Any] = {}
    model_control_mode: str = "explicit"
    load_models: list[str] | None = None
    repository_poll_interval: str | int | float = "15s"
    profiles: str | None = None
    planner: str = "geometry"
    objective: str | None = None
    interference: Any = None
    backend: str = "cpu"
    host: str = "127.0.0.1"
    metrics_host: str | None = None
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    http_processes: int = 1
    warm_workers: int = 1
    standby_workers: int = 1
    worker_memory: str | None = None
    worker_environment: tuple[str, ...] = ()
    adapt: bool = True
    refine_profiles: bool = True
    forecast: _ForecastEntry = msgspec.field(default_factory=_ForecastEntry)
    rollout_memory: str = "refuse"
    max_queue_delay: str | int | float | None = None
    response_cache: str | None = None
    allow_client_shm: bool = False
    max_body: str = "64MiB"
    max_memory: str = "1GiB"
    grace: str | int | float = "10s"
    event_log: str | None = None
    state: str | None = None
    log_level: str = "warning"
    log_format: str = "text"
    access_log: bool = False
    otlp_endpoint: str | None = None
    control: str = "loopback"
    tokens: _TokensEntry = msgspec.field(default_factory=_TokensEntry)
    tls: _TlsEntry | None = None
    jobs: JobsEntry = msgspec.field(default_factory=JobsEntry)
    cpu: _CpuEntry = msgspec.field(default_factory=_CpuEntry)
    gpu: _GpuEntry = msgspec.field(default_factory=_GpuEntry)
    mps: _MpsEntry = msgspec.field(default_factory=_MpsEntry)
    mig: _MigEntry = msgspec.field(default_factory=_MigEntry)
    nodes: list[NodeAddressEntry] = []
    cluster: ClusterEntry = msgspec.field(default_factory=ClusterEntry)
    node: NodeEntry = msgspec.field(default_factory=NodeEntry)
    kubernetes: KubernetesEntry = msgspec.field(default_factory=KubernetesEntry)
    devices: list[DeviceEntry] = []
    models: list[ModelEntry] = []


def read_settings(path: Path | str | None = None) -> Settings:
    """Read a server's settings from a TOML file, or the defaults. Paths are relative to it. Raises ConfigError."""
    path = None if path is None else Path(path)
    file = _SettingsFile() if path is None else decode_toml(read_text(path), _SettingsFile, path)
    place = "settings" if path is None else str(path)
    base = Path() if path is None else path.parent
    if file.planner not in PLANNERS and file.planner not in planner_names():
        raise ConfigError(f"{place}: planner: {file.planner!r} is unknown; use {check_exclusive(planner_names())}")
    models = tuple(read_model(entry, f"{place}: models[{i}]") for i, entry in enumerate(file.models))
    devices = tuple(read_devices(entry, f"{place}: devices[{i}]") for i, entry in enumerate(file.devices))
    _check_once([model.name for model in models], f"{place}: models", "name")
    _check_once([kind.kind for kind in devices], f"{place}: devices", "kind")
    backend = check_one_of(file.backend, BackendName, f"{place}: backend")
    usual = USUAL_INTERFERENCE.get(backend, MARGIN)
    interference = usual if file.interference is None else file.interference
    return Settings(
        model_repository=_repository(file, base),
        remote_repository=file.remote_repository,
        remote_options=file.remote_options,
        model_control_mode=check_one_of(file.model_control_mode, ModelControlMode, f"{place}: model_control_mode"),
        load_models=models_to_load(file.load_models),
        repository_poll_interval=parse_target(file.repository_poll_interval, f"{place}: repository_poll_interval"),
        profiles=None if file.profiles is None else base / file.profiles,
        planner=file.planner,
        objective=None if file.objective is None else check_one_of(file.objective, Objective, f"{place}: objective"),
        interference=read_interference(interference, f"{place}: interference", base),
        backend=backend,
        host=file.host,
        metrics_host=file.metrics_host,
        http_port=check_port(file.http_port, f"{place}: http_port"),
        grpc_port=check_port(file.grpc_port, f"{place}: grpc_port"),
        metrics_port=check_port(file.metrics_port, f"{place}: metrics_port"),
        http_processes=_http_processes(file, place),
        enforcement=check_one_of(file.cpu.enforcement, Enforcement, f"{place}: cpu.enforcement"),
        reserve=_reserve(file.cpu.reserve, f"{place}: cpu.reserve"),
        lend=file.cpu.lend,
        cuts=_cuts(backend, file, place),
        gpus=tuple(str(device) for device in file.gpu.devices),
        mps=_mps(file.mps, base, f"{place}: mps"),
        create=file.mig.create,
        warm_workers=_spares(file.warm_workers, f"{place}: warm_workers"),
        standby_workers=_spares(file.standby_workers, f"{place}: standby_workers"),
        adapt=file.adapt,
        refine_profiles=file.refine_profiles,
        headroom=_headroom(file.forecast.headroom, f"{place}: forecast.headroom"),
        forecast=_forecast(file.forecast, f"{place}: forecast"),
        worker_memory=_worker_memory(file.worker_memory, f"{place}: worker_memory"),
        worker_environment=file.worker_environment,
        rollout_memory=check_one_of(file.rollout_memory, RolloutMemory, f"{place}: rollout_memory"),
        max_queue_delay=None
        if file.max_queue_delay is None
        else units.parse_seconds(str(file.max_queue_delay), f"{place}: max_queue_delay"),
        response_cache=None if file.response_cache is None else _bytes(file.response_cache, f"{place}: response_cache"),
        allow_client_shm=file.allow_client_shm,
        max_body=_bytes(file.max_body, f"{place}: max_body"),
        max_memory=_bytes(file.max_memory, f"{place}: max_memory"),
        grace=units.parse_seconds(str(file.grace), f"{place}: grace"),
        event_log=None if file.event_log is None else base / file.event_log,
        state=None if file.state is None else base / file.state,
        log_level=check_one_of(file.log_level, LogLevel, f"{place}: log_level"),
        log_format=check_one_of(file.log_format, LogFormat, f"{place}: log_format"),
        access_log=file.access_log,
        otlp_endpoint=_endpoint(file.otlp_endpoint, f"{place}: otlp_endpoint"),
        access=_access(file, base, place),
        jobs=read_job_settings(file.jobs, f"{place}: jobs", base, has_tokens=file.tokens.control is not None),
        cluster=read_cluster_settings(file.nodes, file.cluster, place, base),
        node=read_node_settings(file.node, f"{place}: node", base),
        kubernetes=read_kubernetes(file.kubernetes, f"{place}: kubernetes"),
        devices=devices,
        models=models,
    )


def _check_once(names: Sequence[str], place: str, key: str) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(f"{place}[{i}].{key}: {name!r} appears twice; keep one entry")


def _repository(file: _SettingsFile, base: Path) -> Path:
    """Return the folder of models: by default ./models, or a mirror in the cache."""
    if file.model_repository is not None or file.remote_repository is None:
        return base / (file.model_repository or "models")
    return mirror_of(file.remote_repository)


def mirror_of(url: str) -> Path:
    """Return the folder that a store is mirrored into, unless the settings name one."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "cotenant" / "repositories" / hashlib.sha256(url.encode()).hexdigest()[:16]


def models_to_load(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the models to begin with; None: all, which `*` stands for, as in Triton."""
    return None if names is None or "*" in names else tuple(dict.fromkeys(names))


def _access(file: _SettingsFile, base: Path, place: str) -> AccessSettings:
    tokens = {role: base / named for role, named in msgspec.structs.asdict(file.tokens).items() if named is not None}
    return AccessSettings(
        control=check_one_of(file.control, ControlFrom, f"{place}: control"),
        tokens=tokens,
        certificate=None if file.tls is None else base / file.tls.certificate,
        key=None if file.tls is None else base / file.tls.key,
    )


def _headroom(value: float, place: str) -> float:
    if not 1.0 <= value <= MAX_HEADROOM:
        raise ConfigError(f"{place}: {value:g} must be a factor from 1 to {MAX_HEADROOM:g}")
    return value


def _forecast(entry: _ForecastEntry, place: str) -> ForecastOptions:
    given = {
        name: parse_target(value, f"{place}.{name}")
        for name, value in (("period", entry.period), ("horizon", entry.horizon), ("season", entry.season))
        if value is not None
    }
    if check_one_of(entry.model, ForecastModel, f"{place}.model") == "trend":
        if given:
            raise ConfigError(f'{place}.{min(given)}: a trend has none; leave it out, or use model = "holt-winters"')
        return TrendOptions()
    options = HoltWintersOptions(**given)
    if options.season and options.season < 2 * options.period:
        raise ConfigError(f"{place}.season: {options.season:g} s must be at least two periods of {options.period:g} s")
    return options


def _mps(entry: _MpsEntry, base: Path, place: str) -> MpsSettings:
    if entry.protocol not in (2, 3):
        raise ConfigError(f"{place}.protocol: {entry.protocol} is unknown; use 2 or 3")
    return MpsSettings(
        static=entry.static,
        memory_limits=entry.memory_limits,
        protocol=3 if entry.protocol == 3 else 2,
        directory=None if entry.directory is None else base / entry.directory,
    )


def _cuts(backend: BackendName, file: _SettingsFile, place: str) -> tuple[int, ...] | None:
    if backend in ("green", "mig", "none") or (backend == "mps" and file.mps.static):
        return None
    if backend == "mps":
        cuts = parse_cuts(file.mps.cuts, f"{place}: mps.cuts")
        if broken := [cut for cut in cuts if cut % 10]:
            raise ConfigError(f"{place}: mps.cuts: MPS takes whole percentages only, not {units.show_share(broken[0])}")
        return cuts
    return parse_cuts(file.cpu.cuts, f"{place}: cpu.cuts")


def _bytes(text: str, place: str) -> int:
    """Return a size in bytes that gRPC can hold to, too."""
    size = units.parse_memory(text, place)
    if place.endswith("max_body") and not 1 << 10 <= size < 1 << 31:
        raise ConfigError(f"{place}: {text!r} must be at least 1KiB and less than 2GiB")
    return size


def _worker_memory(text: str | None, place: str) -> int | None:
    size = None if text is None else units.parse_memory(text, place)
    if size is not None and size < MIN_WORKER_MEMORY:
        raise ConfigError(f"{place}: {text!r} is less than a worker needs to start; write 256MiB or more")
    return size


def _endpoint(url: str | None, place: str) -> str | None:
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"{place}: {url!r} is not a URL of a collector; write http://localhost:4318")
    return url


def _http_processes(file: _SettingsFile, place: str) -> int:
    count = file.http_processes
    if not 1 <= count <= MAX_HTTP_PROCESSES:
        raise ConfigError(f"{place}: http_processes: {count} processes; write 1 to {MAX_HTTP_PROCESSES}")
    if count == 1:
        return count
    if file.allow_client_shm:
        raise ConfigError(
            f"{place}: http_processes: {count} processes would each have regions of their own; set http_processes = 1, "
            "or allow_client_shm = false"
        )
    body, memory = _bytes(file.max_body, f"{place}: max_body"), _bytes(file.max_memory, f"{place}: max_memory")
    if memory // (count + 1) < body:
        raise ConfigError(
            f"{place}: max_memory: {file.max_memory!r} is shared out over {count} HTTP processes and gRPC, and none "
            f"would have room for a body of max_body = {file.max_body!r}; raise the one or lower the other"
        )
    return count


def _spares(value: int, place: str) -> int:
    if value < 0:
        raise ConfigError(f"{place}: {value} processes cannot be kept ready; write 0 for none")
    return value


def _reserve(value: str | float, place: str) -> float:
    """Parse a fraction; 0 is allowed and 1 is not."""
    if value in (0, "0", "0%"):
        return 0.0
    fraction = units.parse_fraction(value, place)
    if fraction == 1:
        raise ConfigError(f"{place}: {value!r} leaves nothing for the models; write less than 100%")
    return fraction


def check_port(port: int, place: str) -> int:
    if not 0 <= port <= 65535:
        raise ConfigError(f"{place}: {port} is not a port; write 0 (any free port) to 65535")
    return port
