"""The model repository, in the layout that Triton's users have: `<repository>/<model>/<version>/model.onnx` (or another
file of PLATFORMS), with a `config.pbtxt` beside the versions where there is more to say.

Looking through it opens no model (`layout`); `describe` does, and neither runs one nor needs PyTorch.
"""

from __future__ import annotations

from cotenant.worker.repository.config import CONFIG, Config, EnsembleStep, read_config, write_config
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
    "check_config_matches",
    "describe",
    "find_model",
    "read_config",
    "read_labels",
    "sample_inputs",
    "scan_repository",
    "worker_model",
    "write_config",
]
