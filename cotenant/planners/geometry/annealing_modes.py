"""Choose the modes with which annealing improves a fixed fleet.

Few columns are at their price in the relaxation, and a plan of whole partitions needs others: what is left of several
demands fits no partition but one that is a little worse. So beside the columns near their price there are the best
pairs of models on each slot, and rounds of more models at prices and for parts of the demand that vary at random.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.diving import Diver
from cotenant.planners.geometry.modes import MAX_PAIRED_OPTIONS, Mode
from cotenant.planners.geometry.pricing import DualPrices

Array = NDArray[np.float64]

NEAR_PRICE = 0.6  # value over price of the columns of the relaxation
NEAR_PRICE_OF_MORE = 0.7  # and of others
MAX_CELLS = 3_000_000  # models times columns: annealing keeps a table of them
MAX_MORE = 8000  # modes besides the columns of the relaxation
MAX_PAIRED_MODELS = 40  # of which every two are paired: those of most value
PAIRS_SHARE = 0.15  # of the work left, which these may take: with fewer models where there is little
MAX_PAIRS = 400  # of each slot
ROUNDS = 6  # of pricing at varied prices
ROUNDS_SHARE = 0.1  # of the work left, which they may take
PRICE_NOISE = 0.3  # standard deviation of the logarithm of prices in these
PART_PROBABILITY = 0.5  # of each model that a part of its demand is left in these
MIN_PART = 0.1
SECONDS_PER_CELL = 3e-8  # of work, for each two options of two models


def annealing_modes(
    diver: Diver, demand: Array, prices: Array, slot_prices: Array, budget: WorkBudget
) -> tuple[list[Mode], list[Mode]]:
    """Return the columns of the relaxation near their price, in the order of the pool, and other modes nearly as good.

    prices, slot_prices: of a request/s of each model and of a partition on each slot in the relaxation.
    """
    pool = diver.pool
    value = pool.values(prices, demand)
    price = slot_prices[pool.slot]
    near = np.flatnonzero(value >= NEAR_PRICE * price)
    worth = np.divide(value, price, out=np.full_like(value, np.inf), where=price > 0)
    nearest = near[np.argsort(-worth[near], kind="stable")][: MAX_CELLS // len(demand)]
    modes = [pool.modes[n] for n in np.sort(nearest).tolist()]
    rounds = _rounds(diver, demand, prices, slot_prices, budget.part(ROUNDS_SHARE))
    more = dict.fromkeys([*rounds, *_pairs(diver, demand, prices, slot_prices, budget)])
    return modes, list(more)[:MAX_MORE]


def _pairs(diver: Diver, demand: Array, prices: Array, slot_prices: Array, budget: WorkBudget) -> list[Mode]:
    options = min(MAX_PAIRED_OPTIONS, diver.catalog.options.latency.shape[2])
    seconds = SECONDS_PER_CELL * options**2 / 2  # for each two models on a slot
    affordable = math.isqrt(int(PAIRS_SHARE * budget.left() / (seconds * len(diver.slots))))
    models = np.argsort(-prices * demand, kind="stable")[: min(MAX_PAIRED_MODELS, affordable)].tolist()
    pairs: list[Mode] = []
    for s in diver.slots if len(models) > 1 else ():
        budget.spend(seconds * len(models) ** 2)
        least = NEAR_PRICE_OF_MORE * float(slot_prices[s])
        pairs += diver.catalog.best_pairs(s, models, prices, demand, least, MAX_PAIRS)
    return pairs


def _rounds(diver: Diver, demand: Array, prices: Array, slot_prices: Array, budget: WorkBudget) -> list[Mode]:
    rng = np.random.default_rng(0)
    modes: list[Mode] = []
    for _ in range(ROUNDS):
        if not budget.left():
            break
        noise = np.exp(PRICE_NOISE * rng.standard_normal(len(prices)))
        left = np.where(rng.random(len(prices)) < PART_PROBABILITY, rng.uniform(MIN_PART, 1.0, len(prices)), 1.0)
        varied = DualPrices(demand * left, prices * noise * demand * left)
        priced = diver.knapsack.valuable_modes(varied, NEAR_PRICE_OF_MORE * slot_prices, budget)
        modes += [
            mode
            for mode in priced
            if sum(
                float(prices[i]) * min(rate, float(demand[i])) for i, rate in zip(mode.models, mode.rates, strict=True)
            )
            >= NEAR_PRICE_OF_MORE * float(slot_prices[mode.slot])
        ]
    return modes
