"""Represent a trained policy: a file of plain arrays that decides without the library that trained it.

A policy of `inss` belongs to one cluster and one set of models: its outputs are their devices and shares, and
`Policy.require_cluster` raises where a problem has others. One of `inss-plus` values choices by features of theirs, for
any models and devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.errors import PlanError

VERSION = 1
DIGITS = 6  # decimals of a weight
TRAIN = "train one with `cotenant train`"

Floats = NDArray[np.float64]


class Layer(msgspec.Struct, frozen=True):
    """Hold one layer of a network: weights by input and output, and a bias by output."""

    weights: tuple[tuple[float, ...], ...]
    bias: tuple[float, ...]


class Policy(msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True):
    """Describe a trained policy.

    planner: which planner it is of. updates: of its networks, 0 where it is untrained; seed: of the training. layers:
    of the actor, each but the last followed by max(0, x).

    features: what it sees of each choice, where it values one at a time; the fields below are then empty. fleet: a hash
    of the devices, and devices: their kinds, for messages. models: their names, and models_hash: of their targets and
    profiles. low, high: the requests/s of each model that it was trained for; states are relative to high. heads: the
    number of choices of each decision.
    """

    version: int = VERSION
    planner: str
    updates: int
    seed: int
    layers: tuple[Layer, ...]
    features: tuple[str, ...] = ()
    fleet: str = ""
    devices: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    models_hash: str = ""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    heads: tuple[int, ...] = ()

    def logits(self, state: Floats) -> Floats:
        """Return the logits of all heads for a state, or of each choice for rows of features."""
        for weights, bias in self._arrays[:-1]:
            state = np.maximum(state @ weights + bias, 0.0)
        weights, bias = self._arrays[-1]
        return np.asarray(state @ weights + bias)

    def choices(self, state: Floats) -> list[int]:
        """Return the likeliest choice of each head."""
        edges = np.cumsum(self.heads)[:-1]
        return [int(np.argmax(head)) for head in np.split(self.logits(state), edges)]

    def require(self, planner: str) -> None:
        """Raise PlanError where this policy is another planner's, or untrained."""
        if self.planner != planner:
            raise PlanError(f"the policy is of planner {self.planner!r}, not of {planner!r}; {TRAIN}")
        if self.updates == 0:
            raise PlanError(f"the policy is untrained (updates = 0): its plans are arbitrary; {TRAIN}")

    def require_cluster(self, *, fleet: str, devices: Sequence[str], models: Sequence[str], models_hash: str) -> None:
        """Raise PlanError where this policy was made for other devices or other models."""
        if self.models != tuple(models):
            raise PlanError(
                f"the policy was trained for the models {', '.join(self.models)}, the problem has {', '.join(models)};"
                f" {TRAIN}"
            )
        if self.fleet != fleet:
            raise PlanError(
                f"the policy was trained for another cluster ({_counted(self.devices)}; hash {self.fleet}), the problem"
                f" has {_counted(devices)} (hash {fleet}); {TRAIN}"
            )
        if self.models_hash != models_hash:
            raise PlanError(
                f"the policy was trained for other targets or profiles of these models (hash {self.models_hash}, the"
                f" problem's is {models_hash}); {TRAIN}"
            )

    def require_features(self, features: Sequence[str]) -> None:
        """Raise PlanError where this policy sees other features, such as one of another version's planner."""
        if self.features != tuple(features):
            other = set(self.features) ^ set(features)
            raise PlanError(
                f"the policy decides by {len(self.features)} features, this program's planner {self.planner!r} by"
                f" {len(features)}{'; only one has ' + ', '.join(sorted(other)) if other else ', in another order'};"
                f" {TRAIN}"
            )

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes, place: str) -> Policy:
        """Read a policy from its file's content. Raises PlanError with `place` for what is none."""
        try:
            version = msgspec.json.decode(text, type=_Version).version
            if version != VERSION:
                raise PlanError(
                    f"{place}: is a policy of version {version}, this program reads version {VERSION}; train it again"
                    " with `cotenant train`"
                )
            policy = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise PlanError(f"{place}: is not a policy: {error}; make one with `cotenant train`") from None
        policy._check(place)
        return policy

    def _check(self, place: str) -> None:
        """Raise PlanError for layers, heads or rates that do not fit together, and numbers that are not finite."""
        if not self.layers:
            raise PlanError(f"{place}: is a policy without layers; make one with `cotenant train`")
        for n, layer in enumerate(self.layers):
            outputs = len(layer.bias)
            inputs = len(self.layers[n - 1].bias) if n else len(layer.weights)
            if len(layer.weights) != inputs or any(len(row) != outputs for row in layer.weights):
                raise PlanError(f"{place}: layer {n} has weights of another size than its inputs and outputs")
        if not all(np.isfinite(weights).all() and np.isfinite(bias).all() for weights, bias in self._arrays):
            raise PlanError(f"{place}: has weights that are not finite; the training diverged: lower its learning rate")
        if self.features:
            self._check_features(place)
        else:
            self._check_heads(place)

    def _check_features(self, place: str) -> None:
        inputs, outputs = len(self.layers[0].weights), len(self.layers[-1].bias)
        if inputs != len(self.features) or outputs != 1:
            raise PlanError(
                f"{place}: has {inputs} inputs and {outputs} outputs, for {len(self.features)} features and the value"
                " of a choice"
            )

    def _check_heads(self, place: str) -> None:
        models, state = len(self.models), len(self.devices) + 2 * len(self.models)
        if len(self.layers[0].weights) != state:
            raise PlanError(
                f"{place}: layer 0 has {len(self.layers[0].weights)} inputs for a state of {state} numbers: the memory"
                f" of {len(self.devices)} devices, and rate and queue of {models} models"
            )
        if len(self.heads) != 2 * models or min(self.heads, default=1) < 1:
            raise PlanError(
                f"{place}: has the heads {list(self.heads)}; each of {models} models takes two, of at least one choice"
            )
        if not len(self.low) == len(self.high) == models:
            raise PlanError(
                f"{place}: has rates of {len(self.low)} (low) and {len(self.high)} (high) models for {models} models"
            )
        if sum(self.heads) != len(self.layers[-1].bias):
            raise PlanError(f"{place}: has {len(self.layers[-1].bias)} outputs for {sum(self.heads)} choices")

    @property
    def _arrays(self) -> list[tuple[Floats, Floats]]:
        arrays: list[tuple[Floats, Floats]] | None = self.__dict__.get("_cached")
        if arrays is None:
            arrays = [(np.array(layer.weights), np.array(layer.bias)) for layer in self.layers]
            self.__dict__["_cached"] = arrays
        return arrays


class _Version(msgspec.Struct):
    version: int


def layer(weights: Floats, bias: Floats) -> Layer:
    """Return a layer of rounded numbers, so that a policy decides alike before and after it was in a file."""
    return Layer(tuple(map(tuple, np.round(weights, DIGITS).tolist())), tuple(np.round(bias, DIGITS).tolist()))


def _counted(devices: Sequence[str]) -> str:
    return ", ".join(f"{list(devices).count(kind)} × {kind}" for kind in dict.fromkeys(devices)) or "no devices"
