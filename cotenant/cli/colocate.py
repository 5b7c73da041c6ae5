"""Show which candidates each policy chooses to co-locate with a target: `cotenant colocate`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
import numpy as np
import typer
from rich.markup import escape

from cotenant.cli.options import Json, Seed
from cotenant.cli.output import console, print_labelled, show_json
from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from cotenant.core.profile import Profiles
    from cotenant.planners.colocate import ColocatedSet, SetScore, ThroughputUnit
    from cotenant.predictors import Load
    from cotenant.predictors.kernels import ColocatedRun

SHOWN = 20  # choices


class ColocateOption(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a set of co-located models.

    score: the policy's; measured: the sum of throughputs; of_best: over the oracle's.
    """

    policy: str
    colocated: list[str]
    score: float | None
    measured: float | None = None
    of_best: float | None = None


def colocate(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="MODEL[:BATCH][@SHARE%], such as resnet50:8@50%.")],
    candidates: Annotated[
        str, typer.Option("--candidates", "-c", metavar="A,B,...", help="Candidates, written as TARGET is.")
    ],
    profiles: Annotated[Path, typer.Option("--profiles", help="Profiles of the target and the candidates (CSV file).")],
    count: Annotated[
        int, typer.Option("--count", min=1, max=7, help="Number of models to co-locate with the target.")
    ] = 1,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help="predicted, kace, memcap, sm, mem, random or oracle. Default: predicted with --fit, kace with "
            "--samples, else memcap.",
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option("--fit", help="Interference predictor written by `cotenant fit`, for --policy predicted."),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option("--samples", help="Measured co-located runs (CSV), for --policy kace and oracle."),
    ] = None,
    technique: Annotated[
        str, typer.Option("--technique", help="Regression of --policy kace: lr, ridge, rf, nn or automl.")
    ] = "lr",
    by: Annotated[
        str, typer.Option("--by", help="Throughput to maximise: `rows` per second, or `relative` to running alone.")
    ] = "rows",
    memory: Annotated[
        str | None, typer.Option("--memory", help="Memory of the device, such as 32GiB. Default: unlimited.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Kind of device; required if the profiles have several.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare the choices of all policies.")] = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Choose models to co-locate with a target for the highest total throughput."""
    from cotenant.config.toml import read_text
    from cotenant.core.profile import read_profiles
    from cotenant.core.units import parse_memory as bytes_of
    from cotenant.planners.colocate import candidate_sets
    from cotenant.predictors.kernels import runs_of
    from cotenant.predictors.samples import read_samples

    if by not in ("rows", "relative"):
        raise ConfigError(f"--by: {by!r} is unknown; use rows or relative")
    known = read_profiles(read_text(profiles).splitlines(keepends=True), str(profiles))
    kinds = sorted({each for _, each in known})
    if kind is None and len(kinds) > 1:
        raise ConfigError(f"{profiles}: has several kinds of devices; choose one with --kind: {', '.join(kinds)}")
    if kind is not None and kind not in kinds:
        raise ConfigError(f"--kind: {profiles} has no profile on {kind!r}; it has {', '.join(kinds)}")
    mine = {key: profile for key, profile in known.items() if key[1] == (kind or kinds[0])}
    one, *others = (parse_load(text, mine, count) for text in (target, *filter(str.strip, candidates.split(","))))
    if len(others) < count:
        raise ConfigError(f"--candidates: {len(others)} are fewer than the {count} of --count")
    runs: list[ColocatedRun] = []
    if samples is not None:
        every = runs_of(read_samples(read_text(samples).splitlines(keepends=True), str(samples)))
        runs = [run for run in every if all((load.model, load.kind) in mine for load in run.loads)]
    asked = ColocateInputs(
        target=one,
        sets=candidate_sets(one, others, count, mine, None if memory is None else bytes_of(memory, "--memory")),
        profiles=mine,
        runs=runs,
        fit=fit,
        technique=technique,
        by=cast("ThroughputUnit", by),
        seed=seed,
    )
    options = asked.compared() if compare else asked.options(policy or asked.default)
    if json:
        show_json(options)
    else:
        console.print(asked.view(options[:SHOWN], compare=compare))


class ColocateInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the data by which policies choose. sets: of co-located models; runs: measured ones."""

    target: Load
    sets: list[ColocatedSet]
    profiles: Profiles
    runs: list[ColocatedRun]
    fit: Path | None
    technique: str
    by: ThroughputUnit
    seed: int

    @property
    def default(self) -> str:
        return "predicted" if self.fit is not None else "kace" if self.runs else "memcap"

    def options(self, policy: str) -> list[ColocateOption]:
        """Return the sets by a policy's score, the best first."""
        from cotenant.planners import colocate as planner

        oracle = planner.rank_by_measurement(self.target, self.runs, self.profiles, self.by)
        seen = [value for colocated in self.sets if (value := oracle(colocated)) is not None]
        options = []
        for choice in planner.rank_sets(self.sets, self._worth(policy)):
            measured = oracle(choice.colocated)
            options.append(
                ColocateOption(
                    policy=policy,
                    colocated=[_written(load) for load in choice.colocated],
                    score=abs(choice.score) if policy != "random" else None,
                    measured=measured,
                    of_best=None if measured is None else measured / max(seen),
                )
            )
        if not options:
            raise ConfigError(
                "--samples: no run of the target co-located with these candidates was measured; oracle needs one"
            )
        return options

    def compared(self) -> list[ColocateOption]:
        """Return the first choice of each policy that has the data it needs, and the best rule's where measured."""
        from cotenant.errors import PlanError

        firsts = []
        for policy in ("oracle", "predicted", "kace", "memcap", "sm", "mem", "random"):
            try:
                firsts.append(self.options(policy)[0])
            except (ConfigError, PlanError) as error:
                print_labelled("left out:", f"{policy}: {error}")
        rules = [
            option for option in firsts if option.policy in ("memcap", "sm", "mem") and option.measured is not None
        ]
        if rules:
            best = max(rules, key=lambda option: option.measured or 0.0)
            firsts.append(msgspec.structs.replace(best, policy="best rule"))
        return firsts

    def view(self, options: Sequence[ColocateOption], *, compare: bool) -> Table:
        from cotenant.planners.colocate import RULES
        from cotenant.render.table import table

        unit = "rows/s" if self.by == "rows" else "of alone"
        known = any(option.measured is not None for option in options)
        rows = table(
            f"co-located with {_written(self.target)}",
            *(["policy"] if compare else []),
            "co-located models",
            f">{'predicted' if compare else options[0].policy}",
            *([f">measured {unit}", ">of the best"] if known else []),
        )
        for option in options:
            # The score of a rule is not a throughput: next to others it would mislead.
            score = None if compare and option.policy in (*RULES, "best rule") else option.score
            cells = [score, option.measured] if known else [score]
            rows.add_row(
                *([option.policy] if compare else []),
                escape(", ".join(option.colocated)),
                *("-" if value is None else f"{value:.4g}" for value in cells),
                *(["-" if option.of_best is None else f"{option.of_best * 100:.1f} %"] if known else []),
            )
        return rows

    def _worth(self, policy: str) -> SetScore:
        from cotenant.config.toml import read_text
        from cotenant.planners import colocate as planner
        from cotenant.predictors.fitting import extrapolated_models, from_json, with_profiles
        from cotenant.predictors.kernels import fit_sum

        if policy in planner.RULES:
            return planner.rank_by_rule(policy, self.profiles)
        if policy == "random":
            return planner.rank_at_random(np.random.default_rng(self.seed))
        if policy == "oracle":
            self._need(self.runs, "oracle", "--samples")
            return planner.rank_by_measurement(self.target, self.runs, self.profiles, self.by)
        if policy == "kace":
            self._need(self.runs, "kace", "--samples")
            if self.by != "rows":
                raise ConfigError("kace learns the sum in rows/s; leave out --by relative, or use --policy predicted")
            size = 1 + len(self.sets[0])
            runs = [run for run in self.runs if len(run.loads) == size]
            return planner.rank_by_learned_sum(
                self.target, fit_sum(runs, self.profiles, self.technique, seed=self.seed)
            )
        if policy == "predicted":
            self._need(self.fit, "predicted", "--fit")
            assert self.fit is not None
            _, fitted = from_json(read_text(self.fit).encode(), str(self.fit))
            loads = dict.fromkeys(load for colocated in self.sets for load in (self.target, *colocated))
            for model, why in extrapolated_models(fitted, loads).items():
                print_labelled("extrapolated:", f"interference on {model}: {why}")
            return planner.rank_by_prediction(self.target, with_profiles(fitted, self.profiles), self.profiles, self.by)
        known = ", ".join(("predicted", "kace", *planner.RULES, "random", "oracle"))
        raise ConfigError(f"--policy: {policy!r} is unknown; available: {known}")

    def _need(self, given: object, policy: str, flag: str) -> None:
        if not given:
            raise ConfigError(f"--policy {policy} needs {flag}")


