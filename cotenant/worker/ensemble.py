"""Describe ensembles of the model repository: models that a request passes through in sequence or in parallel.

As in Triton, `ensemble_scheduling` in config.pbtxt lists the steps, and each step maps the names of its model's tensors
to names that the ensemble gives them. A step comes after those whose outputs it takes. Where the ensemble takes no
batches and the model of a step does, the step runs for each row of what it takes, as for each object that was found in
a picture. Here all of that is looked at before anything is served, and a mistake is said with the file and the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from cotenant.core.application import MAX_REQUESTS, Application, Fixed, Poisson, Stage
from cotenant.core.tensor import ModelInfo, TensorSpec
from cotenant.errors import ModelError, PlanError
from cotenant.worker.repository import CONFIG, EnsembleStep, Entry, check_config_matches, read_labels

ITEMS = "items"
NESTED = "it is an ensemble itself; list its steps instead"


class EnsembleStage(msgspec.Struct, frozen=True):
    """Describe one run of a model, or one per row. inputs, outputs: the model's name of a tensor → the ensemble's."""

    name: str
    model: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    after: tuple[str, ...]
    each: bool = False


class Ensemble(msgspec.Struct, frozen=True):
    """Describe an ensemble. items: rows to plan for where a step runs per row."""

    info: ModelInfo
    steps: tuple[EnsembleStage, ...]
    items: float = 1.0

    @property
    def models(self) -> set[str]:
        return {step.model for step in self.steps}

    def application(self, slo: float, attainment: float = 0.99, priority: int = 1) -> Application:
        """Return the ensemble as planners and the dispatcher know it."""
        stages = tuple(
            Stage(
                name=step.name,
                model=step.model,
                after=step.after,
                fanout=Poisson(self.items) if step.each else Fixed(),
                counted=step.each,
            )
            for step in self.steps
        )
        return Application(name=self.info.name, slo=slo, attainment=attainment, priority=priority, stages=stages)


def describe_ensemble(entry: Entry, infos: Mapping[str, ModelInfo], broken: Mapping[str, str]) -> Ensemble:
    """Describe an ensemble. infos: of the models that can be served, by name. broken: why others cannot.

    Raises ModelError with the file and the key for steps whose models or tensors do not fit.
    """
    if entry.reason:
        raise ModelError(entry.reason)
    return _Reader(entry, infos, broken).ensemble()


class _Reader:
    def __init__(self, entry: Entry, infos: Mapping[str, ModelInfo], broken: Mapping[str, str]) -> None:
        self.entry = entry
        self.place = entry.folder / CONFIG
        scheduling = entry.config.ensemble_scheduling
        self.steps: Sequence[EnsembleStep] = scheduling.step if scheduling else ()
        self.infos = [self._info(number, step, infos, broken) for number, step in enumerate(self.steps)]

    def _info(
        self, number: int, step: EnsembleStep, infos: Mapping[str, ModelInfo], broken: Mapping[str, str]
    ) -> ModelInfo:
        name = step.model_name
        if name not in infos:
            reason = broken.get(name, "the repository has no such model; put it there, or correct the name")
            raise self._error(f"step[{number}].model_name", f"{name!r} cannot be served: {reason}")
        if step.model_version not in (-1, int(infos[name].version)):
            raise self._error(
                f"step[{number}].model_version",
                f"{step.model_version} of {name!r} is not served, {infos[name].version} is; name that, or -1",
            )
        return infos[name]

    def _error(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.place}: ensemble_scheduling.{key}: {what}")

    def ensemble(self) -> Ensemble:
        given = {tensor.name for tensor in self.entry.config.input}
        made = self._made(given)
        rows = self._rows()
        takers: dict[str, TensorSpec] = {}
        for number, (step, info) in enumerate(zip(self.steps, self.infos, strict=True)):
            key = f"step[{number}].input_map"
            for spec in info.inputs:
                if spec.name not in step.input_map:
                    raise self._error(key, f"lacks input {spec.name!r} of {info.name!r}; map it to a tensor")
            for name, tensor in step.input_map.items():
                spec = self._of(info.inputs, name, f"{info.name!r} has no input", key)
                source = made.get(tensor) or takers.setdefault(tensor, spec)
                if tensor not in given and tensor not in made:
                    raise self._error(
                        key, f"nothing makes {tensor!r}; it is not an input of the ensemble, nor of any output_map"
                    )
                if not _fit(source, spec, 1 if rows or info.max_batch_size else 0):
                    raise self._error(
                        key,
                        f"{tensor!r} is {source.datatype} {list(source.shape)}, but {info.name!r} takes"
                        f" {spec.datatype} {list(spec.shape)} as {name!r}",
                    )
        unused = given - takers.keys()
        if unused:
            raise ModelError(f"{self.place}: input {sorted(unused)[0]!r} is used by no step; map it, or remove it")
        outputs = {}
        for wanted in self.entry.config.output:
            if wanted.name not in made:
                raise ModelError(f"{self.place}: output {wanted.name!r} is made by no step; name it in an output_map")
            outputs[wanted.name] = made[wanted.name]
        for kind, specs in (("input", takers), ("output", outputs)):
            if not specs:
                raise ModelError(f"{self.place}: an ensemble needs an {kind}; list at least one")
        config, lead = self.entry.config, 1 if rows else 0
        info = ModelInfo(
            name=self.entry.name,
            version=self.entry.version,
            platform=self.entry.platform,
            inputs=check_config_matches(self.entry, "input", config.input, _named(takers), lead),
            outputs=check_config_matches(self.entry, "output", config.output, _named(outputs), lead),
            max_batch_size=rows,
            labels={name: found for name in outputs if (found := read_labels(self.entry, name))},
        )
        steps = self._ordered(made)
        self._check_each([step for step in steps if step.each], steps, made)
        return Ensemble(info, steps, self._items())

    def _made(self, given: set[str]) -> dict[str, TensorSpec]:
        """Return what steps make, by the ensemble's names."""
        made: dict[str, TensorSpec] = {}
        for number, (step, info) in enumerate(zip(self.steps, self.infos, strict=True)):
            key = f"step[{number}].output_map"
            if not step.output_map:
                raise self._error(key, f"takes nothing from {info.name!r}; map one of its outputs, or drop the step")
            for name, tensor in step.output_map.items():
                spec = self._of(info.outputs, name, f"{info.name!r} has no output", key)
                if tensor in made or tensor in given:
                    raise self._error(key, f"{tensor!r} is made twice; give one of them another name")
                made[tensor] = spec
        return made

    def _of(self, specs: Iterable[TensorSpec], name: str, what: str, key: str) -> TensorSpec:
        for spec in specs:
            if spec.name == name:
                return spec
        raise self._error(key, f"{what} {name!r}; it has {', '.join(spec.name for spec in specs)}")

    def _rows(self) -> int:
        """Return the ensemble's largest batch: no step takes more."""
        least = min(self.infos, key=lambda info: info.max_batch_size)
        asked = self.entry.config.max_batch_size
        if asked is not None and asked > least.max_batch_size:
            raise ModelError(
                f"{self.place}: max_batch_size {asked}, but {least.name!r} takes {least.max_batch_size}; write no more"
            )
        if asked == 0 and least.max_batch_size:
            raise ModelError(
                f"{self.place}: max_batch_size 0, but its steps take batches; write 1 to {least.max_batch_size}"
            )
        return asked or least.max_batch_size

    def _check_each(
        self, each: Iterable[EnsembleStage], steps: Sequence[EnsembleStage], made: Mapping[str, TensorSpec]
    ) -> None:
        """Check that the rows that a step runs for come from one output of one step, and that they are joined there
        again."""
        alike = "set max_batch_size in the config.pbtxt of all alike"
        for step in each:
            batches = f"{step.model!r} takes batches and the ensemble does not, so that it runs for each row"
            if len(step.after) != 1 or any(tensor not in made for tensor in step.inputs.values()):
                raise ModelError(f"{self.place}: {batches}; let all that it takes come from one step, or {alike}")
            later = next((other.model for other in steps if step.name in other.after), "")
            if later:
                raise ModelError(f"{self.place}: {batches}, and {later!r} cannot come after that; {alike}")
            texts = next((tensor for tensor in step.inputs.values() if made[tensor].datatype == "BYTES"), "")
            if texts:
                raise ModelError(
                    f"{self.place}: {batches}; {texts!r} is of BYTES, whose rows are not taken apart; {alike}"
                )

    def _items(self) -> float:
        """Return the rows to plan for, from `parameters`."""
        given = self.entry.config.parameters.get(ITEMS)
        if given is None:
            return 1.0
        try:
            items = float(given.string_value)
        except ValueError:
            items = 0.0
        if not 0 < items <= MAX_REQUESTS:
            raise ModelError(
                f"{self.place}: parameters {ITEMS!r}: {given.string_value!r} is not a number of rows; write how many"
                f" there are on average, up to {MAX_REQUESTS}"
            )
        return items

    def _ordered(self, made: Mapping[str, TensorSpec]) -> tuple[EnsembleStage, ...]:
        """Return the steps, each after those that make its inputs. A model's second step has a number appended to its
        name."""
        names: list[str] = []
        for step in self.steps:
            again = sum(other.model_name == step.model_name for other in self.steps[: len(names)])
            names.append(f"{step.model_name} {again + 1}" if again else step.model_name)
        maker = {
            tensor: name for step, name in zip(self.steps, names, strict=True) for tensor in step.output_map.values()
        }
        steps = {
            name: EnsembleStage(
                name,
                step.model_name,
                step.input_map,
                step.output_map,
                tuple(dict.fromkeys(maker[tensor] for tensor in step.input_map.values() if tensor in made)),
                each=bool(info.max_batch_size) and not all(other.max_batch_size for other in self.infos),
            )
            for step, name, info in zip(self.steps, names, self.infos, strict=True)
        }
        try:
            order = Ensemble(_NOTHING, tuple(steps.values())).application(1.0).order
        except PlanError as error:
            raise self._error("step", str(error).partition(": ")[2]) from None
        return tuple(steps[stage.name] for stage in order)


_NOTHING = ModelInfo(name="ensemble", version="", platform="", inputs=(), outputs=(), max_batch_size=0)


def _named(specs: Mapping[str, TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, spec.datatype, spec.shape) for name, spec in specs.items())


def _fit(made: TensorSpec, taken: TensorSpec, lead: int) -> bool:
    """Return whether the output of one model fits the input of another, apart from rows."""
    if made.datatype != taken.datatype or len(made.shape) != len(taken.shape):
        return False
    pairs = zip(made.shape[lead:], taken.shape[lead:], strict=True)
    return all(-1 in pair or pair[0] == pair[1] for pair in pairs)
