"""Simulate InSS' decision process (section 5.2): states, actions and rewards on the profiles of a problem.

In each step an action places every model and gives it a share, Algorithm 1 decides on batches, and a second of requests
is served by the queueing of equation 2: a batch starts once it is full and the one before it is done. A request is late
when it misses its target; one that still waits when it can no longer be answered in time is dropped, and counts alike.

Rates are those of the published program: drawn at the start of an episode, and every ten steps up or down by a
twentieth of their range, turning at its ends. Requests are evenly spaced, as there.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.model import Kind
from cotenant.errors import PlanError
from cotenant.planners.inss.batch_decision import BatchDecision, decide_batches
from cotenant.planners.inss.cluster import Cluster, Floats, Provisioning, adjusted

PENALTY = 100.0  # ω of equation 3; the published program takes 50 and the mean over models
STEPS = 200  # T of table 1
STEP = 1.0  # seconds
RATE_EVERY, RATE_STEP = 10, 0.05  # steps, and part of the range


class Outcome(msgspec.Struct, frozen=True):
    """Describe what a step led to, by model.

    throughput: h of equation 1, the requests/s that its batches sustain; violated: the fraction of its requests.
    """

    throughput: tuple[float, ...]
    violated: tuple[float, ...]
    decision: BatchDecision


class Environment:
    """Step through the decision process of a cluster. low, high: requests/s of each model."""

    def __init__(self, cluster: Cluster, low: Sequence[float], high: Sequence[float]) -> None:
        if not cluster.devices or not cluster.models:
            raise PlanError("an environment needs at least one device and one model; there is nothing to decide")
        for name, least, most in zip(cluster.models, low, high, strict=True):
            if not 0 <= least <= most < np.inf:
                raise PlanError(f"model {name!r}: rates from {least:g} to {most:g} requests/s are no range")
        self.cluster = cluster
        self.low, self.high = np.array(low, dtype=float), np.array(high, dtype=float)
        self._begin(self.high)

    @property
    def state_size(self) -> int:
        return len(self.cluster.devices) + 2 * len(self.cluster.models)

    def reset(self, rng: np.random.Generator) -> Floats:
        """Draw rates, empty the devices and queues, and return the state."""
        self._begin(rng.uniform(self.low, self.high))
        self._direction = rng.choice((-1.0, 1.0), len(self.cluster.models))
        return self.state()

    def at(self, rates: Sequence[float], used: Sequence[float] | None = None) -> Floats:
        """Set rates, with empty queues, and return the state. used: part of each device's memory; default: none."""
        self._begin(np.array(rates, dtype=float))
        if used is not None:
            self._used = np.array(used, dtype=float)
        return self.state()

    def _begin(self, rates: Floats) -> None:
        models = len(self.cluster.models)
        self.rates = rates
        self._direction = np.ones(models)
        self._queues = [np.empty(0)] * models
        self._busy = np.zeros(models)  # seconds until the batch in flight is done
        self._phase = np.ones(models)  # of a gap, until the next request
        self._used = np.zeros(len(self.cluster.devices))
        self._step = 0

    def state(self) -> Floats:
        """Return the memory used on each device, and the rate and the queue of each model, each over its largest."""
        queued = np.array([len(queue) for queue in self._queues])
        scale = np.where(self.high > 0, self.high, 1.0)
        return np.concatenate([self._used, self.rates / scale, queued / scale])

    def step(self, choices: NDArray[np.int64]) -> tuple[Floats, float, Outcome]:
        """Apply an action: by model, a device and a share. Return the next state, the reward and what it is made of."""
        where = adjusted(self.cluster, choices, [rate > 0 for rate in self.rates])
        decision = decide_batches(self.cluster, where, self.rates.tolist(), [len(queue) for queue in self._queues])
        where = self._deployed(where, decision)
        throughput, violated = [], []
        for i, batch in enumerate(decision.batches):
            arrivals = self._arrivals(i)
            if not where.shares[i]:
                self._queues[i] = np.empty(0)
                throughput.append(0.0)
                violated.append(float(self.rates[i] > 0))
                continue
            curve = self.cluster.curve(i, where.devices[i], where.shares[i])
            seconds = curve[batch - 1] * self.cluster.slowdown(i, batch, where, decision.batches)
            throughput.append(batch / seconds)
            violated.append(self._serve(i, arrivals, batch, seconds))
        normalised = np.array(throughput) / self.cluster.reference_rates
        reward = float(np.sum(normalised) - PENALTY * np.sum(violated))
        self._step += 1
        if self._step % RATE_EVERY == 0:
            self._change_rates()
        return self.state(), reward, Outcome(tuple(throughput), tuple(violated), decision)

    def _deployed(self, where: Provisioning, decision: BatchDecision) -> Provisioning:
        """Return the provisioning without models that do not fit into memory (constraint 1b) or were never profiled,
        and note the memory used."""
        shares = list(where.shares)
        for device, kind in enumerate(self.cluster.devices):
            there = [i for i in where.on(device) if self.cluster.curve(i, device, shares[i])]
            while there and not self.cluster.fits(
                device, there, [shares[i] for i in there], [decision.batches[i] for i in there]
            ):
                there.pop()
            for i in where.on(device):
                if i not in there:
                    shares[i] = 0
            needed = sum(self.cluster.memory(i, device, decision.batches[i]) for i in there)
            self._used[device] = used_part(needed, kind)
        return Provisioning(where.devices, tuple(shares))

    def _arrivals(self, model: int) -> Floats:
        """Return the evenly spaced requests of a step, in seconds since its begin."""
        rate = float(self.rates[model])
        if not rate:
            return np.empty(0)
        first = float(self._phase[model]) / rate
        count = max(0, int(np.ceil((STEP - first) * rate)))
        self._phase[model] = (first + count / rate - STEP) * rate
        return np.asarray(first + np.arange(count) / rate)

    def _serve(self, model: int, arrivals: Floats, batch: int, seconds: float) -> float:
        """Run the batches that begin in this step; return the fraction of requests that are late or dropped."""
        times = np.concatenate([self._queues[model], arrivals])
        full = len(times) // batch
        late = answered = 0
        if full:
            ready = times[batch - 1 : full * batch : batch]
            elapsed = np.arange(full) * seconds
            finish = np.maximum.accumulate(np.maximum(ready - elapsed, self._busy[model])) + elapsed + seconds
            full = int(np.searchsorted(finish - seconds, STEP))
            answered = full * batch
            latencies = np.repeat(finish[:full], batch) - times[:answered]
            late = int(np.sum(latencies > self.cluster.slos[model] * (1 + 1e-9)))
            if full:
                self._busy[model] = finish[full - 1]
        self._busy[model] = max(0.0, self._busy[model] - STEP)
        waiting = times[answered:] - STEP
        alive = -waiting + seconds <= self.cluster.slos[model]
        self._queues[model] = waiting[alive]
        dropped = int(np.sum(~alive))
        return (late + dropped) / (answered + dropped) if answered + dropped else 0.0

    def _change_rates(self) -> None:
        rates = self.rates + self._direction * RATE_STEP * (self.high - self.low)
        beyond = (rates > self.high) | (rates < self.low)
        self._direction = np.where(beyond, -self._direction, self._direction)
        self.rates = np.clip(rates, self.low, self.high)


def used_part(needed: int, kind: Kind) -> float:
    """Return the part of a device's memory that is used; 0 where it has none, since nothing is then placed on it."""
    return needed / kind.memory if kind.memory else 0.0
