"""Report the result of a run, model by model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from cotenant.core.model import Model
from cotenant.core.request import Outcome
from cotenant.errors import ConfigError
from cotenant.measure.binomial import consistent_with_rate
from cotenant.measure.ledger import OutcomeLedger
from cotenant.measure.timeline import Timeline


class ModelReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Report one model. Rates are per second, durations in seconds; None where there was nothing to measure.

    offered: rate of arrivals; served: of answers; goodput: of answers within the target. attainment: the fraction
    within the target of all requests whose caller stayed; required: what it should be. target: None where callers wait
    without limit. mean, p50, p99, p999: latency of served requests. outcomes: requests by outcome. rejection_p99: 99th
    percentile of the time to a rejection. batch: mean rows of a batch; predicted, observed: mean latency of a batch.
    """

    model: str
    offered: float
    served: float
    goodput: float
    attainment: float | None
    required: float
    target: float | None = msgspec.field(name="target_s")
    mean: float | None = msgspec.field(name="mean_s")
    p50: float | None = msgspec.field(name="p50_s")
    p99: float | None = msgspec.field(name="p99_s")
    p999: float | None = msgspec.field(name="p999_s")
    outcomes: dict[str, int]
    rejection_p99: float | None = msgspec.field(name="rejection_p99_s", default=None)
    batch: float | None = None
    predicted: float | None = msgspec.field(name="predicted_s", default=None)
    observed: float | None = msgspec.field(name="observed_s", default=None)

    @classmethod
    def of(cls, model: Model, ledger: OutcomeLedger, seconds: float, within: float) -> ModelReport:
        latency = ledger.latency
        return cls(
            model=model.name,
            offered=ledger.arrived / seconds,
            served=ledger.served / seconds,
            goodput=ledger.within_target / seconds,
            attainment=ledger.attainment,
            required=model.attainment,
            target=within if math.isfinite(within) else None,
            mean=_known(latency.mean),
            p50=_known(latency.quantile(0.5)),
            p99=_known(latency.quantile(0.99)),
            p999=_known(latency.quantile(0.999)),
            outcomes={outcome.value: count for outcome, count in ledger.outcomes.items()},
            rejection_p99=_known(ledger.rejection_latency.quantile(0.99)),
            batch=ledger.rows / ledger.batches if ledger.batches else None,
            predicted=ledger.predicted / ledger.batches if ledger.batches else None,
            observed=ledger.observed / ledger.batches if ledger.batches else None,
        )

    @property
    def stayed(self) -> int:
        """Requests whose caller did not leave."""
        return sum(self.outcomes.values()) - self.outcomes.get(Outcome.CANCELLED.value, 0)

    @property
    def missed(self) -> int:
        """Those of them that were not answered within the target."""
        return 0 if self.attainment is None else round(self.stayed * (1 - self.attainment))

    @property
    def slo_met(self) -> bool:
        """Whether the SLO was met, missed by no more than chance allows, or there were no requests."""
        if self.attainment is None or self.attainment >= self.required:
            return True
        return consistent_with_rate(self.missed, self.stayed, 1 - self.required)


class JobReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Report what a best-effort job got. Durations and times are in seconds, times from the start of the run.

    device: where it ran last; None: nowhere, which reason explains. steps_per_s: until it ended, or the run did.
    share_seconds: that it took: processor seconds where devices are shares of processors, otherwise seconds times the
    share. idle_share_seconds: that serving left on its device. ended: when all its steps were done; None: not within
    the run. predicted_steps_per_s, predicted_end: by the plan's forecast.
    """

    job: str
    model: str
    batch: int
    device: str | None
    reason: str = ""
    steps: int
    steps_per_s: float
    predicted_steps_per_s: float | None = None
    share_seconds: float
    idle_share_seconds: float
    ended: float | None = msgspec.field(name="ended_s", default=None)
    predicted_end: float | None = msgspec.field(name="predicted_end_s", default=None)
    deadline: float | None = msgspec.field(name="deadline_s", default=None)

    @property
    def idle_part(self) -> float:
        """The fraction that it took of what serving left on its device."""
        return self.share_seconds / self.idle_share_seconds if self.idle_share_seconds else 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Report the result of a run. source: where the figures come from, ``simulated`` or ``live``.

    seconds: how long requests arrived; later answers are counted too. lag: 99th percentile of the load generator's send
    lag, in seconds; None where it sends in virtual time. timeline: figures over time, where they were recorded. jobs:
    best-effort jobs, where there were any; without_jobs: the models in the same run without them, where that was made.
    """

    source: str
    seconds: float
    models: tuple[ModelReport, ...]
    lag: float | None = msgspec.field(name="lag_s", default=None)
    timeline: Timeline | None = None
    jobs: tuple[JobReport, ...] | msgspec.UnsetType = msgspec.UNSET
    without_jobs: tuple[ModelReport, ...] | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(
        cls,
        source: str,
        models: Sequence[Model],
        ledgers: Mapping[str, OutcomeLedger],
        seconds: float,
        lag: float | None = None,
        timeouts: Mapping[str, float] = {},
    ) -> Report:
        """Build the report of a run from its ledgers, by model. timeouts: by model, where callers' targets differ from
        the model's."""
        rows = tuple(
            ModelReport.of(model, ledgers[model.name], seconds, timeouts.get(model.name, model.slo)) for model in models
        )
        return cls(source=source, seconds=seconds, models=rows, lag=None if lag is None else _known(lag))

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    def from_json(cls, text: bytes | str, place: str = "report") -> Report:
        """Read a report. Raises ConfigError, naming `place` and the field, for anything else."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{place}: not a report: {error}") from None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
