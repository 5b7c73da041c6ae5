"""Run everything that needs a GPU, in stages with a time limit that continue where an earlier run stopped.

    make gpu-check [STAGE="1 2 3 4 5"] [BACKEND="green mps"] [OUT=results] [KNOWN=data/gpu] [LIMIT=570]
    python -m benchmarks.gpu --stage 2 3 --backend green --out results --seconds 570

1 inventory of this machine, and tests marked `gpu`   2 profiles, memory and counters   3 pairs
4 all models live, compared with the simulator, and the largest rate of three planners   5 `cotenant serve` under load

With the backend `cpu` the same stages run in minutes on a machine without a GPU, with small models.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu import checks, live, pairs, profiles, serve
from benchmarks.gpu.session import PAPER, SMALL, Session, Target
from cotenant.errors import CotenantError, DeviceError
from cotenant.live.deployment import ServableModel
from cotenant.zoo import TORCH

STAGES = {2: profiles.run, 3: pairs.run, 4: live.run, 5: serve.run}  # stages that need the models
WEIGHTS = {1: 4.0, 2: 6.0, 3: 3.0, 4: 4.0, 5: 3.0}  # of stages in the time; unused time goes to later stages
RESERVE = 5.0  # seconds kept for the end


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, nargs="+", choices=(1, 2, 3, 4, 5), default=[1, 2, 3, 4, 5])
    parser.add_argument("--backend", nargs="+", choices=("cpu", "green", "mps", "mig"), default=["green", "mps"])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="Folder for results.")
    parser.add_argument(
        "--known", type=Path, help="Results of earlier runs to continue: a folder, or one with a folder per kind."
    )
    parser.add_argument("--repository", type=Path, default=Path("build/gpu-models"))
    parser.add_argument("--models", nargs="+", metavar="NAME", help="Models of the zoo; default: gpulet's.")
    parser.add_argument("--seconds", type=float, default=570.0, help="Time limit of the whole run.")
    given = parser.parse_args()
    if "cpu" in given.backend and len(given.backend) > 1:
        parser.error("--backend: cpu cannot be combined with others")
    usual = SMALL if given.backend == ["cpu"] else PAPER
    targets = usual if usual is SMALL else {name: Target(recipe.slo) for name, recipe in TORCH.items()} | usual
    if unknown := [name for name in given.models or () if name not in targets]:
        parser.error(f"--models: no {unknown[0]!r}; available: {', '.join(targets)}")
    chosen = {name: targets[name] for name in given.models or usual}
    session = Session(given.out, given.repository, chosen, tuple(given.backend), given.seconds - RESERVE)
    try:
        about = session.provenance(given.stage)
    except DeviceError as error:
        sys.exit(f"{error}. Without a GPU, `make gpu-check BACKEND=cpu` runs the same with small models")
    if given.known is not None:
        _copy_known(session, given.known, about)
    path = session.out / "machine.json"
    runs = [*(msgspec.json.decode(path.read_bytes()) if path.exists() else []), about]
    session.write(path.name, msgspec.json.format(msgspec.json.encode(runs), indent=1))
    models: dict[str, ServableModel] = {}
    stages = sorted(set(given.stage))
    for place, stage in enumerate(stages):
        session.allot(WEIGHTS[stage] / sum(WEIGHTS[later] for later in stages[place:]))
        session.say(f"stage {stage} begins")
        try:
            if stage == 1:
                checks.run(session)
            else:
                models = models or session.build()
                STAGES[stage](session, models)
        except CotenantError as error:
            session.lacks(f"stage {stage}: {error}")
        except Exception as error:  # noqa: BLE001 later stages may succeed, and time on a GPU is limited
            traceback.print_exc()
            session.lacks(f"stage {stage}: {type(error).__name__}: {error}")
    for text in session.missing:
        print(f"missing: {text}")
    print(f"results are in {given.out}" + ("; run again to continue" if session.missing else ""))


def _copy_known(session: Session, known: Path, about: dict[str, Any]) -> None:
    """Copy missing results from that folder, or from its subfolder of this kind of GPU."""
    kinds = [gpu["kind"] for gpu in about.get("gpus", ())]
    folder = next((known / kind for kind in kinds if (known / kind).is_dir()), known)
    for file in folder.iterdir() if folder.is_dir() else ():
        if file.suffix in (".csv", ".json") and not (session.out / file.name).exists():
            shutil.copy(file, session.out)


if __name__ == "__main__":
    main()