def parse_load(text: str, profiles: Profiles, colocated: int) -> Load:
    """Parse MODEL[:BATCH][@SHARE%]. Defaults: the largest batch, and an equal part or the least share measured."""
    from cotenant.predictors import Load

    match = re.fullmatch(r"\s*([^:@]+)(?::(\d+))?(?:@(\d+(?:\.\d+)?)%?)?\s*", text)
    if match is None:
        raise ConfigError(f"{text!r} is not MODEL[:BATCH][@SHARE%]; write it as resnet50:8@50%")
    profile = next((each for (model, _), each in profiles.items() if model == match[1].strip()), None)
    if profile is None:
        raise ConfigError(f"model {match[1]!r} has no profile; available: {', '.join(sorted(m for m, _ in profiles))}")
    batch = int(match[2]) if match[2] else profile.max_batch
    share = round(float(match[3]) * 10) if match[3] else max(WHOLE // (1 + colocated), profile.shares[0])
    if not 1 <= batch <= profile.max_batch:
        raise ConfigError(f"{text!r}: a batch of {batch} is not one from 1 to {profile.max_batch}, as measured")
    if not profile.shares[0] <= share <= WHOLE:
        raise ConfigError(f"{text!r}: a share must be between {profile.shares[0] / 10:g} and 100 %")
    return Load(profile.model, profile.kind, batch, share)


def _written(load: Load) -> str:
    return f"{load.model}:{load.batch}@{load.share / 10:g}%"
