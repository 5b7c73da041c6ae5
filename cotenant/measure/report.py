"""What a run amounts to, model by model: as a table, as JSON, and beside another run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cotenant.core.model import Model
from cotenant.core.request import Outcome
from cotenant.core.units import show_count, show_seconds
from cotenant.errors import ConfigError
from cotenant.measure.binomial import consistent_with_rate
from cotenant.measure.stats import Tally
from cotenant.measure.table import table
from cotenant.measure.timeline import Timeline, interval_mean


class ModelReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model. Rates are per second, durations in seconds; None where there was nothing to measure.

    offered: rate of arrivals; served: of answers; goodput: of answers in time. attainment: the fraction in time of all
    that arrived and stayed; required: what it should be. target: None where callers wait for ever.
    ends: requests by outcome.
    batch: rows in a batch on average; predicted, observed: what a batch was to take and took on average.
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
    refusal: float | None = msgspec.field(name="refusal_p99_s", default=None)
    batch: float | None = None
    predicted: float | None = msgspec.field(name="predicted_s", default=None)
    observed: float | None = msgspec.field(name="observed_s", default=None)

    @classmethod
    def of(cls, model: Model, tally: Tally, seconds: float, within: float) -> ModelReport:
        latency = tally.latency
        return cls(
            model=model.name,
            offered=tally.arrived / seconds,
            served=tally.served / seconds,
            goodput=tally.on_time / seconds,
            attainment=_known(tally.attainment),
            required=model.attainment,
            target=within if math.isfinite(within) else None,
            mean=_known(latency.mean),
            p50=_known(latency.quantile(0.5)),
            p99=_known(latency.quantile(0.99)),
            p999=_known(latency.quantile(0.999)),
            outcomes={"served": tally.served} | {outcome.value: count for outcome, count in tally.outcomes.items()},
            refusal=_known(tally.refusal.quantile(0.99)),
            batch=tally.rows / tally.batches if tally.batches else None,
            predicted=tally.predicted / tally.batches if tally.batches else None,
            observed=tally.observed / tally.batches if tally.batches else None,
        )

    @property
    def stayed(self) -> int:
        """Requests whose caller did."""
        return sum(self.outcomes.values()) - self.outcomes.get(Outcome.CANCELLED.value, 0)

    @property
    def missed(self) -> int:
        """Those of them that were not answered in time."""
        return 0 if self.attainment is None else round(self.stayed * (1 - self.attainment))

    @property
    def kept(self) -> bool:
        """Whether its promise was kept, or nobody asked, or it was missed by no more than chance."""
        if self.attainment is None or self.attainment >= self.required:
            return True
        return consistent_with_rate(self.missed, self.stayed, 1 - self.required)


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """source: in a word, where the figures come from: ``simulated``, ``live``.

    seconds: how long requests arrived; answers that came later are counted too.
    lag: 99th percentile of how late the load generator itself sent, in seconds; None where it sends in virtual time.
    timeline: how it went, where that was recorded.
    """

    source: str
    seconds: float
    models: tuple[ModelReport, ...]
    lag: float | None = msgspec.field(name="lag_s", default=None)
    timeline: Timeline | None = None

    @classmethod
    def of(
        cls,
        source: str,
        models: Sequence[Model],
        tallies: Mapping[str, Tally],
        seconds: float,
        lag: float | None = None,
        timeouts: Mapping[str, float] = {},
    ) -> Report:
        """timeouts: targets of callers who were given others than the models', by model."""
        rows = tuple(
            ModelReport.of(model, tallies[model.name], seconds, timeouts.get(model.name, model.slo)) for model in models
        )
        return cls(source=source, seconds=seconds, models=rows, lag=None if lag is None else _known(lag))

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    def from_json(cls, text: bytes | str, place: str = "report") -> Report:
        """Raises ConfigError, naming `place` and the field, for anything that is not a report."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{place}: not a report: {error}") from None

    def table(self) -> RenderableType:
        """One row a model; and another table on batches, where they are known."""
        numbers = (">offered /s", ">goodput /s", ">p50", ">p99", ">p99.9", ">target", ">attained")
        rows = table(f"{self.source}, {show_seconds(self.seconds)}", "model", *numbers, "other ends")
        for row in self.models:
            times = *(_duration(time) for time in (row.p50, row.p99, row.p999)), _target(row.target)
            others = (f"{count} {name}" for name, count in row.outcomes.items() if count and name != "served")
            rates = f"{row.offered:.1f}", f"{row.goodput:.1f}"
            rows.add_row(escape(row.model), *rates, *times, _attained(row), ", ".join(others) or "-")
        if self.lag is not None:
            rows.caption = f"sent at most {show_seconds(self.lag)} late in 99 % of cases"
        batches = table("batches", "model", ">rows", ">predicted", ">observed")
        for row in self.models:
            if row.batch is not None:
                took = _duration(row.predicted), _duration(row.observed)
                batches.add_row(escape(row.model), f"{row.batch:.1f}", *took)
        parts = [rows, *([batches] if batches.rows else [])]
        return Group(*parts) if self.timeline is None else Group(*parts, Text(_fleet(self.timeline)))


def compare_reports(one: Report, other: Report) -> Table:
    """Two runs side by side, for the models that both have; differences are of the second from the first."""
    headings = (">offered/s", ">Δ", ">goodput/s", ">Δ", ">p50", ">Δ", ">p99", ">Δ", ">attained", ">Δ")
    rows = table(f"{one.source} → {other.source}", "model", *headings)
    others = {row.model: row for row in other.models}
    for a in one.models:
        if a.model not in others:
            continue
        b = others[a.model]
        rows.add_row(
            escape(a.model),
            f"{a.offered:.1f} → {b.offered:.1f}",
            _change(a.offered, b.offered),
            f"{a.goodput:.1f} → {b.goodput:.1f}",
            _change(a.goodput, b.goodput),
            f"{_duration(a.p50)} → {_duration(b.p50)}",
            _change(a.p50, b.p50),
            f"{_duration(a.p99)} → {_duration(b.p99)}",
            _change(a.p99, b.p99),
            f"{_percent(a.attainment)} → {_percent(b.attainment)}",
            "-" if a.attainment is None or b.attainment is None else f"{(b.attainment - a.attainment) * 100:+.2f} pt",
        )
    return rows


def _fleet(line: Timeline) -> str:
    """What devices did and cost, in a line or two."""
    devices = show_count(f"{max(line.devices, default=0.0):.3g}", "device")
    busiest = max(line.busy, default=0.0)
    told = f"{devices}, busy {line.utilisation:.0%} of the time, at most {busiest:.0%} in {show_seconds(line.step)}; "
    told = (
        told.replace("%", " %") + f"{interval_mean(line.waiting):.3g} requests waiting, at most {max(line.waiting):.3g}"
    )
    if line.spent is None or line.cost is None:
        return told
    told += f"\n{interval_mean(line.cost):.4g} per hour"
    return told + (f", {line.spent / line.answers * 1e6:.3g} for a million answers in time" if line.answers else "")


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _duration(value: float | None) -> str:
    return "-" if value is None else show_seconds(value)


def _target(value: float | None) -> str:
    return "never" if value is None else show_seconds(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.2f} %"


def _attained(row: ModelReport) -> str:
    short = row.attainment is not None and row.attainment < row.required
    colour = "red" if not row.kept else "yellow" if short else "green"
    return "-" if row.attainment is None else f"[{colour}]{_percent(row.attainment)}[/]"


def _change(a: float | None, b: float | None) -> str:
    return f"{(b / a - 1) * 100:+.1f} %" if a and b is not None else "-"
