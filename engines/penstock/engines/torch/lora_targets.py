"""Which layers of a model an adapter may change: linear ones that see each token of a step once.

As with attention (`probe`), a model is not asked but watched while it runs: the inputs of an expert, or of a layer that
is called twice, are not the step's tokens, and an adapter's rows could not be told among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True, slots=True, eq=False)
class Target:
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

    def targets(self) -> dict[str, Target]:
        """By path."""
        found = {}
        for path, module in self.layers.items():
            seen = self.rows.get(path)
            if seen in ([tokens for tokens, _ in self.passes], [wanted for _, wanted in self.passes]):
                after_choice = seen != [tokens for tokens, _ in self.passes]
                found[path] = Target(module, *_sizes(module), after_choice)
        return found


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
