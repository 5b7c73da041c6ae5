"""Greedy best fit: devices are shared in space only, each partition has one model.

gpulet paper, section 2.3, its spatial baseline after GSLICE: a model gets the smallest share that carries its rate
within its target, and that partition goes where it leaves least. A rate that no share carries takes the share that
carries most as often as it fills it, and the smallest for the rest. The paper leaves the order open: here the largest
shares go first, as is usual for best fit. Where neighbours slow a partition too much for its share, it takes the next
larger one.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    ROUNDING_TOLERANCE,
    DeviceDraft,
    PartitionDraft,
    build_plan,
    fits_device,
    latency_curve,
    max_throughput_batch,
    sorted_by_price,
)


class _Piece(msgspec.Struct, frozen=True):
    """A partition to be found a place for. share: ‰; rate: requests/s."""

    model: str
    share: int
    rate: float


def plan(problem: Problem) -> Plan:
    left = {model: rate for model, rate in problem.rates.items() if rate > 0}
    bins: list[DeviceDraft] = []
    for kind in sorted_by_price(problem.fleet):
        pieces = [piece for model, rate in left.items() for piece in _pieces(problem, kind, model, rate)]
        for piece in sorted(pieces, key=lambda piece: -piece.share):
            if _place(problem, kind, bins, piece):
                left[piece.model] -= piece.rate
        left = {model: rate for model, rate in left.items() if rate > ROUNDING_TOLERANCE * problem.rates[model]}
    return build_plan(problem, "bestfit", bins)


def _pieces(problem: Problem, kind: Kind, model: str, rate: float) -> list[_Piece]:
    """What the model needs of this kind; nothing where no share serves it in time."""
    slo = problem.model(model).slo
    most = {cut: max_throughput_batch(latency_curve(problem, model, kind.name, cut), slo)[1] for cut in kind.cuts}
    largest = max(most, key=lambda cut: (most[cut], -cut))
    if most[largest] == 0 or not fits_device(problem, kind, [PartitionDraft(largest, {model: most[largest]})]):
        return []
    full = math.floor(rate / most[largest] * (1 + ROUNDING_TOLERANCE))
    if kind.count is not None:  # More than this many have no place.
        full = min(full, kind.count * (WHOLE // kind.cuts[0]))
    pieces = [_Piece(model, largest, most[largest])] * full
    rest = rate - full * most[largest]
    if ROUNDING_TOLERANCE * rate < rest <= most[largest]:
        pieces.append(_Piece(model, next(cut for cut in kind.cuts if most[cut] >= rest), rest))
    return pieces


def _place(problem: Problem, kind: Kind, bins: list[DeviceDraft], piece: _Piece) -> bool:
    used = [bin_ for bin_ in bins if bin_.kind is kind]
    places = [bin_ for bin_ in used if kind.max_partitions is None or len(bin_.cuts) < kind.max_partitions]
    places.sort(key=lambda bin_: bin_.free)
    if kind.count is None or len(used) < kind.count:
        places.append(DeviceDraft(kind, []))
    for bin_ in places:
        for share in kind.cuts:
            if piece.share <= share <= bin_.free:
                cut = PartitionDraft(share, {piece.model: piece.rate})
                if fits_device(problem, kind, [*bin_.cuts, cut]):
                    if not bin_.cuts:
                        bins.append(bin_)
                    bin_.cuts.append(cut)
                    return True
    return False
