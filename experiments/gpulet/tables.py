"""A cast as the published program takes it.

The paper's models bring what the program's files say of them: batches take time to be assembled, and inputs take room
on the network. For others that is 0: it belongs to its authors' server. The program takes utilisation to go with the
share, so its constants are fitted that way to the pairs that were measured.
"""

from __future__ import annotations

import functools

import msgspec

from cotenant.core.units import WHOLE
from experiments import data
from experiments.data import glet
from experiments.gpulet import paper, published
from experiments.gpulet.model_sets import GLET, MEMORY_MB, Cast, whole

POWERS = (1, 2, 4, 8, 16, 32)  # batches whose utilisation it reads


def tables(cast: Cast) -> published.Tables:
    return published.Tables(
        [_model(cast, role) for role in cast.targets],
        interference=msgspec.structs.astuple(cast.proportional),
        memory=MEMORY_MB[cast.kind],
    )


def _model(cast: Cast, role: str) -> published.Model:
    profile = cast.profiles[role, cast.kind]
    batches = sorted({point.batch for point in profile.points if point.batch <= paper.LARGEST_BATCH})
    used = {batch: whole(profile, batch) for batch in POWERS}
    model = published.Model(
        name=role,
        slo=round(cast.targets[role] * 1e3),
        latency={
            (percent, batch): profile.latency(batch, percent * WHOLE // 100) * 1e3
            for percent in paper.CUTS_PERCENT
            for batch in batches
        },
        l2={batch: 100 * l2 for batch, (l2, _) in used.items()},
        dram={batch: 100 * dram for batch, (_, dram) in used.items()},
    )
    if role not in cast.inputs:
        return model
    known = _own()[GLET[cast.inputs[role]]]
    return msgspec.structs.replace(known, name=role, slo=model.slo, latency=model.latency)


@functools.cache
def _own() -> dict[str, published.Model]:
    """The paper's models by the program's files."""
    read = published.read_tables(data.FOLDER / glet.synthetic_file(8), data.FOLDER / glet.SOURCE)
    return {model.name: model for model in read.models}
