"""Draft heads: their graphs, and what config.json and the checkpoint say of EAGLE-3's, in the layout that SpecForge,
SGLang and vLLM share.

A graph is one layer around paged attention, with the features of the model whose tokens it guesses as one more input.
`decoder_inputs` says what goes in and comes out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.model_files import weight_files
from penstock.engines.formats.safetensors_file import read_safetensors
from penstock.engines.kit.batch import Ints
from penstock.engines.openvino.checkpoint import full_name
from penstock.engines.openvino.decoder import DecoderBuilder, check_all_used
from penstock.engines.openvino.decoder_inputs import FEATURES
from penstock.engines.openvino.decoder_spec import DecoderSpec
from penstock.engines.openvino.families import parse_config
from penstock.engines.openvino.graph_nodes import i64
from penstock.engines.openvino.lora import Projection
from penstock.engines.openvino.weights import Node, Weights

_MAPS = ("d2t", "t2d")
"""What to add to a number among the draft vocabulary for the token's id, and which tokens are among it."""
_LEAST_LAYERS = 7
"""Of a model whose low, middle and high layer by the rule are three."""


@dataclass(frozen=True)
class Eagle3Spec:
    decoder: DecoderSpec
    """Of its one layer."""
    draft_vocab_size: int
    """Tokens that it can guess."""
    norm_before_residual: bool
    layers: tuple[int, ...]
    """Its features are made of the model's hidden states behind so many layers."""


def parse_eagle3(settings: Mapping[str, Any], target: DecoderSpec, max_model_len: int | None) -> Eagle3Spec:
    """`settings` is config.json; `target`: the model whose tokens it guesses. Raises UnsupportedError for a head that
    does not go with it, or that computes something else than `build_eagle3`."""
    if "transformer_layer_config" in settings:
        raise UnsupportedError("EAGLE-3 heads in the layout of the speculators library are not supported")
    decoder = parse_config({**settings, "architectures": ["LlamaForCausalLM"]}, max_model_len)
    if decoder.num_layers != 1:
        raise UnsupportedError(f"only single-layer EAGLE-3 heads are supported, not {decoder.num_layers} layers")
    if settings.get("sliding_window") and settings.get("use_sliding_window") is not False:
        raise UnsupportedError("EAGLE-3 heads with a sliding window are not supported")
    if decoder.vocab_size != target.vocab_size:
        raise UnsupportedError(f"its vocabulary has {decoder.vocab_size} tokens, the model's {target.vocab_size}")
    given = settings.get("target_hidden_size") or decoder.hidden_size
    if given != target.hidden_size:
        raise UnsupportedError(f"it is for hidden states of size {given}, the model's have {target.hidden_size}")
    draft_vocab_size = settings.get("draft_vocab_size") or decoder.vocab_size
    if type(draft_vocab_size) is not int or not 0 < draft_vocab_size <= target.vocab_size:
        raise UnsupportedError(f"draft_vocab_size={str(draft_vocab_size)[:50]} is not from 1 to {target.vocab_size}")
    return Eagle3Spec(
        decoder, draft_vocab_size, bool(settings.get("norm_before_residual")), _layers(settings, target.num_layers)
    )


def eagle3_name(name: str) -> str | None:
    """Of a tensor, as a decoder has it; None for the maps of the draft vocabulary."""
    name = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
    return None if name in _MAPS else full_name(name)


def read_token_ids(folder: Path, spec: Eagle3Spec) -> Ints | None:
    """The token that each of its logits is for; None: the token with this number. Raises UnsupportedError for a
    map that is not there or not right."""
    for path in weight_files(folder):
        tensors, _ = read_safetensors(path, lambda name: name.removeprefix("model.") == _MAPS[0], quantized=True)
        for name, tensor in tensors.items():
            if tensor.dtype not in ("I64", "I32") or tensor.shape != (spec.draft_vocab_size,):
                raise UnsupportedError(
                    f"tensor {name} has {tensor.dtype} {tensor.shape}; a number for each of the "
                    f"{spec.draft_vocab_size} tokens of draft_vocab_size should be there"
                )
            ids: Ints = np.arange(spec.draft_vocab_size) + tensor.integers().astype(np.int64)
            if ids.min() < 0 or ids.max() >= spec.decoder.vocab_size:
                raise UnsupportedError(f"tensor {name} leads to tokens that the vocabulary does not have")
            return ids
    if spec.draft_vocab_size != spec.decoder.vocab_size:
        raise UnsupportedError(f"the checkpoint has no tensor {_MAPS[0]}, which says what its tokens are")
    return None


def _layers(settings: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """In eagle_config, as SpecForge writes it, 0 is the first layer's output; at the top level, as vLLM reads it, it is
    the first layer's input. Without either: a low, a middle and a high layer, as all of them choose these."""
    key = "eagle_aux_hidden_state_layer_ids"
    inner = settings.get("eagle_config") or {}
    if not isinstance(inner, Mapping) or inner.get("use_aux_hidden_state") is False:
        raise UnsupportedError("EAGLE-3 heads that get the last hidden state alone are not supported")
    found, shift = (inner[key], 1) if inner.get(key) else (settings.get(key), 0)
    if not found:
        if num_layers < _LEAST_LAYERS:
            raise UnsupportedError(f"its config.json has no {key}, and the model has fewer than {_LEAST_LAYERS} layers")
        return 2, num_layers // 2, num_layers - 3
    right = isinstance(found, list) and all(type(n) is int and 0 <= n + shift <= num_layers for n in found)
    if not right or sorted(set(found)) != found:
        raise UnsupportedError(f"{key}={str(found)[:80]} is not a list of layers, in order, of a model of {num_layers}")
    return tuple(n + shift for n in found)


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
