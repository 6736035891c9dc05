"""Drafts of the openvino runner: a second decoder that guesses for the model, or a draft head. Both have a KV cache of
the same blocks.

A head is opened before the model is loaded, whose graph gives it features, and loaded afterwards. Its graph is one
layer around paged attention, with these features as one more input. What config.json and the checkpoint say of EAGLE-3
heads is read in the layout that SpecForge, SGLang and vLLM share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.contract.loading import Report
from penstock.engines.errors import PenstockError, UnsupportedError
from penstock.engines.formats.model_files import exported_graph, read_json, weight_files
from penstock.engines.formats.model_settings import is_eagle3, text_settings
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.formats.safetensors_file import read_safetensors
from penstock.engines.kit.batch import Ints
from penstock.engines.kit.cache_size import max_model_len
from penstock.engines.kit.draft_model import DraftModel, HeadInputs
from penstock.engines.openvino.checkpoint import MTP_LAYERS, MTP_OF_QWEN, Checkpoint, full_name
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.decoder import DecoderBuilder, FeatureTap, check_all_used
from penstock.engines.openvino.decoder_inputs import FEATURES
from penstock.engines.openvino.decoder_spec import Attention, DecoderSpec
from penstock.engines.openvino.families import parse_config
from penstock.engines.openvino.family import in_gguf
from penstock.engines.openvino.graph_nodes import Node, i64
from penstock.engines.openvino.loading import (
    BuildGraph,
    BuiltDecoder,
    LoadedDecoder,
    built_decoder,
    load_decoder,
    open_built,
)
from penstock.engines.openvino.lora import Projection
from penstock.engines.openvino.weights import Weights, checkpoint_key

_FC = "fc.weight"
"""The matrix that makes features of hidden states. It is in the model's graph, so that a third of the numbers is kept.
"""


@dataclass(frozen=True)
class DraftHead:
    words: str
    """Its kind."""
    source: BuiltDecoder
    tap: FeatureTap
    """What it is given of the model."""
    token_ids: Ints | None = None
    """As `HeadInputs.token_ids`."""


def open_drafts(config: OpenVINOConfig, report: Report) -> DraftHead | None:
    """The draft head that the settings name; None: they name none. Of a draft model only config.json is read. Raises
    UnsupportedError where either does not go with the model."""
    if not _drafts(config):
        return None
    with _blamed_on_setting(config):
        _check_not_exported("the model", config.model_dir)
    settings = read_json(config.model_dir / "config.json")
    target = parse_config(settings, config.max_model_len)
    with _blamed_on_setting(config):
        _check_windows("the model", target)
        if config.draft_model_dir is None:
            return _open_mtp(config, settings, target, report)
        _check_not_exported("the draft model", config.draft_model_dir)
        settings = read_json(config.draft_model_dir / "config.json")
        if is_eagle3(settings):
            return _open_eagle3(config, config.draft_model_dir, settings, target, report)
        _check_draft_model(parse_config(settings), target)
    return None


def load_drafts(
    config: OpenVINOConfig, head: DraftHead | None, target: LoadedDecoder, report: Report
) -> LoadedDecoder | None:
    """`head`: what `open_drafts` gave. None where the settings name neither a head nor a draft model. Raises
    UnsupportedError for one that cannot be run beside the model."""
    if not _drafts(config):
        return None
    with _blamed_on_setting(config):
        if head is not None:
            source = head.source
        else:
            assert config.draft_model_dir is not None
            source = open_built(config, config.draft_model_dir, report, is_draft=True)
        draft = load_decoder(config, source, report)
        if draft.block_size != target.block_size:
            raise UnsupportedError(
                f"its KV cache has blocks of {draft.block_size} tokens, the model's of {target.block_size}"
            )
    return draft


def draft_model_of(
    decoder: LoadedDecoder, head: DraftHead | None, target: LoadedDecoder, num_blocks: int, max_tokens: int
) -> DraftModel:
    """With a KV cache of `num_blocks`, as the target has; `max_tokens`: most of a forward pass."""
    decoder.use_blocks(num_blocks)
    features = target.model.cache.features
    inputs = HeadInputs(features, head.token_ids) if head is not None and features is not None else None
    return DraftModel(decoder.model, decoder.block_size, num_blocks, decoder.source.model_len, max_tokens, inputs)


def _drafts(config: OpenVINOConfig) -> bool:
    return config.mtp or config.draft_model_dir is not None


@contextmanager
def _blamed_on_setting(config: OpenVINOConfig) -> Iterator[None]:
    """Errors name the setting that asks for guesses."""
    name, param = ("speculative=mtp", "speculative") if config.mtp else ("speculative-model", "speculative_model")
    try:
        yield
    except PenstockError as e:
        raise type(e)(f"{name}: {e.message}", param=param) from e


def _check_draft_model(draft: DecoderSpec, target: DecoderSpec) -> None:
    if draft.vocab_size != target.vocab_size:
        raise UnsupportedError(f"its vocabulary has {draft.vocab_size} tokens, the model's {target.vocab_size}")
    _check_windows("the draft model", draft)
    if draft.is_hybrid:
        raise UnsupportedError("the draft model has recurrent layers")


def _check_windows(words: str, spec: DecoderSpec) -> None:
    if any(spec.windows):
        raise UnsupportedError(f"{words} has layers with sliding windows")


def _check_not_exported(words: str, folder: Path) -> None:
    if exported_graph(folder) is not None:
        raise UnsupportedError(f"{words} is one that OpenVINO's tools exported")


def _open_eagle3(
    config: OpenVINOConfig, folder: Path, settings: Mapping[str, Any], target: DecoderSpec, report: Report
) -> DraftHead:
    """`settings`: the head's config.json. Where its checkpoint has no embeddings, or no matrix for logits, it has the
    model's. Raises UnsupportedError for one that does not go with the model, EngineError for a broken one."""
    spec = parse_eagle3(settings, target, config.max_model_len)
    token_ids = read_token_ids(folder, spec)
    checkpoint = Checkpoint(folder, eagle3_name, parse_scheme(settings))
    decoder, names = spec.decoder, spec.decoder.names
    if names.embedding + ".weight" not in checkpoint:
        _borrow(checkpoint, names.embedding, config, target, target.names.embedding, decoder)
    if not decoder.tie_word_embeddings and names.head + ".weight" not in checkpoint:
        head = target.names.embedding if target.tie_word_embeddings else target.names.head
        _borrow(checkpoint, names.head, config, target, head, decoder)
    shape = decoder.hidden_size, len(spec.layers) * target.hidden_size
    if checkpoint[_FC].shape != shape:
        raise UnsupportedError(
            f"tensor {_FC} has shape {checkpoint[_FC].shape}, the layers in config.json need {shape}"
        )
    build = partial(
        build_eagle3, draft_vocab_size=spec.draft_vocab_size, norm_before_residual=spec.norm_before_residual
    )
    source = _open_head(config, decoder, checkpoint, build, target, report)
    key = repr((spec.layers, checkpoint_key(source.numerics.weights, checkpoint)))
    tap = FeatureTap(spec.layers, decoder.hidden_size, partial(_combine, source.weights, shape), key)
    return DraftHead("EAGLE-3 head", source, tap, token_ids)


