"""Observe how much longer batches take while a best-effort job runs than while none does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from cotenant.core.job import JobId

ENOUGH = 2.0  # seconds of a model's batches, as profiled, on either side of a comparison

Seconds = Mapping[str, tuple[float, float]]  # by model: what its batches took, and were to take alone, in sum


class JobSlowdowns:
    """Divide what batches took between times with and without each job. Both are held against what the same batches
    were profiled at, so that another mix of partitions and batch sizes is no slowdown."""

    def __init__(self) -> None:
        self._last: Seconds = {}
        self._without = _Sums()
        self._beside: defaultdict[JobId, _Sums] = defaultdict(_Sums)

    def observe(self, seconds: Seconds, running: Collection[JobId]) -> None:
        """Take the sums as they are now. running: the jobs that had a share since the last call."""
        for model, (observed, alone) in seconds.items():
            before = self._last.get(model, (0.0, 0.0))
            grown = observed - before[0], alone - before[1]
            for sums in [self._beside[job] for job in running] or [self._without]:
                sums.add(model, *grown)
        self._last = dict(seconds)

    def slowdown(self, job: JobId) -> float | None:
        """Return the slowdown, at least 1, of the model that a job slows most; None where too little ran to tell."""
        if job not in self._beside:
            return None
        beside, without = self._beside[job].ratios(), self._without.ratios()
        slowdowns = [beside[model] / without[model] for model in beside.keys() & without.keys()]
        return max(1.0, *slowdowns) if slowdowns else None

    def forget_others(self, jobs: Collection[JobId]) -> None:
        """Forget all jobs but these."""
        for job in self._beside.keys() - set(jobs):
            del self._beside[job]


class _Sums:
    def __init__(self) -> None:
        self._observed: defaultdict[str, float] = defaultdict(float)
        self._alone: defaultdict[str, float] = defaultdict(float)

    def add(self, model: str, observed: float, alone: float) -> None:
        self._observed[model] += observed
        self._alone[model] += alone

    def ratios(self) -> dict[str, float]:
        """Return what batches took over what they were to take, of models with enough of them."""
        return {model: self._observed[model] / alone for model, alone in self._alone.items() if alone >= ENOUGH}
