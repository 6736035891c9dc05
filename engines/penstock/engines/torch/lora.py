"""LoRA adapters beside the base model: each token of a step gets what its request's adapter adds to a layer.

    y[rows] += (x[rows] @ A.T) @ (scaling * B).T

in the precision of the model, for each adapter of the step. Forward hooks do it, which are there only while a step has
such tokens: other steps cost what they cost without LoRA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.errors import AlreadyExistsError, InvalidRequestError, OverloadedError, UnsupportedError
from penstock.engines.formats.adapter_files import LowRank, read_adapter
from penstock.engines.torch.lora_targets import Target

Ints = npt.NDArray[np.int64]


class Adapters:
    """Has AdapterHost's two verbs, and adds the adapters of one step at a time to the layers' outputs."""

    def __init__(self, targets: Mapping[str, Target], max_loras: int, max_rank: int, device: torch.device) -> None:
        """`targets` by path; max_loras 0: no LoRA."""
        self._targets = targets
        self._device = device
        self._max_loras = max_loras
        self._max_rank = max_rank
        self._loaded: dict[str, dict[Target, tuple[Tensor, Tensor]]] = {}
        self._keys: dict[int, str] = {}
        """Of the live requests that have an adapter."""
        self._rows: dict[str, Tensor | None] = {}
        """Which of the step's tokens are an adapter's; None: all."""
        self._wanted_rows: dict[str, Tensor | None] = {}
        """The same among the tokens whose logits are wanted."""
        self._hooks: list[RemovableHandle] = []

    @property
    def reserved_bytes(self) -> int:
        """What all slots take if each holds an adapter of the highest rank for every layer."""
        sizes = ((target.inputs + target.outputs) * target.weight.itemsize for target in self._targets.values())
        return self._max_loras * self._max_rank * sum(sizes)

    def load(self, key: str, folder: Path) -> None:
        """All of it or nothing (`AdapterHost.load_adapter`)."""
        if not self._max_loras:
            raise UnsupportedError("This model was loaded without LoRA: --lora and --lora-directory turn it on.")
        if key in self._loaded:
            raise AlreadyExistsError("An adapter with this key is loaded already.")
        if len(self._loaded) >= self._max_loras:
            raise OverloadedError(f"All {self._max_loras} slots for LoRA adapters are taken (--max-loras).")
        layers = read_adapter(folder, self._max_rank)
        targets = {path: self._target(path, layer) for path, layer in layers.items()}
        self._loaded[key] = {target: _tensors(path, layers[path], target) for path, target in targets.items()}
        self._unhook()  # its layers may not be among those that are hooked now

    def unload(self, key: str) -> None:
        self._loaded.pop(key, None)
        self._unhook()

    def apply(self, step: SchedulerOutput) -> None:
        """Takes in whose requests come and go."""
        for request_id in step.dropped_ids:
            self._keys.pop(request_id, None)
        self._keys.update((request.id, request.adapter) for request in step.new_requests if request.adapter)

    def failures(self, request_ids: Sequence[int]) -> dict[int, str]:
        """Of these requests, those whose adapter is not here, with a message each."""
        if not self._keys:
            return {}
        lost = [i for i in request_ids if i in self._keys and self._keys[i] not in self._loaded]
        return dict.fromkeys(lost, "the request's LoRA adapter is not loaded")

    def forget_requests(self) -> None:
        self._keys.clear()

    def choose(self, request_ids: Sequence[int], owners: Ints, wanted: Ints) -> None:
        """What the next pass computes: `owners` [T], the index among `request_ids` of each token's request; `wanted`
        [N], the tokens whose logits are kept."""
        keys = [self._keys.get(i, "") for i in request_ids] if self._keys else []
        used = sorted(self._loaded.keys() & set(keys))
        if not used:
            self._unhook()
            return
        mine = {key: np.array([other == key for other in keys]) for key in used}
        self._rows = {key: self._places(of[owners]) for key, of in mine.items()}
        self._wanted_rows = {key: self._places(of[owners[wanted]]) for key, of in mine.items()}
        if not self._hooks:
            targets = {target for layers in self._loaded.values() for target in layers}
            self._hooks = [target.module.register_forward_hook(partial(self._add, target)) for target in targets]

    def _target(self, path: str, layer: LowRank) -> Target:
        target = self._targets.get(path)
        if target is None:
            raise InvalidRequestError(f"the model has no linear layer {path[:200]} that an adapter could change")
        if (layer.a.shape[1], layer.b.shape[0]) != (target.inputs, target.outputs):
            raise InvalidRequestError(
                f"the adapter's {path} has {layer.a.shape[1]} inputs and {layer.b.shape[0]} outputs, the model's has "
                f"{target.inputs} and {target.outputs}"
            )
        return target

    def _places(self, mine: npt.NDArray[np.bool_]) -> Tensor | None:
        return None if mine.all() else torch.from_numpy(np.flatnonzero(mine)).to(self._device)

    def _add(self, target: Target, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """A forward hook. Inputs and outputs are [..., size], of all tokens or of the wanted ones, in their order."""
        inputs, outputs = args[0].flatten(0, -2), output.view(-1, target.outputs)
        for key, rows in (self._wanted_rows if target.after_choice else self._rows).items():
            pair = self._loaded[key].get(target)
            if pair is None:
                continue
            a, b = pair
            if rows is None:
                outputs += inputs @ a @ b
            else:
                outputs.index_add_(0, rows, inputs[rows] @ a @ b)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _tensors(path: str, layer: LowRank, target: Target) -> tuple[Tensor, Tensor]:
    """A.T [inputs, rank] and (scaling * B).T [rank, outputs], where and as the layer's weight is."""
    weight = target.weight
    a = torch.from_numpy(layer.a.f32()).to(weight)
    b = (torch.from_numpy(layer.b.f32()) * layer.scaling).to(weight)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise InvalidRequestError(f"the adapter's {path} is not finite in the model's precision")
    return a.T, b.T
