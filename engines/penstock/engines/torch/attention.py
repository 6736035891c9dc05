"""The attention function that transformers' models call: who answers is written on the modules themselves.

A module is looked up and not a global, so that several models can live in one process.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "penstock_paged"
"""Its name in transformers. It has no mask function there: such attention is given no mask and makes its own."""

_HANDLER = "penstock_attention"


class AttentionHandler(Protocol):
    """Answers the attention calls of a model's layers."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """query [1, heads, T, head_size], key and value [1, kv_heads, T, size]; gives [1, T, heads, value_size].

        `options`: what else the model passes, by transformers' names.
        """
        ...


def register() -> None:
    AttentionInterface.register(ATTENTION, _dispatch)


def attach(model: nn.Module, handler: AttentionHandler) -> None:
    """From now on `handler` answers for all of the model's layers."""
    for module in model.modules():
        setattr(module, _HANDLER, handler)


def _dispatch(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    handler: AttentionHandler = getattr(module, _HANDLER)
    return handler.attend(module, query, key, value, attention_mask, options), None
