"""Correct predictions by runs observed since the fit: most for the same loads, less for other batches and shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cotenant.predictors import Load
from cotenant.predictors.samples import Sample

FORGETTING_FACTOR = 0.98  # weight of an earlier observation relative to the next
MAX_STEP = math.log(2)  # by which one observation may move a correction: a plain outlier does not decide
SIMILAR_BATCHES = 1.0  # factors of two in a batch over which a correction fades
SIMILAR_SHARES = 150.0  # and thousandths of a device

Run = tuple[Load, ...]  # the victim, and sorted co-located loads


class OnlineCorrection(msgspec.Struct, frozen=True):
    """Correct the prediction for one run.

    excess: mean log of the observed over the predicted slowdown, with older observations fading; count: the weight of
    all observations.
    """

    excess: float = 0.0
    count: float = 0.0


class ObservedRun(msgspec.Struct, frozen=True):
    """Hold a correction in a file. models: names, in place of loads, in files written before loads were kept."""

    excess: float
    count: float
    loads: Run = ()
    models: tuple[str, ...] = ()


class OnlineCorrections:
    """Hold the corrections of all observed runs; a value: an observation makes another one."""

    def __init__(self, corrections: Mapping[Run, OnlineCorrection] | None = None) -> None:
        self._corrections = dict(corrections or {})
        self._by_models: dict[tuple[str, ...], list[tuple[Run, OnlineCorrection]]] = {}
        for run, correction in self._corrections.items():
            self._by_models.setdefault(_models(run), []).append((run, correction))

    def of(self, victim: Load, colocated: Sequence[Load], noise_fraction: float) -> float:
        """Return what to add to the log of a slowdown: the mean excess, shrunk by how much of it may be noise.

        noise_fraction: the fraction of a sample's variance that is noise, at most 1. If all is noise, one observation
        counts half, since the formerly certain may have changed; where the samples say nothing, it counts fully.
        """
        if not self._corrections:
            return 0.0
        asked = _run(victim, colocated)
        total = weight = 0.0
        for run, correction in self._by_models.get(_models(asked), ()):
            count = correction.count * _similarity(asked, run)
            total += correction.excess * count
            weight += count
        return total / (weight + noise_fraction) if weight else 0.0

    def observe(self, victim: Load, colocated: Sequence[Load], excess: float) -> OnlineCorrections:
        """Return the corrections after one more run. excess: log of its observed over its fitted slowdown."""
        run = _run(victim, colocated)
        previous = self._corrections.get(run, OnlineCorrection())
        count = FORGETTING_FACTOR * previous.count + 1
        step = min(max(excess - previous.excess, -MAX_STEP), MAX_STEP)
        return OnlineCorrections({**self._corrections, run: OnlineCorrection(previous.excess + step / count, count)})

    def to_json(self) -> list[dict[str, Any]]:
        return [{"loads": run, **msgspec.to_builtins(each)} for run, each in self._corrections.items()]

    @classmethod
    def from_file(cls, observed: Iterable[ObservedRun], samples: Sequence[Sample]) -> OnlineCorrections:
        """Read the corrections of a file; those by name alone hold for the sampled runs of these models."""
        sampled = dict.fromkeys(_run(sample.victim, sample.colocated) for sample in samples)
        return cls(
            {
                run: OnlineCorrection(each.excess, each.count)
                for each in observed
                for run in ([each.loads] if each.loads else [run for run in sampled if _models(run) == each.models])
            }
        )


def _run(victim: Load, colocated: Sequence[Load]) -> Run:
    return (victim, *sorted(colocated, key=lambda load: (load.model, load.batch, load.share)))


def _models(run: Run) -> tuple[str, ...]:
    return tuple(load.model for load in run)


def _similarity(one: Run, other: Run) -> float:
    """Return how far observations of one run tell about another of the same models."""
    distance = sum(
        (math.log2(a.batch / b.batch) / SIMILAR_BATCHES) ** 2 + ((a.share - b.share) / SIMILAR_SHARES) ** 2
        for a, b in zip(one, other, strict=True)
    )
    return math.exp(-0.5 * distance)
