"""Convert a model set to tables of the published program.

For the paper's models the program's files add the time to assemble batches and the size of inputs on the network; for
other models both are 0, as they belong to the authors' server. The program assumes utilisation proportional to the
share, so its coefficients are fitted to measured pairs under that assumption.
"""

from __future__ import annotations

import functools

import msgspec

from cotenant.core.units import WHOLE
from cotenant.published import FOLDER
from experiments.data import glet
from experiments.gpulet import paper, published
from experiments.gpulet.model_sets import GLET, MEMORY_MB, ModelSet, full_device_utilisation

POWERS = (1, 2, 4, 8, 16, 32)  # batches whose utilisation the program reads


def tables(model_set: ModelSet) -> published.Tables:
    """Return the tables of a model set."""
    return published.Tables(
        [_model(model_set, role) for role in model_set.targets],
        interference=msgspec.structs.astuple(model_set.proportional),
        memory=MEMORY_MB[model_set.kind],
    )


def _model(model_set: ModelSet, role: str) -> published.Model:
    profile = model_set.profiles[role, model_set.kind]
    batches = sorted({point.batch for point in profile.points if point.batch <= paper.LARGEST_BATCH})
    used = {batch: full_device_utilisation(profile, batch) for batch in POWERS}
    model = published.Model(
        name=role,
        slo=round(model_set.targets[role] * 1e3),
        latency={
            (percent, batch): profile.latency(batch, percent * WHOLE // 100) * 1e3
            for percent in paper.CUTS_PERCENT
            for batch in batches
        },
        l2={batch: 100 * l2 for batch, (l2, _) in used.items()},
        dram={batch: 100 * dram for batch, (_, dram) in used.items()},
    )
    if role not in model_set.inputs:
        return model
    known = _paper_models()[GLET[model_set.inputs[role]]]
    return msgspec.structs.replace(known, name=role, slo=model.slo, latency=model.latency)


@functools.cache
def _paper_models() -> dict[str, published.Model]:
    """Return the paper's models as described in the program's files."""
    read = published.read_tables(FOLDER / glet.synthetic_file(8), FOLDER / glet.SOURCE)
    return {model.name: model for model in read.models}
