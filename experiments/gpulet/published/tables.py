"""Compute latencies and slowdowns from profiles as the published program does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from cotenant.errors import ConfigError
from experiments.gpulet.published.arithmetic import LARGEST_BATCH, f32, saturated_batch


class Model(msgspec.Struct, frozen=True):
    """Describe a model as the program's files do.

    latency: ms by (percent of a GPU, batch); overhead: ms to assemble a batch, by batch, 0 if absent; l2, dram:
    utilisation in percent by batch, at powers of two, needed for interference only; slo: ms; memory: MB; input_bytes:
    of one request.
    """

    name: str
    slo: int
    latency: Mapping[tuple[int, int], float]
    overhead: Mapping[int, float] = {}
    l2: Mapping[int, float] = {}
    dram: Mapping[int, float] = {}
    memory: int = 0
    input_bytes: int = 0


class Tables:
    """Compute latencies, saturating batches and efficient sizes from profiles. Models are numbered as listed."""

    def __init__(
        self, models: Sequence[Model], *, interference: Sequence[float] = (), memory: int = 11_000, ratio: float = 1.1
    ) -> None:
        """Take the profiles of `models`.

        interference: five coefficients, of L2 (own, co-located), DRAM (own, co-located) and 1; memory: MB of a GPU;
        ratio: factor on every latency.
        """
        self.models = tuple(models)
        self.numbers = {model.name: number for number, model in enumerate(models)}
        self.memory = memory
        self._constants = tuple(interference)
        self._ratio = f32(ratio)
        self._raw: dict[tuple[int, int], list[float]] = {}
        self._alone: dict[tuple[int, int], list[float]] = {}
        self._colocated: dict[tuple[int, int, int, int, int], list[float]] = {}
        self._saturated: dict[tuple[int, int], tuple[int, float]] = {}
        self._utilisations: dict[int, tuple[list[float], list[float]]] = {}

    def alone(self, model: int, part: int) -> list[float]:
        """Return latencies in isolation, in ms by batch; 0 for batch 0 (1.3)."""
        known = self._alone.get((model, part))
        if known is None:
            overhead = self.models[model].overhead
            known = [
                f32(f32(ms + f32(overhead.get(batch, 0.0))) * self._ratio) if batch else 0.0
                for batch, ms in enumerate(self._profiled(model, part))
            ]
            self._alone[model, part] = known
        return known

    def colocated(self, model: int, part: int, other: int, batch: int, other_part: int) -> list[float]:
        """Return latencies under co-location with batches of `batch` (1.3, 1.4). Overhead is not slowed."""
        key = model, part, other, batch, other_part
        known = self._colocated.get(key)
        if known is None:
            overhead = self.models[model].overhead
            known = [0.0]
            for own, ms in enumerate(self._profiled(model, part)[1:], 1):
                slowdown = self._slowdown(model, own, part, other, batch, other_part)
                base = f32(ms + f32(overhead.get(own, 0.0)))
                known.append(f32(f32(base + f32(ms * f32(slowdown - 1))) * self._ratio))
            self._colocated[key] = known
        return known

    def saturated(self, model: int, part: int) -> tuple[int, float]:
        """Return the batch that saturates a gpulet in isolation, and its throughput in requests/s (1.6)."""
        known = self._saturated.get((model, part))
        if known is None:
            known = self._saturated[model, part] = saturated_batch(self.alone(model, part), self.models[model].slo)
        return known

    def efficient_size(self, model: int, sizes: Sequence[int]) -> int:
        """Return p_eff (1.6): the upper end of the step that adds most throughput per size.

        The last step, to the whole GPU, is never considered.
        """
        best, steepest = sizes[0], 0.0
        for low, high in pairwise(size for size in sizes if size < 100):
            before, after = self.saturated(model, low)[1], self.saturated(model, high)[1]
            slope = f32(f32(after - before) / (high - low))
            if f32(after / before) >= f32(1.05) and slope > steepest:
                best, steepest = high, slope
        return best

    def _profiled(self, model: int, part: int) -> list[float]:
        """Return the profiled latencies by batch, with gaps filled as the program fills them (1.3).

        A missing point, even if other batches were profiled on that share, is a weighted mean of the smallest and the
        largest share, with the weight that fits batch 32; it need not lie between adjacent points.
        """
        known = self._raw.get((model, part))
        if known is None:
            profiled = self.models[model]
            parts = {other for other, _ in profiled.latency}
            for needed in (part, min(parts), max(parts)):
                if not {(needed, 1), (needed, LARGEST_BATCH)} <= profiled.latency.keys():
                    raise ConfigError(
                        f"{profiled.name}: no latency of batches 1 and {LARGEST_BATCH} on {needed} % of a GPU, from "
                        "which the published program interpolates; profile them, or omit that share from both"
                    )
            least, most, here = (_interpolated(profiled.latency, share) for share in (min(parts), max(parts), part))
            span = f32(least[-1] - most[-1])
            weight = f32(f32(here[-1] - most[-1]) / span) if span else 0.0
            known = [f32(high + f32(weight * f32(low - high))) for low, high in zip(least, most, strict=True)]
            for batch in range(1, LARGEST_BATCH + 1):
                if (part, batch) in profiled.latency:
                    known[batch] = f32(profiled.latency[part, batch])
            self._raw[model, part] = known
        return known

    def _slowdown(self, model: int, batch: int, part: int, other: int, other_batch: int, other_part: int) -> float:
        """Predict the slowdown (1.4). Utilisation is proportional to the share; coefficients are 64-bit floats."""
        own_l2, own_dram = self._utilisation(model)
        other_l2, other_dram = self._utilisation(other)
        c = self._constants
        total = f32(c[0] * (own_l2[batch] * (part / 100)))
        total += f32(c[1] * (other_l2[other_batch] * (other_part / 100)))
        total += f32(c[2] * (own_dram[batch] * (part / 100)))
        total += f32(c[3] * (other_dram[other_batch] * (other_part / 100)))
        return max(1.0, f32(total + c[4]))

    def _utilisation(self, model: int) -> tuple[list[float], list[float]]:
        """Return L2 and DRAM utilisation as fractions by batch, linear between powers of two."""
        known = self._utilisations.get(model)
        if known is None:
            profiled = self.models[model]
            if not self._constants or not {1, 2, 4, 8, 16, 32} <= profiled.l2.keys() & profiled.dram.keys():
                raise ConfigError(
                    f"{profiled.name}: interference needs five constants, and L2 and DRAM utilisation of batches 1, 2, "
                    "4, … 32; give them or use a mode without interference"
                )
            known = self._utilisations[model] = _fractions(profiled.l2), _fractions(profiled.dram)
        return known


def _interpolated(latency: Mapping[tuple[int, int], float], part: int) -> list[float]:
    """Interpolate latencies on a share linearly between profiled batches; 0 for batch 0."""
    line = [0.0] * (LARGEST_BATCH + 1)
    profiled = sorted(batch for other, batch in latency if other == part and batch <= LARGEST_BATCH)
    for low, high in pairwise(profiled):
        before, after = f32(latency[part, low]), f32(latency[part, high])
        for batch in range(low, high):
            line[batch] = f32(before + f32(f32(after - before) * f32((batch - low) / (high - low))))
    line[-1] = f32(latency[part, LARGEST_BATCH])
    return line


def _fractions(percent: Mapping[int, float]) -> list[float]:
    """Convert percent to fractions by batch, unrounded at the end: the program continues in 64-bit floats there."""
    points = {batch: f32(f32(percent[batch]) / 100) for batch in (1, 2, 4, 8, 16, 32)}
    line = [0.0] * (LARGEST_BATCH + 1)
    for low, high in pairwise(points):
        for batch in range(low, high):
            line[batch] = points[low] + f32(f32(points[high] - points[low]) * ((batch - low) / (high - low)))
    line[-1] = points[LARGEST_BATCH]
    return line
