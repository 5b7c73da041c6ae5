"""Read ten image models on an A100-80GB under MPS (0909wlgur/Gpulet, by the authors of ParvaGPU).

The files do not name the GPU; throughputs agree with ParvaGPU's tables for all seven slices of an A100-80GB to 0.04 %.
Latencies are in seconds. Memory was not measured. `interference.csv` omits the share of the co-located model, which is
the remainder of the device.

The older files `resnet50_*` and `vgg19_*` contradict these, but `interference.csv` still contains latencies from them:
for `vgg19` with batches up to 8, 133 of the 136 common values agree to the last digit; for larger batches none do. In
isolation, the older runs took 1.24 to 1.29 times as long per row. So relative to `inference.csv` these 351 samples
appear slowed by a quarter or more whatever is co-located. The older isolated latencies cannot replace them: batches of
2 to 16 take 4 ms longer there than under co-location. `matched` omits these samples.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from cotenant.core.profile import Point, Profile
from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError
from cotenant.predictors import Load
from cotenant.predictors.linear import DRAM, L2
from cotenant.predictors.samples import Sample
from cotenant.published import alone, lines, numbers

KIND = "a100"
SOURCE = "0909wlgur+Gpulet/data"


def profiles(folder: Path | None = None) -> dict[tuple[str, str], Profile]:
    """Return batches 1 to 64 at 20, 40, 50, 60, 80 and 100 %, with isolated L2 and DRAM utilisation in percent."""
    used = {}
    for place, line in lines(f"{SOURCE}/mem_util.csv", folder):
        model, batch, share, dram_word, dram, l2_word, l2, _ = _cells(place, line, 8)
        if (dram_word, l2_word) != ("mem_util", "l2_util"):
            raise ConfigError(f"{place}: expected mem_util and l2_util")
        b, p, d, c = numbers(place, batch, share, dram, l2)
        used[model, int(b), round(p * 10)] = {L2: c, DRAM: d}
    points = defaultdict(list)
    for place, line in lines(f"{SOURCE}/inference.csv", folder):
        model, batch, share, _, _, word, latency, _ = _cells(place, line, 8)
        if word != "latency":
            raise ConfigError(f"{place}: expected latency")
        b, p, seconds = numbers(place, batch, share, latency)
        rows, cut = int(b), round(p * 10)
        features = used[model, rows, cut]
        points[model].append(Point(share=cut, batch=rows, latency=seconds, memory=0, features=features))
    return {(model, KIND): Profile(model, KIND, measured) for model, measured in points.items()}


def pairs(folder: Path | None = None) -> list[Sample]:
    """Return 1,817 co-located measurements, an even sample of all, of three victims."""
    before = alone(profiles(folder).values())
    samples = []
    for place, line in lines(f"{SOURCE}/interference.csv", folder):
        model, batch, share, other, other_batch, _, _, word, latency, _ = _cells(place, line, 10)
        if word != "latency":
            raise ConfigError(f"{place}: expected latency")
        b, p, n, seconds = numbers(place, batch, share, other_batch, latency)
        victim = Load(model, KIND, int(b), round(p * 10))
        colocated = Load(other, KIND, int(n), WHOLE - victim.share)
        samples.append(Sample(victim, (colocated,), before[victim], seconds))
    return samples


def matched() -> list[Sample]:
    """Return the pairs whose co-located and isolated latencies are from the same runs."""
    before, every = _older(), pairs()
    taken = {
        (sample.victim.model, sample.victim.batch) for sample in every if sample.together == before.get(_run(sample))
    }
    return [sample for sample in every if (sample.victim.model, sample.victim.batch) not in taken]


Run = tuple[str, int, int, str, int]  # victim, its batch and share; co-located model, its batch


def _run(sample: Sample) -> Run:
    (other,) = sample.colocated
    return (sample.victim.model, sample.victim.batch, sample.victim.share, other.model, other.batch)


def _older() -> dict[Run, float]:
    """Return co-located latencies in seconds from the older files."""
    latencies = {}
    for victim in ("resnet50", "vgg19"):
        for place, line in lines(f"{SOURCE}/{victim}_with_interference.csv"):
            model, batch, share, other, other_batch, _, _, _, latency, _ = _cells(place, line, 10)
            b, p, n, seconds = numbers(place, batch, share, other_batch, latency)
            latencies[model, int(b), round(p * 10), other, int(n)] = seconds
    return latencies


def _cells(place: str, line: str, count: int) -> list[str]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != count:
        raise ConfigError(f"{place}: {len(cells)} cells; expected {count}")
    return cells
