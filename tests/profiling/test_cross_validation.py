from __future__ import annotations

import msgspec
import pytest

from cotenant.core.profile import Profile
from cotenant.profiling.cross_validation import cross_validate, random_splits, victim_splits
from tests.predictors.test_fitting import PROFILES, pairs


def test_splits_hold_out_what_they_name() -> None:
    samples = pairs()
    for split in random_splits(samples, 3, seed=1):
        assert len(split.test) == round(0.3 * len(samples))
        assert sorted(split.test + split.train) == list(range(len(samples)))
    assert random_splits(samples, 2, seed=1)[0] != random_splits(samples, 2, seed=1)[1]
    for split, victim in zip(victim_splits(samples), "abc", strict=True):
        assert {samples[i].victim.model for i in split.test} == {victim}
        assert victim not in {samples[i].victim.model for i in split.train}


def test_cross_validate_two_predictors_gives_ordered_percentiles() -> None:
    """These slowdowns go with what the neighbour uses: a line finds that, and ours as well."""
    told: list[tuple[str, int, int]] = []
    random, new, *ours = cross_validate(
        ["linear", "gaussian-process"],
        pairs(),
        PROFILES,
        repeats=1,
        progress=lambda what, done, of: told.append((what, done, of)),
    )
    assert (random.held_out, new.held_out) == ("random 30 %", "new victim")
    assert random.samples == round(0.3 * len(pairs())) and new.samples == len(pairs())
    for verdict in (random, new, *ours):
        assert verdict.p50 is not None and verdict.p90 is not None and verdict.p95 is not None
        assert 0 <= verdict.p50 <= verdict.p90 <= verdict.p95 < 20
        assert (verdict.coverage is None) == (verdict.predictor == "linear")
    assert told[-1] == ("gaussian-process", 4, 4)


def test_predictor_without_prediction_reports_the_reason() -> None:
    bare = {key: _without_features(profile) for key, profile in PROFILES.items()}
    verdicts = list(cross_validate(["linear"], pairs(), bare, repeats=2))
    assert [verdict.p90 for verdict in verdicts] == [None, None]
    assert "its L2 and DRAM utilisation is unknown" in verdicts[0].failed


def _without_features(profile: Profile) -> Profile:
    return Profile(profile.model, profile.kind, [msgspec.structs.replace(it, features={}) for it in profile.points])


@pytest.mark.parametrize("repeats", [1, 4])
def test_more_repeats_hold_out_more_samples(repeats: int) -> None:
    (random, _) = cross_validate(["linear"], pairs(), PROFILES, repeats=repeats)
    assert random.samples == repeats * round(0.3 * len(pairs()))
