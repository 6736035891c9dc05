"""LoRA adapters beside the base model: each token of a step gets what its request's adapter adds to a layer.

    y[rows] += (x[rows] @ A.T) @ (scaling * B).T

in the precision of the model, for each adapter of the step. Forward hooks do it, which are there only while a step has
such tokens: other steps cost what they cost without LoRA.

An adapter may change linear layers that see each token of a step once. As with attention (`probe`), a model is watched
while it runs: the inputs of an expert, or of a layer that is called twice, are not the step's tokens, and an adapter's
rows could not be told among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from penstock.engines.errors import InvalidRequestError
from penstock.engines.formats.adapter_files import LowRank, read_adapter
from penstock.engines.kit.adapter_slots import AdapterSlots, fitting_layers
from penstock.engines.kit.batch import Ints


@dataclass(frozen=True, slots=True, eq=False)
class LoraTarget:
    """A linear layer of `inputs` -> `outputs`."""

    module: nn.Module
    inputs: int
    outputs: int
    after_choice: bool
    """It sees only the tokens whose logits are wanted, in their order: the output layer."""

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.module.weight  # type: ignore[assignment]
        return weight


@dataclass
class Watch:
    """What the linear layers have seen, pass by pass."""

    layers: dict[str, nn.Module]
    passes: list[tuple[int, int]] = field(default_factory=list)
    """(tokens, tokens whose logits were wanted)"""
    rows: dict[str, list[int]] = field(default_factory=dict)

    def targets(self) -> dict[str, LoraTarget]:
        """By path."""
        targets = {}
        for path, module in self.layers.items():
            rows = self.rows.get(path)
            if rows in ([tokens for tokens, _ in self.passes], [kept for _, kept in self.passes]):
                after_choice = rows != [tokens for tokens, _ in self.passes]
                targets[path] = LoraTarget(module, *_sizes(module), after_choice)
        return targets


@contextmanager
def watch(model: PreTrainedModel) -> Iterator[Watch]:
    """Whatever the model computes meanwhile is noted."""
    layers: dict[str, nn.Module] = {
        path: module for path, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)
    }
    noted = Watch(layers)

    def note_pass(module: nn.Module, args: Any, options: dict[str, Any]) -> None:
        tokens, kept = options["input_ids"].numel(), options.get("logits_to_keep")
        noted.passes.append((tokens, tokens if kept is None else len(kept)))

    def note_rows(path: str, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args:
            noted.rows.setdefault(path, []).append(args[0].numel() // args[0].shape[-1])

    hooks = [model.register_forward_pre_hook(note_pass, with_kwargs=True)]
    hooks += [module.register_forward_pre_hook(partial(note_rows, path)) for path, module in layers.items()]
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


def _sizes(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs); transformers' Conv1D, of GPT-2, keeps its weight the other way round."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


Layers = dict[LoraTarget, tuple[Tensor, Tensor]]
"""An adapter's matrices (`_tensors`) for each layer that it changes."""


@dataclass(frozen=True, slots=True)
class UsedAdapter:
    """An adapter of a step. It stays whole if the adapter is unloaded meanwhile."""

    slot: int
    layers: Layers
    rows: Tensor | None
    """Which of the step's tokens are its own; None: all."""
    wanted_rows: Tensor | None
    """The same among the tokens whose logits are wanted."""


class TorchAdapters:
    """Has AdapterHost's verbs, and adds the adapters of one step at a time to the layers' outputs.

    `use` belongs to the thread that computes; everything else may be called while that thread is at a step.
    """

    def __init__(self, targets: Mapping[str, LoraTarget], max_loras: int, max_rank: int, device: torch.device) -> None:
        """`targets` by path; max_loras 0: no LoRA."""
        self._targets = targets
        self._device = device
        self._max_loras = max_loras
        self._max_rank = max_rank
        self._slots = AdapterSlots[int](
            max_loras,
            no_lora="This model was loaded without LoRA: --lora and --lora-directory turn it on.",
            all_taken=f"All {max_loras} slots for LoRA adapters are taken (--max-loras).",
        )
        self._layers: dict[int, Layers] = {}
        """Of the adapters that are loaded, by slot."""
        self._used: dict[int, UsedAdapter] = {}
        """Those of the pass that is being computed, by slot."""
        self._hooks: list[RemovableHandle] = []

    @property
    def reserved_bytes(self) -> int:
        """What all slots take if each holds an adapter of the highest rank for every layer."""
        sizes = ((target.inputs + target.outputs) * target.weight.itemsize for target in self._targets.values())
        return self._max_loras * self._max_rank * sum(sizes)

    def prepare(self, key: str, folder: Path) -> Layers:
        """`AdapterHost.prepare_adapter`. UnsupportedError when the model was loaded without room for adapters."""
        self._slots.check_free(key)
        layers = fitting_layers(read_adapter(folder, self._max_rank), self._targets)
        return {self._targets[path]: _tensors(path, layer, self._targets[path]) for path, layer in layers.items()}

    def install(self, key: str, layers: Layers) -> None:
        """`AdapterHost.install_adapter`."""
        slot = self._slots.new_number()
        self._slots.hold(key, slot)
        self._layers[slot] = layers

    def unload(self, key: str) -> None:
        self._layers.pop(self._slots.held.pop(key, 0), None)

    def slot(self, key: str) -> int | None:
        """`Model.adapter_slot`."""
        return self._slots.held.get(key)

    def choose(self, slots: Ints, owners: Ints, logits_at: Ints) -> list[UsedAdapter]:
        """What a pass is to use: `slots` [S] of its requests; `owners` [T], the request of each token; `logits_at` [N],
        the tokens whose logits are kept."""
        mine = {slot: slots == slot for slot in np.unique(slots[slots > 0]).tolist()}
        return [
            UsedAdapter(slot, self._layers[slot], self._places(of[owners]), self._places(of[owners[logits_at]]))
            for slot, of in mine.items()
        ]

    def use(self, chosen: list[UsedAdapter]) -> None:
        """From now on passes use these."""
        used = {adapter.slot: adapter for adapter in chosen}
        if used.keys() != self._used.keys():
            for hook in self._hooks:
                hook.remove()
            targets = {target for adapter in chosen for target in adapter.layers}
            self._hooks = [target.module.register_forward_hook(partial(self._add, target)) for target in targets]
        self._used = used

    def _places(self, mine: npt.NDArray[np.bool_]) -> Tensor | None:
        return None if mine.all() else torch.from_numpy(np.flatnonzero(mine)).to(self._device)

    def _add(self, target: LoraTarget, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """A forward hook. Inputs and outputs are [..., size], of all tokens or of the wanted ones, in their order."""
        inputs, outputs = args[0].flatten(0, -2), output.view(-1, target.outputs)
        for adapter in self._used.values():
            pair = adapter.layers.get(target)
            if pair is None:
                continue
            a, b = pair
            rows = adapter.wanted_rows if target.after_choice else adapter.rows
            if rows is None:
                outputs += inputs @ a @ b
            else:
                outputs.index_add_(0, rows, inputs[rows] @ a @ b)


def _tensors(path: str, layer: LowRank, target: LoraTarget) -> tuple[Tensor, Tensor]:
    """A.T [inputs, rank] and (scaling * B).T [rank, outputs], where and as the layer's weight is."""
    weight = target.weight
    a = torch.from_numpy(layer.a.f32()).to(weight)
    b = (torch.from_numpy(layer.b.f32()) * layer.scaling).to(weight)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise InvalidRequestError(f"the adapter's {path} is not finite in the model's precision")
    return a.T, b.T
