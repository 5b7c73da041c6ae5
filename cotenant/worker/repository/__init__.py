"""The model repository, in the layout that Triton's users have: `<repository>/<model>/<version>/model.onnx` (or another
file of PLATFORMS), with a `config.pbtxt` beside the versions where there is more to say.

Looking through it opens no model (`layout`); `describe` does, and neither runs one nor needs PyTorch.
"""

from __future__ import annotations

from cotenant.worker.repository.config import CONFIG, Config, EnsembleStep, read_config
from cotenant.worker.repository.description import DEFAULT_MAX_BATCH, agree, describe, loadable
from cotenant.worker.repository.layout import ENSEMBLE, PLATFORMS, Entry, find, labels, scan
from cotenant.worker.repository.samples import sample

__all__ = [
    "CONFIG",
    "DEFAULT_MAX_BATCH",
    "ENSEMBLE",
    "PLATFORMS",
    "Config",
    "EnsembleStep",
    "Entry",
    "agree",
    "describe",
    "find",
    "labels",
    "loadable",
    "read_config",
    "sample",
    "scan",
]
