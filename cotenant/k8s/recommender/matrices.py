"""Know what was measured, and predict the rest: isolated throughputs and interference (`predictors.svd`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property

import msgspec

from cotenant.core.profile import Point, Profile, Profiles, read_profiles, write_profiles
from cotenant.errors import PlanError
from cotenant.predictors import Interference, Load, NoInterference
from cotenant.predictors.fitting import fit, from_json, to_json
from cotenant.predictors.samples import Sample, read_samples, write_samples
from cotenant.predictors.svd import isolated

PROFILES, SAMPLES = "profiles.csv", "samples.csv"
MAX_SAMPLES = 20_000  # kept; the oldest go first
NONE = "none"  # predictor without samples


class Rate(msgspec.Struct, frozen=True):
    """What a model sustains alone. qps: requests/s, with that batch; 0 where none is within the target. measured:
    rather than predicted."""

    qps: float
    batch: int
    measured: bool


class Matrices(msgspec.Struct, frozen=True, dict=True):
    """Hold what was measured. profiles: of models alone. samples: of co-located runs. predictor: the name of what is
    fitted to these. A value: what is learnt is another one."""

    profiles: tuple[Profile, ...]
    samples: tuple[Sample, ...] = ()
    predictor: str = "svd"

    @classmethod
    def read(cls, texts: dict[str, str], predictor: str = "svd") -> Matrices:
        """Read what `texts` has written. Raises ConfigError."""
        profiles = read_profiles(texts.get(PROFILES, "").splitlines(), PROFILES)
        samples = read_samples(texts[SAMPLES].splitlines(), SAMPLES) if texts.get(SAMPLES) else []
        return cls(tuple(profiles.values()), tuple(samples), predictor)

    def texts(self) -> dict[str, str]:
        """Return what was measured as CSV files by name."""
        found = {PROFILES: write_profiles(self.profiles)}
        return found | ({SAMPLES: write_samples(self.samples)} if self.samples else {})

    @cached_property
    def revision(self) -> str:
        """Return what tells apart what was measured."""
        digest = hashlib.sha256(self.predictor.encode())
        for name, text in sorted(self.texts().items()):
            digest.update(f"{name}\n{text}".encode())
        return digest.hexdigest()[:16]

    def learnt(self, samples: Sequence[Sample]) -> Matrices:
        """Return these with further samples; one that is there already counts once."""
        every = tuple(dict.fromkeys((*self.samples, *samples)))[-MAX_SAMPLES:]
        return msgspec.structs.replace(self, samples=every)

    @cached_property
    def interference(self) -> Interference:
        """Return the predictor, fitted. Raises PlanError for samples that it cannot be fitted to."""
        return fit(self.predictor, self.samples, self._by_key) if self.samples else NoInterference()

    @cached_property
    def unfitted(self) -> str:
        """Return why no predictor can be fitted to the samples yet; "" where one is, or where there are none."""
        try:
            _ = self.interference
        except PlanError as error:
            return str(error)
        return ""

    def predictor_json(self) -> str:
        """Return the fitted predictor as text; "" where there is none yet."""
        return "" if not self.samples or self.unfitted else to_json(self.predictor, self.interference).decode()

    @cached_property
    def completed(self) -> Profiles:
        """Return the profiles with points that were not measured, predicted from other models and shares: at each kind,
        share and batch at which any model was measured. Raises PlanError where too little was."""
        known = self._by_key
        points: dict[tuple[str, str], list[Point]] = {key: list(profile.points) for key, profile in known.items()}
        measured = {
            (model, kind, point.share, point.batch)
            for (model, kind), profile in known.items()
            for point in profile.points
        }
        memory = {
            model: max(point.memory for key, own in points.items() if key[0] == model for point in own)
            for model, _ in known
        }
        for load, rate in self._isolated.items():
            if rate > 0 and (load.model, load.kind, load.share, load.batch) not in measured:
                points.setdefault((load.model, load.kind), []).append(
                    Point(share=load.share, batch=load.batch, latency=load.batch / rate, memory=memory[load.model])
                )
        return {
            (model, kind): Profile(model, kind, sorted(own, key=lambda each: (each.share, each.batch)))
            for (model, kind), own in points.items()
        }

    def rate(self, model: str, kind: str, share: int, slo: float) -> Rate:
        """Return what a model sustains alone on a share (‰) within a target in seconds: batch after batch, a request
        waits for one and runs in the next. Raises PlanError for a model or kind without measurements."""
        batches = {
            load.batch: rate
            for load, rate in self._isolated.items()
            if (load.model, load.kind, load.share) == (model, kind, share)
        }
        if not batches:
            near = sorted({load.share for load in self._isolated if (load.model, load.kind) == (model, kind)})
            if near:
                shares = ", ".join(f"{each / 10:g}" for each in near)
                raise PlanError(f"nothing was measured on {share / 10:g} % of {kind!r}; available: {shares} %")
            raise PlanError(f"nothing was measured of model {model!r}, or on {kind!r}; available: {self._known()}")
        within = {batch: rate for batch, rate in batches.items() if rate > 0 and 2 * batch / rate <= slo}
        if not within:
            return Rate(0.0, 0, True)
        batch = max(within, key=lambda each: within[each])
        own = self._by_key.get((model, kind))
        measured = own is not None and any((p.share, p.batch) == (share, batch) for p in own.points)
        return Rate(within[batch], batch, measured)

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Return the predicted slowdown of a load beside others. Raises PlanError for models without samples."""
        return self.interference.slowdown(victim, tuple(colocated))

    @cached_property
    def _isolated(self) -> dict[Load, float]:
        return isolated(self._by_key)

    @cached_property
    def _by_key(self) -> Profiles:
        return {(profile.model, profile.kind): profile for profile in self.profiles}

    def _known(self) -> str:
        return ", ".join(sorted({profile.model for profile in self.profiles}))


def read_fitted(profiles_csv: str, predictor_json: str) -> tuple[Profiles, Interference]:
    """Read completed profiles and a fitted predictor. Raises ConfigError."""
    profiles = read_profiles(profiles_csv.splitlines(), PROFILES)
    if not predictor_json:
        return profiles, NoInterference()
    return profiles, from_json(predictor_json.encode(), "predictor.json")[1]


def written(profiles: Iterable[Profile]) -> str:
    """Return profiles as CSV."""
    return write_profiles(profiles)
