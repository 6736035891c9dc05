"""The graphs of draft heads: one layer around paged attention, with the features of the model whose tokens it guesses
as one more input. `decoder_inputs` says what goes in and comes out."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.openvino.decoder import DecoderBuilder, check_all_used
from penstock.engines.openvino.decoder_inputs import FEATURES
from penstock.engines.openvino.decoder_spec import DecoderSpec
from penstock.engines.openvino.graph_nodes import i64
from penstock.engines.openvino.lora import Projection
from penstock.engines.openvino.weights import Node, Weights

HeadGraph = tuple[ov.Model, dict[str, Projection]]
"""As of `build_decoder`: no adapter changes a draft head."""


def build_eagle3(
    spec: DecoderSpec, weights: Weights, precision: str, *, draft_vocab_size: int, norm_before_residual: bool
) -> HeadGraph:
    """EAGLE-3 (arXiv:2503.01840), as SGLang and vLLM compute its checkpoints: attention sees the embedding and the
    features side by side, each behind a norm of its own. `norm_before_residual`: what attention adds to is behind the
    norm, too."""
    model = _Eagle3(spec, weights, precision).eagle3(draft_vocab_size, norm_before_residual)
    check_all_used(spec, weights)
    return model, {}


def build_mtp(spec: DecoderSpec, weights: Weights, precision: str) -> HeadGraph:
    """The layer for multi-token prediction of MiMo's checkpoints: features and embedding, each behind a norm of its
    own, are projected to one hidden state."""
    model = _Mtp(spec, weights, precision).mtp()
    check_all_used(spec, weights)
    return model, {}


class _Head(DecoderBuilder):
    def _take_features(self) -> Node:
        """[T, hidden size]"""
        return self._add_input(FEATURES, np.float32, [-1, self._spec.hidden_size])


class _Eagle3(_Head):
    def eagle3(self, draft_vocab_size: int, norm_before_residual: bool) -> ov.Model:
        spec = self._spec
        self._begin()
        features = self._take_features()
        tokens = self._layer_norm(self._embed(), 0, "input_layernorm")
        normed = self._layer_norm(features, 0, "hidden_norm")
        y = self._attention(ops.concat([tokens, normed], 1), 0, 2 * spec.hidden_size)
        x = ops.add(normed if norm_before_residual else features, y)
        x = self._chosen(ops.add(x, self._mlp(self._layer_norm(x, 0, "post_attention_layernorm"), 0)))
        name = (spec.names.embedding if spec.tie_word_embeddings else spec.names.head) + ".weight"
        normed = self._norm(x, spec.names.norm, spec.hidden_size)
        logits = self._weights.project(normed, name, (draft_vocab_size, spec.hidden_size), is_head=True)
        return self._model(self._results(logits, x))


class _Mtp(_Head):
    def mtp(self) -> ov.Model:
        spec, hidden = self._spec, self._spec.hidden_size
        self._begin()
        features = self._layer_norm(self._take_features(), 0, "hidden_layernorm")
        # The first position has no token before it in training: its embedding counts as zero.
        later = ops.convert(ops.greater(self._inputs["position_ids"], i64(0)), "f32")
        tokens = ops.multiply(self._embed(), ops.unsqueeze(later, i64(1)))
        tokens = self._layer_norm(tokens, 0, "token_layernorm")
        prefix = f"{spec.names.layers}.0."
        x = self._linear(ops.concat([features, tokens], 1), prefix + "input_proj", hidden, 2 * hidden, False)
        x = self._layer_norm(self._chosen(self._layer(x, 0)), 0, "final_layernorm")
        return self._model(self._results(self._head(x), x))
