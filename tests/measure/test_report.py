import pytest

from cotenant.core.model import Model
from cotenant.core.request import Outcome, Request
from cotenant.errors import ConfigError
from cotenant.measure.ledger import OutcomeLedger
from cotenant.measure.report import Report

MODELS = (Model(name="digits", slo=0.025), Model(name="idle", slo=0.1, attainment=0.95))


def ledgers() -> dict[str, OutcomeLedger]:
    digits = OutcomeLedger()
    for number in range(98):
        digits.ended((Request(number, "digits", 1.0, 1.025),), Outcome.SERVED, 1.010)
    digits.ended((Request(98, "digits", 1.0, 1.025),), Outcome.SERVED, 1.030)
    digits.ended((Request(99, "digits", 1.0, 1.025),), Outcome.REJECTED, 1.0)
    digits.ended((Request(100, "digits", 1.0, 1.025),), Outcome.CANCELLED, 1.0)
    digits.ran(60, 0.008, 0.009)
    digits.ran(40, 0.006, 0.006)
    return {"digits": digits, "idle": OutcomeLedger()}


def report() -> Report:
    return Report.of("simulated", MODELS, ledgers(), 10.0, lag=0.0004)


def test_report_of_ledgers_gives_the_figures_of_each_model() -> None:
    digits, idle = report().models
    assert (digits.offered, digits.served, digits.goodput) == (10.1, 9.9, 9.8)
    assert digits.attainment == 0.98
    assert digits.outcomes == {"served": 99, "rejected": 1, "expired": 0, "failed": 0, "cancelled": 1}
    assert digits.p50 == pytest.approx(0.010, rel=0.01)
    assert digits.p999 == pytest.approx(0.030)
    assert digits.batch == 50
    assert digits.predicted == pytest.approx(0.007)
    assert digits.observed == pytest.approx(0.0075)
    assert idle.attainment is idle.p99 is idle.batch is None
    assert idle.slo_met


@pytest.mark.parametrize(
    ("missed", "arrived", "kept"),
    [(1, 55, True), (3, 55, False), (2, 100, True), (6, 100, False), (1100, 100_000, False), (1000, 100_000, True)],
)
def test_slo_met_misses_beyond_chance_violate_it(missed: int, arrived: int, kept: bool) -> None:
    ledger = OutcomeLedger()
    for number in range(arrived):
        done = 1.030 if number < missed else 1.010
        ledger.ended((Request(number, "digits", 1.0, 1.025),), Outcome.SERVED, done)
    (row,) = Report.of("live", MODELS[:1], {"digits": ledger}, 10.0).models
    assert row.slo_met is kept


def test_report_written_as_json_reads_back() -> None:
    assert Report.from_json(report().to_json()) == report()
    assert b'"p99_s": 0.0' in report().to_json()


def test_report_from_json_of_something_else_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"^run\.json: not a report: Object missing required field `source`$"):
        Report.from_json("{}", "run.json")
    with pytest.raises(ConfigError, match=r"^report: not a report: "):
        Report.from_json(b"\xff")
