"""A transformers model that computes steps over a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.engines.torch.attention import attach
from penstock.engines.torch.kv_cache import KVCache
from penstock.engines.torch.paged import PagedAttention
from penstock.engines.torch.step import Step


class PagedModel:
    """`model` has been found fit for it by `probe.inspect_layers`."""

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self._model = model
        self._attention = PagedAttention(cache)
        attach(model, self._attention)

    @torch.inference_mode()
    def compute(self, step: Step, wanted: Tensor) -> Tensor:
        """Logits [N, vocab] of the tokens whose indices are `wanted` [N], on the device, in f32."""
        self._attention.step = step
        output = self._model(
            input_ids=step.token_ids[None],
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=wanted,
        )
        logits: Tensor = output.logits[0].float()
        return logits
