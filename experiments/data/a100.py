"""Ten image models on an A100-80GB under MPS (0909wlgur/Gpulet, by the authors of ParvaGPU).

The files do not name the GPU: throughputs agree with ParvaGPU's tables for all seven slices of an A100-80GB to 0.04 %.
Latencies are in seconds. Memory was not measured. `interference.csv` does not give the neighbour's share, which is what
the victim leaves.

The older files `resnet50_*` and `vgg19_*` contradict these. But `interference.csv` still has latencies from them: of
`vgg19` with batches up to 8, where 133 of the 136 that both have agree to the last digit, and none do above. Alone, a
row took the older runs 1.24 to 1.29 times as long. So against the latencies alone of `inference.csv` these 351 samples
are slowed by a quarter or more whoever is beside them; the older latencies alone, where batches of 2 to 16 take 4 ms
longer than beside neighbours, cannot stand in. `matched` leaves these samples out.
"""

from __future__ import annotations

from collections import defaultdict

from cotenant.core.profile import Point, Profile
from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError
from cotenant.predictors import Load
from cotenant.predictors.linear import DRAM, L2
from cotenant.predictors.samples import Sample
from experiments.data import alone, lines, numbers

KIND = "a100"
SOURCE = "0909wlgur+Gpulet/data"


def profiles() -> dict[tuple[str, str], Profile]:
    """Batches 1 to 64 at 20, 40, 50, 60, 80 and 100 %, with the utilisation of L2 and DRAM alone there, in percent."""
    used = {}
    for place, line in lines(f"{SOURCE}/mem_util.csv"):
        model, batch, share, dram_word, dram, l2_word, l2, _ = _cells(place, line, 8)
        if (dram_word, l2_word) != ("mem_util", "l2_util"):
            raise ConfigError(f"{place}: mem_util and l2_util were expected here")
        b, p, d, c = numbers(place, batch, share, dram, l2)
        used[model, int(b), round(p * 10)] = {L2: c, DRAM: d}
    points = defaultdict(list)
    for place, line in lines(f"{SOURCE}/inference.csv"):
        model, batch, share, _, _, word, latency, _ = _cells(place, line, 8)
        if word != "latency":
            raise ConfigError(f"{place}: latency was expected here")
        b, p, seconds = numbers(place, batch, share, latency)
        rows, cut = int(b), round(p * 10)
        features = used[model, rows, cut]
        points[model].append(Point(share=cut, batch=rows, latency=seconds, memory=0, features=features))
    return {(model, KIND): Profile(model, KIND, measured) for model, measured in points.items()}


def pairs() -> list[Sample]:
    """1,817 batches beside a neighbour, an even sample of what was measured, of three victims."""
    before = alone(profiles().values())
    samples = []
    for place, line in lines(f"{SOURCE}/interference.csv"):
        model, batch, share, neighbour, other, _, _, word, latency, _ = _cells(place, line, 10)
        if word != "latency":
            raise ConfigError(f"{place}: latency was expected here")
        b, p, n, seconds = numbers(place, batch, share, other, latency)
        victim = Load(model, KIND, int(b), round(p * 10))
        beside = Load(neighbour, KIND, int(n), WHOLE - victim.share)
        samples.append(Sample(victim, (beside,), before[victim], seconds))
    return samples


def matched() -> list[Sample]:
    """Pairs without those that were taken over from older files, while the latencies alone were not."""
    before, every = _older(), pairs()
    taken = {(it.victim.model, it.victim.batch) for it in every if it.together == before.get(_run(it))}
    return [it for it in every if (it.victim.model, it.victim.batch) not in taken]


Run = tuple[str, int, int, str, int]  # a victim, its batch and share; its neighbour, and its batch


def _run(sample: Sample) -> Run:
    (beside,) = sample.colocated
    return (sample.victim.model, sample.victim.batch, sample.victim.share, beside.model, beside.batch)


def _older() -> dict[Run, float]:
    """Latencies beside neighbours, in seconds, as older files have them."""
    found = {}
    for victim in ("resnet50", "vgg19"):
        for place, line in lines(f"{SOURCE}/{victim}_with_interference.csv"):
            model, batch, share, neighbour, other, _, _, _, latency, _ = _cells(place, line, 10)
            b, p, n, seconds = numbers(place, batch, share, other, latency)
            found[model, int(b), round(p * 10), neighbour, int(n)] = seconds
    return found


def _cells(place: str, line: str, count: int) -> list[str]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != count:
        raise ConfigError(f"{place}: {len(cells)} cells where {count} were expected")
    return cells
