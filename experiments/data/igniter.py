"""Read measurements by iGniter's authors of four models on a V100, from which their coefficients derive.

Source: icloud-ecnu/igniter, JSON lines. Nine runs of each model in isolation (batches 1, 16 and 32 at 10, 50 and 100
%), one co-located with a copy of itself, one device with one to five copies. Times are in ms, bytes per row, L2 in
percent, power in W, frequency in MHz.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from cotenant.core.profile import Point, Profile
from cotenant.predictors.analytic import INPUT, KERNELS, OUTPUT, Delay
from cotenant.predictors.igniter import Coefficients, Igniter, Measured, Throttle, active, fit_linear_term
from cotenant.published import lines, v100

SOURCE = "icloud-ecnu+igniter/i-Gniter/Algorithm/config"
BATCHES, SHARES = (1, 16, 32), (0.1, 0.5, 1.0)
MODELS = ("alexnet", "resnet50", "vgg19", "ssd")
BANDWIDTH = "bandwidth"


def config() -> dict[str, dict[str, Any]]:
    """Return the measurements by "hardware" or model."""
    measurements: dict[str, dict[str, Any]] = {}
    for _, line in lines(SOURCE):
        for subject, entries in msgspec.json.decode(line, type=dict[str, dict[str, Any]]).items():
            measurements.setdefault(subject, {}).update(entries)
    return measurements


def coefficients() -> Igniter:
    """Fit the coefficients as their program does: batch time without idle time, at base frequency, by least squares."""
    read = config()
    hardware = read["hardware"]
    return Igniter(v100.KIND, {name: _model(read[name], hardware) for name in MODELS}, _delay(), _throttle(hardware))


def profiles() -> dict[tuple[str, str], Profile]:
    """Return the V100's profiles with the number of kernels of each model and its bytes per row."""
    read = config()
    return {
        key: Profile(*key, [_richer(point, read[profile.model]) for point in profile.points])
        for key, profile in v100.profiles().items()
    }


def _richer(point: Point, of: dict[str, Any]) -> Point:
    more = {INPUT: float(of["inputdata"]), OUTPUT: float(of["outputdata"]), KERNELS: float(of["kernel"])}
    return msgspec.structs.replace(point, features={**point.features, **more})


def _model(of: dict[str, Any], hardware: dict[str, Any]) -> Coefficients:
    places = [(i, j) for i in range(3) for j in range(3)]
    slow = np.array([min(1.0, of["frequency"][i][j] / hardware["maxGPUfrequency"]) for i, j in places])
    times = np.array([of["gpulatency"][i][j] for i, j in places])
    batches, shares = (np.array(column) for column in zip(*((BATCHES[i], SHARES[j]) for i, j in places), strict=True))
    rates = batches / ((times - of["idletime_1"]) / 1e3)
    colocated = of["activetime_2"] * of["frequency_2"] / hardware["maxGPUfrequency"]
    unslowed = slow >= 0.999
    power = np.array([of["power"][i][j] for i, j in places]) - hardware["idlepower"]
    return Coefficients(
        transfer=(of["inputdata"] + of["outputdata"]) / (hardware[BANDWIDTH] * 1e3),
        kernels=of["kernel"],
        idle=of["idletime_1"] / 1e3,
        active=active(Measured(batches, shares, (times * slow - of["idletime_1"]) / 1e3), relative=False),
        # The diagonal: smallest, middle and largest batch and share.
        l2=fit_linear_term(rates[[0, 4, 8]].tolist(), [used / 100 for used in of["l2caches"]]),
        power=fit_linear_term(rates[unslowed].tolist(), power[unslowed].tolist()),
        cache=100 * (colocated / of["activetime_1"] - 1) / of["l2cache"],
    )


def scheduling_delays() -> list[float]:
    """Return the seconds by which the scheduling of a kernel takes longer with one to five copies of a model than with
    one, at base frequency."""
    hardware = config()["hardware"]
    idle = np.array(hardware["idletime"]) * np.array(hardware["frequency"][: len(hardware["idletime"])])
    seconds = idle / hardware["maxGPUfrequency"] / 1e3
    return list((seconds - seconds[0]).tolist())


def _delay() -> Delay:
    """Fit the scheduling delay of two to five copies."""
    line = fit_linear_term([2, 3, 4, 5], scheduling_delays()[1:])
    return Delay(line.slope, line.constant)


def _throttle(hardware: dict[str, Any]) -> Throttle:
    """Extrapolate power demand linearly beyond the point where the frequency starts to fall, and fit the slope."""
    frequency, power = np.array(hardware["frequency"]), np.array(hardware["power"], dtype=float)
    falls = int(np.argmax(frequency < hardware["maxGPUfrequency"]))
    step = np.diff(power[:falls]).mean()
    above = power[falls - 1] + step * np.arange(1, len(power) - falls + 1) - hardware["maxGPUpower"]
    lost = frequency[falls:] / hardware["maxGPUfrequency"] - 1
    slope = float((above * lost).sum() / (above**2).sum())
    return Throttle(idle=hardware["idlepower"], most=hardware["maxGPUpower"], slope=slope)
