"""The graph of an ensemble as its configuration describes it: plain data, checked by itself.

Steps are models, edges are ensemble tensors. A tensor is an input of the ensemble or the output of exactly one step; an
output of the ensemble may be either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import InvalidRequestError

PLATFORM = "ensemble"

V = TypeVar("V")
"""A tensor on its way."""


@dataclass(frozen=True, slots=True)
class Step:
    index: int
    """Its place in the configuration, from 0."""
    model: str
    version: int
    """-1: the newest that serves."""
    inputs: Mapping[str, str]
    """The ensemble tensor of each input of the model."""
    outputs: Mapping[str, str]
    """The ensemble tensor of each output that is used."""

    def __str__(self) -> str:
        return f"step {self.index} (model '{self.model}')"


@dataclass(frozen=True, slots=True)
class EnsemblePlan:
    name: str
    steps: Sequence[Step]
    inputs: Sequence[str]
    outputs: Sequence[str]
    producers: Mapping[str, Step]
    """By tensor; the ensemble's inputs have none."""

    def needed(self, outputs: Iterable[str]) -> tuple[Step, ...]:
        """The steps without which these outputs cannot be computed, in the order of the configuration."""
        indices: set[int] = set()
        tensors = list(outputs)
        while tensors:
            step = self.producers.get(tensors.pop())
            if step is not None and step.index not in indices:
                indices.add(step.index)
                tensors += step.inputs.values()
        return tuple(step for step in self.steps if step.index in indices)

    @property
    def models(self) -> frozenset[str]:
        """The names of the models that the steps run."""
        return frozenset(step.model for step in self.steps)


def is_ensemble(config: ModelConfig) -> bool:
    return bool(config.platform == PLATFORM) or bool(config.HasField("ensemble_scheduling"))


def make_plan(config: ModelConfig) -> EnsemblePlan:
    """Raises InvalidRequestError, which names the edge, for a graph that no request could pass through: in Triton's
    words, where they name it too."""
    name = config.name
    steps = [_step(index, step, name) for index, step in enumerate(config.ensemble_scheduling.step)]
    if not steps:
        raise InvalidRequestError(f"must specify 'step' for ensemble '{name}'")
    inputs = [tensor.name for tensor in config.input]
    outputs = [tensor.name for tensor in config.output]
    plan = EnsemblePlan(name, steps, inputs, outputs, _producers(steps, inputs, name))
    _check_produced(plan)
    _check_used(plan)
    _check_no_cycle(plan)
    return plan


def _step(index: int, step: Any, ensemble: str) -> Step:
    for field in ("model_name", "input_map", "output_map"):
        if not getattr(step, field):
            raise InvalidRequestError(f"must specify '{field}' in step {index} of ensemble '{ensemble}'")
    if step.model_version < -1 or not step.model_version:
        raise InvalidRequestError(
            f"model_version in step {index} of ensemble '{ensemble}' must be a version or -1 for the newest"
        )
    return Step(index, step.model_name, step.model_version, _sorted(step.input_map), _sorted(step.output_map))


def _sorted(mapping: Mapping[str, str]) -> dict[str, str]:
    """Maps of protobuf have a different order in each process."""
    return dict(sorted(mapping.items()))


def _producers(steps: Sequence[Step], inputs: Sequence[str], name: str) -> dict[str, Step]:
    producers: dict[str, Step] = {}
    for step in steps:
        for tensor in step.outputs.values():
            if tensor in inputs:
                raise InvalidRequestError(
                    f"ensemble tensor '{tensor}' of ensemble '{name}' is an input of it and an output of {step}"
                )
            if tensor in producers:
                raise InvalidRequestError(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}': it is an"
                    f" output of {producers[tensor]} and of {step}"
                )
            producers[tensor] = step
    return producers


