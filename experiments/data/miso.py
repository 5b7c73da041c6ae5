"""Read the power that an A100-40GB draws by its utilisation: boringlee24/socc22-miso (MISO, SoCC 2022; MIT licence)."""

from __future__ import annotations

import json

import numpy as np

from cotenant.errors import ConfigError
from cotenant.published import lines

FOLDER = "boringlee24+socc22-miso/mps/configs/util_collection"
MODELS = ("bert", "cyclegan", "deepspeech2", "embedding", "gnn", "mobilenet", "resnet", "transformer")
RATED_WATTS = 250.0  # of the A100-40GB that it was measured on, a PCIe card


def power_by_utilisation() -> list[tuple[float, float]]:
    """Return SM utilisation, from 0 to 1, and watts over rated watts, of each model and batch. Raises ConfigError."""
    points = []
    for model in MODELS:
        power, utilisation = (_by_batch(f"{FOLDER}/{quantity}_{model}.json") for quantity in ("power", "util_sm"))
        points += [(utilisation[batch] / 100, watts / RATED_WATTS) for batch, watts in power.items()]
    return points


def power_curve() -> tuple[float, float]:
    """Return a and b of watts over rated watts = a + b × utilisation, by least squares."""
    utilisation, power = np.array(power_by_utilisation()).T
    slope, intercept = np.polyfit(utilisation, power, 1)
    return float(intercept), float(slope)


def _by_batch(path: str) -> dict[str, float]:
    text = "\n".join(line for _, line in lines(path))
    try:
        return {batch: float(value) for batch, value in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: no numbers by batch: {error}") from None
