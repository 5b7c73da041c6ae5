"""Re-create the scheduler published with the gpulet paper (ATC '22), including where it differs from the paper.

Its plans differ from Algorithm 1 in many details. To compare its figures with ours, this package makes exactly the
plans that the program makes, quirks included (docs/reproduction.md). It was written from notes on the program's
behaviour ("1.7" is a section of those notes) and from plans that the program made from synthetic tables (`golden_glet`
in the tests), never from its source. The package `cotenant` must not use it, and it uses no planner of `cotenant`.

The program computes in 32-bit floats, and rates are integers, so differences of rates are truncated towards zero. Here
a float is a Python float with a 32-bit value: results are rounded with `f32` where the program stores them, which is
exact for one addition, multiplication or division. Where the notes leave the order of operations open, the order that
reproduces every digit of the plans was chosen.

Units are the program's: ms, requests/s, percent of a GPU, MB.

Of golden_glet, every row of the tables up to scale 0.8 is reproduced to the last digit. At scale 1.0 (204 rows) eleven
plans differ by 1e-7 in a duty cycle, since some step is rounded otherwise, and one (scenario 14744, elastic) in a
residue's rate, for a reason that was not found. No row exercises: reducing batches to the network's limit, a lack of
memory. There, this follows the notes alone.
Omitted are the "Self Tuning" mode (1.10), and that the memory of a merged residue is not counted (1.7, step 5).
"""

from __future__ import annotations

from experiments.gpulet.published.modes import ELASTIC, ELASTIC_ALONE, HALVES, IDEAL, SBP, Gpulet, Mode, Schedule
from experiments.gpulet.published.scheduler import schedule
from experiments.gpulet.published.table_files import read_tables
from experiments.gpulet.published.tables import Model, Tables

__all__ = [
    "ELASTIC",
    "ELASTIC_ALONE",
    "HALVES",
    "IDEAL",
    "SBP",
    "Gpulet",
    "Mode",
    "Model",
    "Schedule",
    "Tables",
    "read_tables",
    "schedule",
]