def _check_produced(plan: EnsemblePlan) -> None:
    for step in plan.steps:
        for model_input, tensor in step.inputs.items():
            if tensor not in plan.producers and tensor not in plan.inputs:
                raise InvalidRequestError(
                    f"ensemble tensor '{tensor}', for input '{model_input}' of {step}, is neither an input of ensemble"
                    f" '{plan.name}' nor an output of a step"
                )
    for output in plan.outputs:
        if output not in plan.producers and output not in plan.inputs:
            raise InvalidRequestError(f"output '{output}' for ensemble '{plan.name}' is not written by a step")


def _check_used(plan: EnsemblePlan) -> None:
    used = {tensor for step in plan.steps for tensor in step.inputs.values()}
    for name in plan.inputs:
        if name not in used:
            raise InvalidRequestError(f"ensemble input '{name}' for ensemble '{plan.name}' is not used")
    for tensor, step in plan.producers.items():
        if tensor not in used and tensor not in plan.outputs:
            raise InvalidRequestError(
                f"ensemble tensor '{tensor}' is unused in ensemble '{plan.name}': it is an output of {step}"
            )


def _check_no_cycle(plan: EnsemblePlan) -> None:
    """Takes away what can run until nothing is left; what stays waits for itself."""
    left = {step.index: step for step in plan.steps}
    known = set(plan.inputs)
    while left:
        ready = [step for step in left.values() if known.issuperset(step.inputs.values())]
        if not ready:
            raise InvalidRequestError(f"the steps of ensemble '{plan.name}' wait for each other: {_cycle(plan, left)}")
        for step in ready:
            known.update(step.outputs.values())
            del left[step.index]


def _cycle(plan: EnsemblePlan, left: Mapping[int, Step]) -> str:
    """`step 0 (model 'a') <- 'x' <- step 1 (model 'b') <- 'y' <- step 0 (model 'a')`: from each step of `left` an edge
    leads back to another of them, so that following edges ends where the path has been."""
    path: list[tuple[Step, str]] = []
    step = next(iter(left.values()))
    while step.index not in [seen.index for seen, _ in path]:
        tensor = next(t for t in step.inputs.values() if t in plan.producers and plan.producers[t].index in left)
        path.append((step, tensor))
        step = plan.producers[tensor]
    start = [seen.index for seen, _ in path].index(step.index)
    return "".join(f"{seen} <- '{tensor}' <- " for seen, tensor in path[start:]) + str(step)


class Selection:
    """Steps that run together, and which of their tensors are results; shared by all requests that want the same."""

    def __init__(self, steps: Sequence[Step], results: Iterable[str]) -> None:
        self.steps = tuple(steps)
        self.results = tuple(results)
        self.consumers: dict[str, list[Step]] = {}
        self.missing: dict[int, int] = {}
        """How many tensors each step waits for at the beginning."""
        for step in self.steps:
            tensors = set(step.inputs.values())
            self.missing[step.index] = len(tensors)
            for tensor in tensors:
                self.consumers.setdefault(tensor, []).append(step)
        self.uses = {tensor: len(steps) for tensor, steps in self.consumers.items()}
        for tensor in self.results:
            self.uses[tensor] = self.uses.get(tensor, 0) + 1


class Flow(Generic[V]):
    """One pass through a selection: which steps can run, and which tensors are still needed."""

    def __init__(self, selection: Selection) -> None:
        self.tensors: dict[str, V] = {}
        self._consumers = selection.consumers
        self._missing = selection.missing.copy()
        self._uses = selection.uses.copy()

    def put(self, tensors: Mapping[str, V]) -> list[Step]:
        """These tensors are there now. Returns the steps that can run because of it."""
        ready = []
        for name, value in tensors.items():
            if name in self._uses:
                self.tensors[name] = value
            for step in self._consumers.get(name, ()):
                self._missing[step.index] -= 1
                if not self._missing[step.index]:
                    ready.append(step)
        return ready

    def take(self, step: Step) -> dict[str, V]:
        """The inputs of a step that can run, by the ensemble's names. What no other step needs is let go of."""
        values = {}
        for name in set(step.inputs.values()):
            values[name] = self.tensors[name]
            self._uses[name] -= 1
            if not self._uses[name]:
                del self.tensors[name]
        return values
