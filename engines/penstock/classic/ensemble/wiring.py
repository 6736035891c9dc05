"""A plan together with the models that it names: do they fit, and through which steps does each response go?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.classic.base import InferModel
from penstock.classic.ensemble.plan import EnsemblePlan, Selection, Step
from penstock.classic.model_config import DataType, ModelConfig, ModelInput, ModelOutput
from penstock.engines.errors import InvalidRequestError, PenstockError

_MAX_ROUTES = 64
"""Sets of requested outputs whose routes are kept."""


@dataclass(frozen=True, slots=True)
class EnsembleStage:
    """Steps that run once for the same response: those of the first stage for the request, those of the next one for
    each response of the stage's decoupled step. The last stage has none, and its results are the ensemble's outputs.

    There is at most one decoupled step in a stage, and it is the last that runs there: every step leads to an output,
    and all outputs come from the same decoupled step.
    """

    selection: Selection
    """Without the decoupled step; the results are its inputs."""
    stream: Step | None


@dataclass(slots=True, eq=False)
class Wiring:
    plan: EnsemblePlan
    decoupled: frozenset[int]
    """Indices of the steps whose models are decoupled."""
    unary: bool
    """Every model gives exactly one response where it is asked with `infer`."""
    _regions: Mapping[int, int]
    """By step: the decoupled step whose responses it takes, -1 for the request itself."""
    _all: Selection
    _routes: dict[frozenset[str], tuple[Selection, Sequence[EnsembleStage]]] = field(default_factory=dict)

    def selection(self, outputs: Sequence[str]) -> Selection:
        """All steps for these outputs (empty: all outputs), each to be run once."""
        return self._chosen(outputs)[0] if outputs else self._all

    def stages(self, outputs: Sequence[str]) -> Sequence[EnsembleStage]:
        """The same steps, divided at the decoupled ones."""
        return self._chosen(outputs)[1]

    def _chosen(self, outputs: Sequence[str]) -> tuple[Selection, Sequence[EnsembleStage]]:
        results = frozenset(outputs or self.plan.outputs)
        route = self._routes.get(results)
        if route is None:
            if len(self._routes) >= _MAX_ROUTES:
                self._routes.clear()
            steps = self.plan.needed(results)
            route = self._routes[results] = (Selection(steps, results), list(self._divided(steps, results)))
        return route

    def _divided(self, steps: Sequence[Step], outputs: frozenset[str]) -> Iterator[EnsembleStage]:
        region: int | None = -1
        while region is not None:
            own = [step for step in steps if self._regions[step.index] == region]
            stream = next((step for step in own if step.index in self.decoupled), None)
            results = outputs if stream is None else frozenset(stream.inputs.values())
            yield EnsembleStage(Selection([step for step in own if step is not stream], results), stream)
            region = None if stream is None else stream.index


def wire(plan: EnsemblePlan, config: ModelConfig, find: Callable[[Step], InferModel]) -> Wiring:
    """`find` gives a step's model and raises PenstockError when there is none.

    Raises InvalidRequestError, with the edge and in Triton's words, when something does not fit.
    """
    models = {step.index: _model_of(plan, step, find) for step in plan.steps}
    known = _ensemble_tensors(plan, config)
    for step in plan.steps:
        other = models[step.index].config
        if 0 < other.max_batch_size < config.max_batch_size:
            raise InvalidRequestError(
                f"ensemble {plan.name} allows maximum batch size {config.max_batch_size}, but it contains model"
                f" {step.model} which only allows maximum batch size to be {other.max_batch_size}"
            )
        _check_inputs(plan, step, other, known)
        _check_outputs(plan, step, other, known)
    decoupled = frozenset(index for index, model in models.items() if model.signature.decoupled)
    if decoupled and config.response_cache.enable:
        raise InvalidRequestError(
            f"Response Cache does not currently support model {plan.name} with 'Decoupled' transaction policy. Please"
            " disable the response cache."
        )
    return Wiring(
        plan=plan,
        decoupled=decoupled,
        unary=all(model.takes_infer for model in models.values()),
        _regions=_regions(plan, decoupled),
        _all=Selection(plan.steps, plan.outputs),
    )


def _model_of(plan: EnsemblePlan, step: Step, find: Callable[[Step], InferModel]) -> InferModel:
    try:
        return find(step)
    except PenstockError as error:
        missing = (
            "which has no loaded version"
            if step.version == -1
            else f"whose required version {step.version} is not loaded"
        )
        raise InvalidRequestError(f"ensemble '{plan.name}' depends on '{step.model}' {missing}") from error


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor as one model describes it."""

    model: str
    data_type: int
    dims: tuple[int, ...]
    batched: bool

    @property
    def full(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.batched else self.dims


def _ensemble_tensors(plan: EnsemblePlan, config: ModelConfig) -> dict[str, _Known]:
    """An output may be an input, which is passed through. Raises InvalidRequestError where its descriptions differ."""
    tensors: dict[str, _Known] = {}
    for tensor in (*config.input, *config.output):
        dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
        here = _Known(config.name, tensor.data_type, tuple(dims), config.max_batch_size > 0)
        _check_same(plan, tensor.name, here, tensors)
    return tensors


def _check_inputs(plan: EnsemblePlan, step: Step, config: ModelConfig, known: dict[str, _Known]) -> None:
    inputs = {tensor.name: tensor for tensor in config.input}
    for name, tensor in step.inputs.items():
        if name not in inputs:
            raise InvalidRequestError(
                f"in ensemble {plan.name}, ensemble tensor {tensor} is mapping to non-existing input {name} in model"
                f" {step.model}"
            )
        _check_same(plan, tensor, _described(inputs[name], config), known)
    for name, described in inputs.items():
        if name not in step.inputs and not described.optional:
            raise InvalidRequestError(
                f"in ensemble {plan.name}, input {name} in model {step.model} is not mapped to any ensemble tensors"
            )


def _check_outputs(plan: EnsemblePlan, step: Step, config: ModelConfig, known: dict[str, _Known]) -> None:
    outputs = {tensor.name: tensor for tensor in config.output}
    for name, tensor in step.outputs.items():
        if name not in outputs:
            raise InvalidRequestError(
                f"in ensemble {plan.name}, ensemble tensor {tensor} is mapped from non-existing output {name} in model"
                f" {step.model}"
            )
        _check_same(plan, tensor, _described(outputs[name], config), known)


def _described(tensor: ModelInput | ModelOutput, config: ModelConfig) -> _Known:
    return _Known(config.name, tensor.data_type, tuple(tensor.dims), config.max_batch_size > 0)


def _check_same(plan: EnsemblePlan, tensor: str, here: _Known, known: dict[str, _Known]) -> None:
    """Against the first description of the tensor. Batched and other models may be mixed where the full shapes fit."""
    first = known.setdefault(tensor, here)
    start = f"in ensemble {plan.name}, ensemble tensor {tensor}: inconsistent"
    if first.data_type != here.data_type:
        types = [DataType.Name(known_tensor.data_type) for known_tensor in (first, here)]
        raise InvalidRequestError(
            f"{start} data type: {types[0]} is inferred from model {first.model} while {types[1]} is inferred from"
            f" model {here.model}"
        )
    if not shapes_fit(first.dims, here.dims) and not shapes_fit(first.full, here.full):
        raise InvalidRequestError(
            f"{start} shape: {_shown(first.full)} is inferred from model {first.model} while {_shown(here.full)} is"
            f" inferred from model {here.model}"
        )


def shapes_fit(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a tensor can have both shapes; -1 stands for any size."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _shown(dims: Iterable[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"


def _regions(plan: EnsemblePlan, decoupled: frozenset[int]) -> dict[int, int]:
    """As Triton has it, all inputs of a step come from the same decoupled step, or all from none: nothing tells which
    response of one belongs to which of another. The same holds for the outputs of the ensemble."""
    numbers: dict[int, int] = {}
    while len(numbers) < len(plan.steps):
        for step in plan.steps:
            producers = [plan.producers.get(tensor) for tensor in step.inputs.values()]
            if step.index in numbers or any(
                producer is not None and producer.index not in numbers for producer in producers
            ):
                continue
            regions = {_region_after(producer, numbers, decoupled) for producer in producers}
            if len(regions) > 1:
                raise InvalidRequestError(
                    f"in ensemble {plan.name}, {step} receives inputs originated from different decoupled models:"
                    f" {_origins(plan, step.inputs.values(), numbers, decoupled)}"
                )
            [numbers[step.index]] = regions
    if len({_region_after(plan.producers.get(tensor), numbers, decoupled) for tensor in plan.outputs}) > 1:
        raise InvalidRequestError(
            f"in ensemble {plan.name}, the outputs originate from different decoupled models:"
            f" {_origins(plan, plan.outputs, numbers, decoupled)}"
        )
    return numbers


def _region_after(step: Step | None, regions: Mapping[int, int], decoupled: frozenset[int]) -> int:
    """Where the outputs of a step belong; None: the inputs of the ensemble."""
    if step is None:
        return -1
    return step.index if step.index in decoupled else regions[step.index]


def _origins(plan: EnsemblePlan, tensors: Iterable[str], regions: Mapping[int, int], decoupled: frozenset[int]) -> str:
    origins = []
    for tensor in tensors:
        region = _region_after(plan.producers.get(tensor), regions, decoupled)
        origins.append(f"'{tensor}' from {'the request' if region < 0 else plan.steps[region]}")
    return ", ".join(origins)