def _open_mtp(config: OpenVINOConfig, settings: Mapping[str, Any], target: DecoderSpec, report: Report) -> DraftHead:
    """Of the model's own checkpoint; `settings`: its config.json. Raises UnsupportedError where there is none."""
    settings = text_settings(settings)
    layout = next((_MTP[name] for name in settings["architectures"] if name in _MTP), None)
    if layout is None:
        named = str(settings["architectures"][0])[:50]
        raise UnsupportedError(f"no head of {named} is supported; those of MiMo, Qwen3.5 and Qwen3-Next are")
    if in_gguf(settings):
        raise UnsupportedError("heads in GGUF files are not supported")
    count = settings.get(layout.count, 1)
    if count != 1:
        raise UnsupportedError(f"config.json has {layout.count}={str(count)[:50]}; one layer is supported")
    names = replace(target.names, layers=layout.layers, norm=layout.norm)
    layer = next(layer for layer in target.layers if isinstance(layer.mixer, Attention))
    decoder = replace(target, layers=(layer,), further_layers=0, names=names)
    shared = (names.embedding + ".weight", names.head + ".weight")

    def rename(name: str) -> str | None:
        if name.startswith(layout.prefix):
            return name
        full = full_name(name)
        return full if full in shared else None

    checkpoint = Checkpoint(config.model_dir, rename, parse_scheme(settings))
    if layout.projection + ".weight" not in checkpoint:
        raise UnsupportedError(
            f"the checkpoint has no tensor {layout.projection}.weight: it was saved without its layer for multi-token "
            "prediction"
        )
    source = _open_head(config, decoder, checkpoint, partial(build_mtp, layout=layout), target, report)
    tap = FeatureTap((target.num_layers,), target.hidden_size, behind_norm=layout.behind_norm)
    return DraftHead("MTP head", source, tap)


def _open_head(
    config: OpenVINOConfig,
    decoder: DecoderSpec,
    checkpoint: Checkpoint,
    build: BuildGraph,
    target: DecoderSpec,
    report: Report,
) -> BuiltDecoder:
    model_len = max_model_len(config.max_model_len, target.max_position_embeddings)
    source = built_decoder(config, decoder, checkpoint, build, report, is_draft=True)
    return replace(source, model_len=model_len, feature_width=decoder.hidden_size)


def _combine(weights: Weights, shape: tuple[int, int], joined: Node) -> Node:
    return weights.project(joined, _FC, shape)


