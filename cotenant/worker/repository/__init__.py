"""The model repository, in Triton's layout: `<repository>/<model>/<version>/model.onnx` (or another file of PLATFORMS),
with an optional `config.pbtxt` next to the versions.

Scanning it opens no model (`layout`); `describe` opens one, but neither runs it nor needs PyTorch.
"""

from __future__ import annotations

from cotenant.worker.repository.config import CONFIG, Config, EnsembleStep, parse_json_config, read_config, write_config
from cotenant.worker.repository.config_fields import Use, uses_of
from cotenant.worker.repository.description import DEFAULT_MAX_BATCH, check_config_matches, describe, worker_model
from cotenant.worker.repository.layout import ENSEMBLE, PLATFORMS, Entry, find_model, read_labels, scan_repository
from cotenant.worker.repository.samples import sample_inputs

__all__ = [
    "CONFIG",
    "DEFAULT_MAX_BATCH",
    "ENSEMBLE",
    "PLATFORMS",
    "Config",
    "EnsembleStep",
    "Entry",
    "Use",
    "check_config_matches",
    "describe",
    "find_model",
    "parse_json_config",
    "read_config",
    "read_labels",
    "sample_inputs",
    "scan_repository",
    "uses_of",
    "worker_model",
    "write_config",
]
