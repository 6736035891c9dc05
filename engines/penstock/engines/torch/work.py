"""What a step reads and computes, counted in the loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.engines.contract.model_info import ModelWork
from penstock.engines.torch.device import NAMES
from penstock.engines.torch.kv_cache import LayerLayout, groups_of


def count_work(model: PreTrainedModel, layouts: Sequence[LayerLayout], threads: int) -> ModelWork | None:
    """None for a model with experts: which of its weights a step reads depends on the tokens."""
    if any(parameter.ndim > 2 or ".experts." in name for name, parameter in model.named_parameters()):
        return None
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    precision = NAMES[model.dtype]
    matrices = [(module is head, weight) for module in model.modules() if (weight := _matrix(module)) is not None]
    query_heads = int(model.config.get_text_config().num_attention_heads)
    groups = [[layouts[n] for n in group.layers] for group in groups_of(layouts)]
    return ModelWork(
        weight_bytes=sum(weight.numel() * weight.element_size() for _, weight in matrices),
        token_flops=sum(2 * weight.numel() for is_head, weight in matrices if not is_head),
        logits_flops=sum(2 * weight.numel() for is_head, weight in matrices if is_head),
        kv_bytes=tuple(sum(layout.token_bytes for layout in group) for group in groups),
        attention_flops=tuple(
            sum(2 * query_heads * (layout.key_size + layout.value_size) for layout in group) for group in groups
        ),
        weights=precision,
        activations=precision,
        precision=precision,
        threads=((0, threads),) if model.device.type == "cpu" else (),
    )


def _matrix(module: nn.Module) -> Tensor | None:
    """What it multiplies by; an embedding is looked up."""
    weight = None if isinstance(module, nn.Embedding) else getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.ndim == 2 else None
