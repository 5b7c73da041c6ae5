from __future__ import annotations

import re
from pathlib import Path

import pytest

from cotenant.config import ModelSettings, MpsSettings, read_settings
from cotenant.control.rate_forecast import HoltWintersOptions, TrendOptions
from cotenant.errors import ConfigError


def test_read_settings_without_a_file_gives_defaults() -> None:
    settings = read_settings()
    assert settings.model_repository == Path("models")
    assert settings.profiles is None
    assert settings.planner == "geometry"
    assert settings.backend == "cpu"
    assert (settings.host, settings.metrics_host) == ("127.0.0.1", None)
    assert (settings.http_port, settings.grpc_port, settings.metrics_port) == (8000, 8001, 8002)
    assert (settings.max_queue_delay, settings.event_log, settings.log_level) == (None, None, "warning")
    assert settings.enforcement == "throttle"
    assert settings.reserve == 0.15
    assert (settings.warm_workers, settings.standby_workers) == (1, 1)
    assert settings.rollout_memory == "refuse"
    assert settings.adapt
    assert settings.cuts == tuple(range(50, 1001, 50))
    assert settings.grace == 10.0
    assert settings.objective is None
    assert (settings.headroom, settings.forecast) == (1.2, TrendOptions())
    assert (settings.interference.model, settings.interference.factor) == ("margin", 1.1)
    assert settings.models == ()


@pytest.mark.parametrize(
    ("text", "cuts", "interference"),
    [
        ('backend = "mps"', tuple(range(100, 1001, 100)), ("margin", 1.2)),
        ('backend = "mps"\nmps = { cuts = [25, 50] }', (250, 500), ("margin", 1.2)),
        ('backend = "mps"\nmps = { static = true }', None, ("margin", 1.2)),
        ('backend = "green"', None, ("margin", 1.2)),
        ('backend = "mig"', None, ("none", 1.0)),
        ('backend = "mig"\ninterference = { model = "margin", factor = 1.1 }', None, ("margin", 1.1)),
    ],
)
def test_read_settings_of_a_gpu_backend_sets_cuts_and_interference(
    text: str, cuts: tuple[int, ...] | None, interference: tuple[str, float], tmp_path: Path
) -> None:
    path = tmp_path / "server.toml"
    path.write_text(text)
    settings = read_settings(path)
    assert settings.cuts == cuts
    assert (settings.interference.model, settings.interference.factor) == interference
    assert (settings.gpus, settings.create) == ((), False)