def _borrow(
    checkpoint: Checkpoint,
    name: str,
    config: OpenVINOConfig,
    target: DecoderSpec,
    target_name: str,
    decoder: DecoderSpec,
) -> None:
    if decoder.hidden_size != target.hidden_size:
        raise UnsupportedError(
            f"its checkpoint has no {name}.weight, and its hidden size of {decoder.hidden_size} is not the model's "
            f"{target.hidden_size}"
        )
    scheme = parse_scheme(read_json(config.model_dir / "config.json"))
    whole = Checkpoint(config.model_dir, full_name, scheme)
    checkpoint.borrow(name + ".weight", whole, target_name + ".weight")


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
    target_size = settings.get("target_hidden_size") or decoder.hidden_size
    if target_size != target.hidden_size:
        raise UnsupportedError(f"it is for hidden states of size {target_size}, the model's have {target.hidden_size}")
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
    layers, shift = (inner[key], 1) if inner.get(key) else (settings.get(key), 0)
    if not layers:
        if num_layers < _LEAST_LAYERS:
            raise UnsupportedError(f"its config.json has no {key}, and the model has fewer than {_LEAST_LAYERS} layers")
        return 2, num_layers // 2, num_layers - 3
    known = isinstance(layers, list) and all(type(n) is int and 0 <= n + shift <= num_layers for n in layers)
    if not known or sorted(set(layers)) != layers:
        raise UnsupportedError(
            f"{key}={str(layers)[:80]} is not a list of layers, in order, of a model of {num_layers}"
        )
    return tuple(n + shift for n in layers)


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


@dataclass(frozen=True)
class MtpLayout:
    """What a family's layer for multi-token prediction is called in the model's checkpoint, and what it is given."""

    prefix: str
    """Of all its tensors."""
    layers: str
    """As `TensorNames.layers`: it is number 0."""
    features_norm: str
    tokens_norm: str
    projection: str
    norm: str
    """The final one."""
    count: str
    """The setting that says how many such layers there are; without it there is one."""
    behind_norm: bool
    """As `FeatureTap.behind_norm`."""
    tokens_first: bool
    """In what is projected."""
    omits_first: bool
    """The embedding that goes with the first position counts as zero: in training it has no token before it."""


_MTP_MIMO = MtpLayout(
    prefix=f"{MTP_LAYERS}.0.",
    layers=MTP_LAYERS,
    features_norm=f"{MTP_LAYERS}.0.hidden_layernorm",
    tokens_norm=f"{MTP_LAYERS}.0.token_layernorm",
    projection=f"{MTP_LAYERS}.0.input_proj",
    norm=f"{MTP_LAYERS}.0.final_layernorm",
    count="num_nextn_predict_layers",
    behind_norm=False,
    tokens_first=False,
    omits_first=True,
)
_MTP_QWEN = MtpLayout(
    prefix=MTP_OF_QWEN,
    layers=f"{MTP_OF_QWEN}layers",
    features_norm=f"{MTP_OF_QWEN}pre_fc_norm_hidden",
    tokens_norm=f"{MTP_OF_QWEN}pre_fc_norm_embedding",
    projection=f"{MTP_OF_QWEN}fc",
    norm=f"{MTP_OF_QWEN}norm",
    count="mtp_num_hidden_layers",
    behind_norm=True,
    tokens_first=True,
    omits_first=False,
)
_MTP = {
    "MiMoForCausalLM": _MTP_MIMO,
    "Qwen3_5ForCausalLM": _MTP_QWEN,
    "Qwen3_5MoeForCausalLM": _MTP_QWEN,
    "Qwen3NextForCausalLM": replace(_MTP_QWEN, count="num_nextn_predict_layers"),
}
"""By the language model's architecture, as vLLM reads and computes them."""


def build_mtp(spec: DecoderSpec, weights: Weights, precision: str, *, layout: MtpLayout) -> HeadGraph:
    """A layer for multi-token prediction: features and embedding, each behind a norm of its own, are projected to one
    hidden state."""
    model = _Mtp(spec, weights, precision).mtp(layout)
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
        y = self._attention.layer(ops.concat([tokens, normed], 1), 0, 2 * spec.hidden_size)
        x = ops.add(normed if norm_before_residual else features, y)
        x = self._chosen(ops.add(x, self._parts.mlp(self._layer_norm(x, 0, "post_attention_layernorm"), 0)))
        name = (spec.names.embedding if spec.tie_word_embeddings else spec.names.head) + ".weight"
        normed = self._parts.norm(x, spec.names.norm, spec.hidden_size)
        logits = self._weights.project(normed, name, (draft_vocab_size, spec.hidden_size), is_head=True)
        return self._model(self._results(logits, x))


class _Mtp(_Head):
    def mtp(self, layout: MtpLayout) -> ov.Model:
        spec, hidden = self._spec, self._spec.hidden_size
        self._begin()
        features, tokens = self._take_features(), self._embed()
        if layout.omits_first:
            later = ops.convert(ops.greater(self._inputs["position_ids"], i64(0)), "f32")
            tokens = ops.multiply(tokens, ops.unsqueeze(later, i64(1)))
        both = [
            self._parts.norm(features, layout.features_norm, hidden),
            self._parts.norm(tokens, layout.tokens_norm, hidden),
        ]
        joined = ops.concat(both[::-1] if layout.tokens_first else both, 1)
        x = self._parts.linear(joined, layout.projection, hidden, 2 * hidden, False)
        x = self._parts.norm(self._chosen(self._layer(x, 0)), spec.names.norm, hidden)
        return self._model(self._results(self._head(x), x))
