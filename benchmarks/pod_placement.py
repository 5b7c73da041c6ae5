"""Measure the processor time in which a pod of others is decided, with 100 nodes of four GPUs each and 1,000 pods.

The cluster is filled by the rule itself, with pods of eight models at three targets and several rates. Then pods come
one by one, and all objects are given each time, as the controller gives them. `new` are pods that ask for what nobody
has asked for before, so that no device has been looked at for them; `known` ask for what others may have asked for;
`first` is the first decision after a restart.
"""

from __future__ import annotations

import statistics
import sys
import time

import msgspec
import numpy as np

from benchmarks.harness import show
from cotenant.core.model import Kind
from cotenant.core.profile import Point, Profile
from cotenant.k8s.pods.catalogue import Catalogue
from cotenant.k8s.pods.inventory import DeviceReport, NodeDevices
from cotenant.k8s.pods.placer import Placed, Placer
from cotenant.k8s.pods.request import SharePod
from cotenant.k8s.pods.rules import choose_rule
from cotenant.k8s.resource import ObjectKey
from cotenant.predictors import ConstantMargin

NODES, GPUS, PODS, TRIES = 100, 4, 1000, 40
GIB = 1 << 30
MODELS = {f"model-{n}": 0.002 * 1.5**n for n in range(8)}  # seconds of one row on a whole device
TARGETS = (0.1, 0.2, 0.4)
KIND = Kind(name="a100", memory=80 * GIB, cuts=tuple(range(50, 1001, 50)))


def catalogue() -> Catalogue:
    profiles = {
        (model, KIND.name): Profile(
            model,
            KIND.name,
            [
                Point(share=share, batch=batch, latency=seconds * (0.5 + batch / 2) * 1000 / share, memory=4 * GIB)
                for share in KIND.cuts
                for batch in (1, 2, 4, 8, 16, 32)
            ],
        )
        for model, seconds in MODELS.items()
    }
    return Catalogue([KIND], profiles, ConstantMargin(1.1))


def cluster() -> list[NodeDevices]:
    return [
        NodeDevices(
            name=f"node-{node:03}",
            open=True,
            labels={"kubernetes.io/hostname": f"node-{node:03}"},
            devices=tuple(
                DeviceReport(uuid=f"GPU-{node:03}-{n}", kind=KIND.name, memory=KIND.memory) for n in range(GPUS)
            ),
        )
        for node in range(NODES)
    ]


def pod(number: int, rng: np.random.Generator, *, fresh: bool = False) -> SharePod:
    """Return a pod that asks for a part of what its model sustains. fresh: at a rate that no other has."""
    model = f"model-{rng.integers(len(MODELS))}"
    rate = float(rng.choice([0.05, 0.1, 0.15]) / MODELS[model])
    return SharePod(
        key=ObjectKey("default", f"pod-{number:04}"),
        uid=f"uid-{number}",
        version="1",
        created=f"2026-01-01T00:00:00.{number:06}Z",
        model=model,
        slo=float(rng.choice(TARGETS)),
        rate=rate + (0.001 * (number + 1) if fresh else 0.0),
        config_map=f"pod-{number:04}",
        gated=True,
    )


def main() -> None:
    rule = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "score")
    rng = np.random.default_rng(0)
    placer, nodes = Placer(catalogue(), choose_rule(rule)), cluster()
    waiting = [pod(number, rng) for number in range(PODS)]
    began = time.process_time()
    decisions = placer.decide(nodes, waiting, {})
    filling = time.process_time() - began
    pods = [
        msgspec.structs.replace(each.pod, gated=False, placement=each.placement)
        for each in decisions
        if isinstance(each, Placed)
    ]
    placer = Placer(catalogue(), choose_rule(rule))  # as after a restart
    began = time.process_time()
    placer.decide(nodes, [*pods, pod(PODS + 2 * TRIES, rng)], {})
    first = time.process_time() - began
    seconds: dict[bool, list[float]] = {False: [], True: []}
    taken = 0
    for number in range(2 * TRIES):
        fresh = bool(number % 2)
        new = pod(PODS + number, rng, fresh=fresh)
        began = time.process_time()
        [decision] = placer.decide(nodes, [*pods, new], {})
        seconds[fresh].append(time.process_time() - began)
        taken += isinstance(decision, Placed)
    known, new_ = ({"p50": statistics.median(each), "max": max(each)} for each in (seconds[False], seconds[True]))
    show(
        f"pod_placement_{rule}",
        f"{NODES} nodes, {len(pods)} of {PODS} pods placed in {filling:.2f} s of processor time; one more: known p50 "
        f"{known['p50'] * 1e3:.2f} ms, at most {known['max'] * 1e3:.2f} ms; new p50 {new_['p50'] * 1e3:.2f} ms, "
        f"at most {new_['max'] * 1e3:.2f} ms; after a restart {first * 1e3:.1f} ms; {taken} of {2 * TRIES} have room",
        placed=len(pods),
        filling_s=filling,
        have_room=taken,
        first_ms=first * 1e3,
        known_p50_ms=known["p50"] * 1e3,
        known_max_ms=known["max"] * 1e3,
        new_p50_ms=new_["p50"] * 1e3,
        new_max_ms=new_["max"] * 1e3,
    )


if __name__ == "__main__":
    main()