def test_read_settings_of_mps_sets_its_options(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('backend = "mps"\n[mps]\nmemory_limits = true\nprotocol = 3\ndirectory = "run"')
    assert read_settings(path).mps == MpsSettings(memory_limits=True, protocol=3, directory=tmp_path / "run")
    path.write_text("[mps]\nprotocol = 4")
    with pytest.raises(ConfigError, match=r"serve\.toml: mps\.protocol: 4 is unknown; use 2 or 3$"):
        read_settings(path)


def test_read_settings_of_mps_rejects_fractional_percentages(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text('backend = "mps"\nmps = { cuts = [12.5, 50] }')
    with pytest.raises(ConfigError, match=r"mps\.cuts: MPS takes whole percentages only, not 12\.5 %$"):
        read_settings(path)


def test_read_settings_of_gpus_takes_indexes_and_uuids(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text('backend = "mig"\nmig = { create = true }\ngpu = { devices = [0, "GPU-00000002"] }')
    settings = read_settings(path)
    assert (settings.gpus, settings.create) == (("0", "GPU-00000002"), True)


def test_read_settings_resolves_paths_and_units(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(
        """
        model_repository = "there"
        event_log = "/var/log/cotenant.jsonl"
        grace = "2s"
        backend = "fake"
        host = "::1"
        metrics_host = "0.0.0.0"
        http_port = 0
        grpc_port = 9001
        log_level = "debug"
        max_queue_delay = "1ms"
        forecast = { headroom = 1.4, model = "holt-winters", season = "24h", horizon = "2m" }
        cpu = { enforcement = "quota", reserve = 0, cuts = [25, 50, 100] }

        [[models]]
        name = "digits"
        slo = "50ms"
        rate = 60
        max_batch = 8
        max_queue_delay = "2ms"
        attainment = "95%"
        priority = 2

        [[models]]
        name = "other"
        """
    )
    settings = read_settings(path)
    assert settings.model_repository == tmp_path / "there"
    assert settings.event_log == Path("/var/log/cotenant.jsonl")
    assert (settings.grace, settings.backend) == (2.0, "fake")
    assert (settings.host, settings.metrics_host) == ("::1", "0.0.0.0")  # noqa: S104
    assert (settings.http_port, settings.grpc_port, settings.metrics_port) == (0, 9001, 8002)
    assert (settings.max_queue_delay, settings.log_level) == (0.001, "debug")
    assert settings.forecast == HoltWintersOptions(season=86400.0, horizon=120.0, period=10.0)
    assert settings.headroom == 1.4
    assert (settings.enforcement, settings.reserve, settings.cuts) == ("quota", 0.0, (250, 500, 1000))
    assert settings.models == (
        ModelSettings(
            name="digits",
            slo=0.05,
            rate=60.0,
            max_batch=8,
            max_queue_delay=0.002,
            attainment=0.95,
            priority=2,
        ),
        ModelSettings(name="other"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http_prot = 1", "unknown key 'http_prot'; did you mean 'http_port'?"),
        ("cpu.kernel = 'quota'", "cpu: unknown key 'kernel'; available: enforcement, reserve, lend, cuts"),
        ("tls = {certificate = 'a', kee = 'b'}", "tls: unknown key 'kee'; did you mean 'key'?"),
        ("http_port = 70000", "http_port: 70000 is not a port; write 0 (any free port) to 65535"),
        ("grpc_port = -1", "grpc_port: -1 is not a port"),
        ("cpu.enforcement = 'firmly'", "cpu.enforcement: 'firmly' is unknown; use 'quota' or 'throttle'"),
        ("log_level = 'loud'", "log_level: 'loud' is unknown; use 'debug' or 'error' or 'info' or 'warning'"),
        ("max_queue_delay = 2", "max_queue_delay: '2' has no unit of time"),
        ("cpu.reserve = '100%'", "cpu.reserve: '100%' leaves nothing for the models; write less than 100%"),
        ("warm_workers = -1", "warm_workers: -1 processes cannot be kept ready; write 0 for none"),
        ("standby_workers = -1", "standby_workers: -1 processes cannot be kept ready; write 0 for none"),
        ("rollout_memory = 'hope'", "rollout_memory: 'hope' is unknown; use 'gap' or 'oversubscribe' or 'refuse'"),
        ("cpu.reserve = 2", "cpu.reserve: 2 must be above 0 and at most 1"),
        ("backend = 'tpu'", "backend: 'tpu' is unknown; use 'cpu' or 'fake'"),
        ("planner = 'best'", "planner: 'best' is unknown; use "),
        ("grace = 10", "grace: '10' has no unit of time"),
        ("[[models]]\nname = 'a'\nmax_batch = 0", "models[0].max_batch: 0 must be at least 1"),
        ("[[models]]\nname = 'a'\npriority = 0", "models[0].priority: 0 must be at least 1, the highest priority"),
        ("[[models]]\nname = 'a'\nrate = -1", "models[0].rate: -1 requests/s; a rate is finite and at least 0"),
        ("forecast = { model = 'holt-winters', season = '15s' }", "forecast.season: 15 s must be at least two periods"),
        ("forecast.model = 'arima'", "forecast.model: 'arima' is unknown; use 'holt-winters' or 'trend'"),
        ("forecast.headroom = 0.9", "forecast.headroom: 0.9 must be a factor from 1 to 2"),
        ("forecast.headroom = nan", "forecast.headroom: nan must be a factor from 1 to 2"),
        ("forecast.season = '24h'", 'forecast.season: a trend has none; leave it out, or use model = "holt-winters"'),
        ("forecast.horizon = '0s'", "forecast.horizon: a target of '0s' must be above 0"),
        ("objective = 'speed'", "objective: 'speed' is unknown; use 'devices' or 'rate'"),
        ("[[models]]\nname = 'a'\n[[models]]\nname = 'a'", "models[1].name: 'a' appears twice; keep one entry"),
        ("[[models]]\nslo = '1s'", "models[0]: key 'name' is missing"),
    ],
)
def test_read_settings_with_a_mistake_names_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="^" + re.escape(f"{path}: {message}")):
        read_settings(path)


def test_read_settings_of_nodes(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("""
backend = "none"

[[nodes]]
name = "node-a"
address = "10.0.0.2:8010"

[cluster]
token = "token"
certificate = "certificate.pem"
key = "key.pem"
authority = "authority.pem"
patience = "3s"

[node]
host = "10.0.0.1"
port = 8011
cache = "models"
cache_size = "1GiB"
model_repository = "shared"
""")
    settings = read_settings(path)
    cluster, node = settings.cluster, settings.node
    assert [(each.name, each.address) for each in cluster.nodes] == [("node-a", "10.0.0.2:8010")]
    assert (cluster.token, cluster.key, cluster.patience) == (tmp_path / "token", tmp_path / "key.pem", 3.0)
    assert (cluster.certificate, cluster.authority) == (tmp_path / "certificate.pem", tmp_path / "authority.pem")
    assert (node.host, node.port, node.cache_size) == ("10.0.0.1", 8011, 1 << 30)
    assert (node.cache, node.model_repository) == (tmp_path / "models", tmp_path / "shared")
    assert settings.cuts is None


def test_read_settings_without_nodes_has_none() -> None:
    settings = read_settings()
    assert settings.cluster.nodes == () and settings.cluster.token is None
    assert (settings.node.host, settings.node.port, settings.node.cache_size) == ("127.0.0.1", 8010, 20 << 30)


A = '[[nodes]]\nname = "a"\naddress = "h:1"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (A + A.replace("h:1", "h:2"), "nodes[1]: 'a' at 'h:2' has the name or the address of 'a'; keep one entry"),
        (A + A.replace('"a"', '"b"'), "nodes[1]: 'b' at 'h:1' has the name or the address of 'a'; keep one entry"),
        ('[cluster]\nkey = "k"\n', "cluster.certificate: it is missing; certificates are of both ends"),
        ("[node]\nport = 70000\n", "node.port: 70000 is not a port"),
        ('[node]\ncache_size = "much"\n', "node.cache_size: "),
        ('[[nodes]]\nname = "a"\n', "address"),
    ],
)
def test_read_settings_with_a_mistake_in_nodes_names_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_settings(path)
