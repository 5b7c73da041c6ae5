"""A cast as the published program takes it (ALGORITHMS 1.3, 1.4, 1.10; its files of input).

What it knows of its own models only, the time to assemble a batch and the bytes of an input, is 0 for measured ones:
it belongs to its authors' server and network. It takes utilisation to go with the share, so constants are fitted that
way to the pairs that were measured.
"""

from __future__ import annotations

import msgspec

from cotenant.core.units import WHOLE
from experiments.data import glet
from experiments.gpulet import paper, published
from experiments.gpulet.cast import MEMORY_MB, Cast, whole

POWERS = (1, 2, 4, 8, 16, 32)  # batches whose utilisation it reads
FLOAT, LONG = 4, 8  # bytes
BYTES = {"le": 28 * 28 * FLOAT, "ssd": 3 * 300 * 300 * FLOAT, "be": 14 * LONG}
IMAGE = 3 * 224 * 224 * FLOAT


def tables(cast: Cast) -> published.Tables:
    models = [_model(cast, role) for role in cast.targets]
    return published.Tables(models, msgspec.structs.astuple(cast.proportional), MEMORY_MB[cast.kind])


def _model(cast: Cast, role: str) -> published.Model:
    profile = cast.profiles[role, cast.kind]
    plays = cast.inputs.get(role)
    used = {batch: whole(profile, batch) for batch in POWERS}
    batches = sorted({point.batch for point in profile.points if point.batch <= paper.LARGEST_BATCH})
    return published.Model(
        name=role,
        slo=round(cast.targets[role] * 1e3),
        latency={
            (percent, batch): profile.latency(batch, percent * WHOLE // 100) * 1e3
            for percent in paper.CUTS_PERCENT
            for batch in batches
        },
        overhead=(0.0, *(0.0 for _ in range(paper.LARGEST_BATCH))) if plays is None else (0.0, *_assembly(plays)),
        l2={batch: l2 for batch, (l2, _) in used.items()},
        dram={batch: dram for batch, (_, dram) in used.items()},
        memory=profile.memory(1) // glet.MEGABYTE,
        input_bytes=0 if plays is None else BYTES.get(plays, IMAGE),
    )


def _assembly(plays: str) -> tuple[float, ...]:
    """Milliseconds by batch from 1 on: for inputs of one dimension a constant, for pictures a multiple of a table."""
    if plays in ("le", "be"):
        return ({"le": 0.4, "be": 1.0}[plays],) * paper.LARGEST_BATCH
    dimensions, factor = ("3_300_300", 2.5) if plays == "ssd" else ("3_224_224", 1.9)
    return tuple(factor * ms for ms in glet.assembly(dimensions))
