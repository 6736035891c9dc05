"""Families of decoders some of whose layers have recurrent states in place of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import (
    DecoderSpec,
    DeltaNames,
    GatedDelta,
    LayerNorms,
    Mixer,
    ShortConvolution,
    TensorNames,
)
from penstock.engines.openvino.families_dense import NORMS_BEHIND
from penstock.engines.openvino.families_experts import experts_of, layers_with_experts, size_of_expert
from penstock.engines.openvino.family import (
    Settings,
    changed,
    count,
    family,
    filled,
    in_gguf,
    kinds_of_layers,
    mixed,
    plain,
    positive,
    renamed,
    rotated_by_window,
    windowed,
)
from penstock.engines.openvino.rope import parse_ropes_of_layer_types, settings_in

_LFM2_NAMES = TensorNames(
    norm="model.embedding_norm",
    o="out_proj",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    mlp="feed_forward",
    gate_up=("w1", "w3"),
    down="w2",
)
_LFM2_NORMS = LayerNorms("operator_norm", "", "ffn_norm")
_LARGEST_SIZE = 1024
"""Several times that of any known model: of a kernel, a head, and of how many heads there are."""


@family("Lfm2ForCausalLM")
def lfm2(c: Settings) -> DecoderSpec:
    """Each layer has attention or a short convolution."""
    c = renamed(c, intermediate_size="block_ff_dim")
    return _lfm2(changed(c, {"intermediate_size": _mlp_size(c)}))


@family("Lfm2MoeForCausalLM")
def lfm2_moe(c: Settings) -> DecoderSpec:
    """With experts behind the first layers: sigmoids are weights; corrected, they choose."""
    c = filled(
        c,
        num_dense_layers=2,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=1792,
        norm_topk_prob=True,
        use_expert_bias=True,
        routed_scaling_factor=1.0,
    )
    spec, dense = _lfm2(c), count(c, "num_dense_layers")
    size = size_of_expert(c, "moe_intermediate_size")
    experts = experts_of(spec, c, size, normalized=bool(c["norm_topk_prob"]))
    experts = replace(experts, scores="sigmoid", least_sum=_LEAST_SUM, scale=positive(c, "routed_scaling_factor"))
    names = replace(_LFM2_NAMES, correction="expert_bias" if c["use_expert_bias"] else "")
    spec = mixed(spec, experts, [n >= dense for n in range(c["num_hidden_layers"])])
    return replace(spec, names=names)


_LEAST_SUM = 1e-6


def _lfm2(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=8,
        max_position_embeddings=128000,
        norm_eps=1e-5,
        rope_theta=1e6,
        conv_L_cache=3,
        tie_word_embeddings=c.get("tie_embedding", True),
    )
    spec = plain(c, eps_key="norm_eps")
    spec = spec.with_attention(qk_norm="each head", qkv_bias=False, o_bias=False).with_layers(norms=_LFM2_NORMS)
    convolution = ShortConvolution(small_size(c, "conv_L_cache"), bool(c.get("conv_bias")))
    return replace(with_recurrent(spec, _lfm2_kinds(c), "conv", convolution), names=_LFM2_NAMES)


@family("Lfm3ForCausalLM")
def lfm3(c: Settings) -> DecoderSpec:
    """With windows in some layers, norms behind parts, and a gate of each head. Layers without a window turn half of
    the pairs of a head."""
    c = filled(
        c,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=128000,
        norm_eps=1e-5,
        conv_L_cache=7,
        sliding_window=256,
        use_sandwich_norm=True,
        use_attention_gate=True,
        tie_word_embeddings=True,
    )
    spec, kinds = plain(c, eps_key="norm_eps", rotates=False), _lfm3_kinds(c)
    spec = windowed(spec, [_window(c) if kind == "sliding_attention" else 0 for kind in kinds])
    head_dim = spec.attention[0].head_dim
    spec = rotated_by_window(spec, c, parse_ropes_of_layer_types(c, head_dim, _LFM3_ROPE))
    spec = spec.with_attention(qk_norm="each head", gates_heads=bool(c["use_attention_gate"]))
    norms = LayerNorms("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
    spec = spec.with_layers(norms=norms if c["use_sandwich_norm"] else _LFM2_NORMS)
    convolution = ShortConvolution(small_size(c, "conv_L_cache"), bool(c.get("conv_bias")))
    names = replace(_LFM2_NAMES, o="o_proj", q_norm="q_norm", k_norm="k_norm")
    return replace(with_recurrent(spec, kinds, "conv", convolution), names=names)


_LFM3_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _lfm3_kinds(c: Settings) -> list[str]:
    """conv, full_attention or sliding_attention, of each layer."""
    kinds, layers = c.get("layer_types"), c["num_hidden_layers"]
    if kinds is None:
        usual = ("sliding_attention", "conv", "full_attention", "conv")
        kinds = [usual[n % 4] if n else "conv" for n in range(layers)]
    return layers_with_attention(kinds, layers, "conv", "sliding_attention")


def _window(c: Settings) -> int:
    if not c["sliding_window"]:
        raise UnsupportedError("layer_types has sliding_attention, but no sliding window is switched on")
    window: int = c["sliding_window"]
    return window


def with_recurrent(spec: DecoderSpec, kinds: Sequence[str], kind: str, mixer: Mixer) -> DecoderSpec:
    """With `mixer` in the layers of this kind."""
    chosen = zip(kinds, spec.layers, strict=True)
    layers = [replace(layer, mixer=mixer) if its_kind == kind else layer for its_kind, layer in chosen]
    return replace(spec, layers=tuple(layers))


def _mlp_size(c: Settings) -> int | None:
    """Two thirds of what is set, times a factor, and up to the next multiple."""
    c = filled(c, block_auto_adjust_ff_dim=True, block_ffn_dim_multiplier=1.0, block_multiple_of=256)
    size: int | None = c["intermediate_size"]
    if size is None or not c["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if c["block_ffn_dim_multiplier"] is None:
        return size
    multiple = math.ceil(positive(c, "block_multiple_of"))
    return -(-int(positive(c, "block_ffn_dim_multiplier") * size) // multiple) * multiple


def _lfm2_kinds(c: Settings) -> list[str]:
    """conv or full_attention, of each layer."""
    layers, kinds, attends = c["num_hidden_layers"], c.get("layer_types"), c.get("full_attn_idxs")
    if kinds is None:
        numbers = attends if isinstance(attends, list) else range(layers)
        kinds = ["full_attention" if n in numbers else "conv" for n in range(layers)]
    return layers_with_attention(kinds, layers, "conv")


def layers_with_attention(kinds: Any, layers: int, *allowed: str) -> list[str]:
    """As `kinds_of_layers`; some have attention."""
    known = kinds_of_layers(kinds, layers, *allowed)
    if "full_attention" not in known:
        raise UnsupportedError("no layer has full_attention: a model of recurrent layers alone is not supported")
    return known


def small_size(c: Settings, key: str) -> int:
    """Of a kernel or a head, or how many heads there are."""
    size = c[key]
    if type(size) is not int or not 1 <= size <= _LARGEST_SIZE:
        raise UnsupportedError(
            f"config.json has {key}={str(size)[:50]}, which is not a number from 1 to {_LARGEST_SIZE}"
        )
    return size


@family("Qwen3_5ForCausalLM")
def qwen3_5(c: Settings) -> DecoderSpec:
    """Three gated delta nets, then attention with a gate, of which a quarter of each head rotates."""
    return _qwen(filled(c, num_key_value_heads=4, linear_num_value_heads=32))


@family("Qwen3_5MoeForCausalLM")
def qwen3_5_moe(c: Settings) -> DecoderSpec:
    c = filled(c, num_key_value_heads=2, num_experts=256, num_experts_per_tok=8)
    return _qwen_mixed(c, normalized=True)


@family("Qwen3NextForCausalLM")
def qwen3_next(c: Settings) -> DecoderSpec:
    """Matrices of its delta nets are ordered by head of keys, but for those of GGUF files."""
    c = filled(c, num_key_value_heads=2, num_experts=512, num_experts_per_tok=10, norm_topk_prob=True)
    spec = _qwen_mixed(c, normalized=bool(c["norm_topk_prob"]))
    if in_gguf(c):
        return _with_deltas(spec, tiled=False)
    names = DeltaNames(qkv=("in_proj_qkvz",), beta="in_proj_ba")
    return _with_deltas(spec, names=names, by_key_head=True)


def _qwen_mixed(c: Settings, normalized: bool) -> DecoderSpec:
    """A mixture with an expert that every token has, by a share of its own, in each layer, or in those that
    decoder_sparse_step and mlp_only_layers say."""
    c = filled(c, moe_intermediate_size=512, shared_expert_intermediate_size=512)
    c = filled(c, decoder_sparse_step=1, intermediate_size=c["moe_intermediate_size"])
    spec = _qwen(c)
    experts = experts_of(spec, c, size_of_expert(c, "moe_intermediate_size"), normalized=normalized)
    shared = replace(experts.expert, intermediate_size=size_of_expert(c, "shared_expert_intermediate_size"))
    return mixed(spec, replace(experts, shared=shared), layers_with_experts(c))


def _qwen(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        head_dim=256,
        max_position_embeddings=32768,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        partial_rotary_factor=0.25,
    )
    spec = plain(c, may_be_partial=True).with_attention(qk_norm="each head", gated=True)
    delta = replace(_delta(c), tiled=in_gguf(c))
    further = count(filled(c, num_nextn_predict_layers=0), "num_nextn_predict_layers")
    spec = with_recurrent(spec, _qwen_kinds(c), "linear_attention", delta)
    return replace(spec, norm_offset=1.0, further_layers=further)


@family("OlmoHybridForCausalLM")
def olmo_hybrid(c: Settings) -> DecoderSpec:
    """Norms are behind the parts of layers with attention, and before those of delta nets. A rope_theta of null: no
    layer rotates."""
    c = filled(
        c,
        num_key_value_heads=None,
        max_position_embeddings=65536,
        linear_conv_kernel_dim=4,
        linear_allow_neg_eigval=True,
    )
    rope = settings_in(c, "rope_parameters")
    rotates = rope.get("rope_theta", c.get("rope_theta", 0)) is not None
    spec = plain(c, rotates=rotates).with_layers(norms=NORMS_BEHIND).with_attention(qk_norm="all heads")
    heads = _whole(c, linear_num_key_heads=c["num_attention_heads"], linear_num_value_heads=c["num_attention_heads"])
    keys = _whole(heads, linear_key_head_dim=int(0.75 * c["hidden_size"] / small_size(heads, "linear_num_key_heads")))
    delta = _delta(_whole(keys, linear_value_head_dim=2 * small_size(keys, "linear_key_head_dim")))
    delta = replace(delta, names=_OLMO_NAMES, norm_eps=1e-5, strength=2.0 if c["linear_allow_neg_eigval"] else 1.0)
    spec = with_recurrent(spec, _olmo_kinds(c), "linear_attention", delta)
    layers = [replace(layer, norms=LayerNorms()) if layer.mixer is delta else layer for layer in spec.layers]
    return replace(spec, layers=tuple(layers))


_OLMO_NAMES = DeltaNames(
    qkv=("q_proj", "k_proj", "v_proj"),
    gate="g_proj",
    beta="b_proj",
    decay="a_proj",
    convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
    norm="o_norm",
    out="o_proj",
)


def _olmo_kinds(c: Settings) -> list[str]:
    """linear_attention or full_attention, of each layer: by default each fourth, or the last one."""
    kinds, layers = c.get("layer_types"), c["num_hidden_layers"]
    if kinds is None:
        kinds = ["full_attention" if n % 4 == 3 or n == layers - 1 < 3 else "linear_attention" for n in range(layers)]
    return layers_with_attention(kinds, layers, "linear_attention")


def _whole(c: Settings, **defaults: int) -> Settings:
    """With what a setting means when it is null, too."""
    return {**c, **{key: value for key, value in defaults.items() if c.get(key) is None}}


def _delta(c: Settings) -> GatedDelta:
    key_heads, heads, key_dim, value_dim, kernel = (small_size(c, f"linear_{name}") for name in _DELTA_SIZES)
    delta = GatedDelta(key_heads, heads, key_dim, value_dim, kernel)
    if delta.value_heads % delta.key_heads:
        raise UnsupportedError(f"{delta.value_heads} heads of values do not go together with {delta.key_heads} of keys")
    return delta


def _with_deltas(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    """Fields of all delta nets changed."""
    layers = [
        replace(layer, mixer=replace(layer.mixer, **changes)) if isinstance(layer.mixer, GatedDelta) else layer
        for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


_DELTA_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


def _qwen_kinds(c: Settings) -> list[str]:
    """linear_attention or full_attention, of each layer."""
    if c.get("layer_types") is not None:
        return layers_with_attention(c["layer_types"], c["num_hidden_layers"], "linear_attention")
    every = small_size(c, "full_attention_interval")
    kinds = ["linear_attention" if (n + 1) % every else "full_attention" for n in range(c["num_hidden_layers"])]
    return layers_with_attention(kinds, len(kinds), "linear_attention")
