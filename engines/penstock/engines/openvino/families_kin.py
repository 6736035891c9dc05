"""Families of decoders with one MLP in each layer that are near kin of Llama: rotation, norms, windows or the MLP
differ."""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import DecoderSpec, LayerNorms, QueryGrowth, TensorNames
from penstock.engines.openvino.families_dense import ONE_NORM, llama, mistral
from penstock.engines.openvino.family import (
    LIMIT,
    Settings,
    all_but_every_nth,
    changed,
    family,
    filled,
    growing,
    layers_by_type,
    plain,
    positive,
    rotating,
    windowed,
    with_limit,
)
from penstock.engines.openvino.rope import settings_in

_GROWTH = "llama_4_scaling_beta"
_ORIGINAL = "original_max_position_embeddings"
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    _ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _GROWTH: 0.1,
}


@family("Ministral3ForCausalLM")
def ministral3(c: Settings) -> DecoderSpec:
    """Queries grow beyond the original context, in all layers."""
    c = filled(c, sliding_window=None, head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5)
    rope = dict(settings_in(c, "rope_parameters") or settings_in(c, "rope_scaling") or _MINISTRAL3_ROPE)
    beta = rope.pop(_GROWTH, None)
    spec = mistral(changed(c, {"rope_parameters": rope}))
    if not beta:
        return spec
    original = rope.get(_ORIGINAL)
    if type(original) is not int or original < 1:
        raise UnsupportedError(f"config.json has {_GROWTH}, and {_ORIGINAL}={str(original)[:50]}")
    growth = QueryGrowth(original, positive({_GROWTH: beta}, _GROWTH), 0)
    return growing(spec, growth, [True] * spec.num_layers)


@family("MinistralForCausalLM")
def ministral(c: Settings) -> DecoderSpec:
    spec = mistral(c)
    if c.get("layer_types") is None:
        return spec
    return windowed(spec, layers_by_type(c["layer_types"], spec.num_layers, max(spec.windows)))


@family("GlmForCausalLM")
def glm(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-7,
        partial_rotary_factor=0.5,
        attention_bias=True,
    )
    spec = plain(c, may_be_partial=True).with_attention(o_bias=False, alternating_pairs=True)
    return replace(spec, names=TensorNames(gate_up=("gate_up_proj",)))


@family("Glm4ForCausalLM")
def glm4(c: Settings) -> DecoderSpec:
    norms = LayerNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return glm(c).with_layers(norms=norms)


@family("Ernie4_5ForCausalLM")
def ernie4_5(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        tie_word_embeddings=True,
    )
    bias = bool(c.get("use_bias"))
    return plain(c).with_attention(qkv_bias=bias, o_bias=bias, alternating_pairs=True).with_mlp(bias=bias)


@family("HunYuanDenseV1ForCausalLM")
def hunyuan(c: Settings) -> DecoderSpec:
    spec = plain(with_ntk_alpha(filled(c, max_position_embeddings=2048, rms_norm_eps=1e-5)))
    names = TensorNames(q_norm="query_layernorm", k_norm="key_layernorm")
    return replace(spec.with_attention(qk_norm="each head, rotated"), names=names)


def with_ntk_alpha(c: Settings) -> Settings:
    """Hunyuan calls a base that is stretched once and for all "dynamic"."""
    rope = settings_in(c, "rope_parameters") or settings_in(c, "rope_scaling")
    if "dynamic" not in (rope.get("rope_type"), rope.get("type")) or not rope.get("alpha"):
        return c
    dim = c.get("head_dim") or c["hidden_size"] // (c["num_attention_heads"] or 1)
    theta = {"rope_theta": 10000.0, **c, **rope}
    stretched = positive(theta, "rope_theta") * positive(rope, "alpha") ** (dim / max(dim - 2, 1))
    return changed(c, {"rope_parameters": {"rope_type": "default", "rope_theta": stretched}})


@family("SeedOssForCausalLM")
def seed_oss(c: Settings) -> DecoderSpec:
    c = filled(c, num_key_value_heads=8, head_dim=128, max_position_embeddings=524288, attention_bias=True)
    return llama(c).with_attention(o_bias=bool(c.get("attention_out_bias")))


@family("CohereForCausalLM", known=("use_qk_norm",))
def cohere(c: Settings) -> DecoderSpec:
    c = filled(c, rope_theta=5e5, use_qk_norm=False)
    return _cohere(c).with_attention(qk_norm="each head, own weights" if c["use_qk_norm"] else "")


@family("Cohere2ForCausalLM")
def cohere2(c: Settings) -> DecoderSpec:
    """Layers with windows rotate, the others do not. Size of a head: that of the hidden state, divided."""
    c = changed(filled(c, sliding_window=4096, sliding_window_pattern=4), {"head_dim": None})
    spec = windowed(_cohere(c), all_but_every_nth(c))
    return rotating(spec, c, [bool(window) for window in spec.windows])


def _cohere(c: Settings) -> DecoderSpec:
    c = filled(c, max_position_embeddings=8192, layer_norm_eps=1e-5, logit_scale=0.0625, tie_word_embeddings=True)
    spec = plain(c, eps_key="layer_norm_eps").with_attention(alternating_pairs=True)
    spec = spec.with_layers(norms=ONE_NORM, parallel=True)
    return replace(spec, norm="layer without bias", logits_scale=positive(c, "logit_scale"))


@family("NemotronForCausalLM")
def nemotron(c: Settings) -> DecoderSpec:
    c = filled(c, hidden_act="relu2", max_position_embeddings=4096, norm_eps=1e-5, partial_rotary_factor=0.5)
    spec = _of_two_matrices(plain(c, eps_key="norm_eps", may_be_partial=True), c)
    return replace(spec, norm="layer", norm_offset=1.0)


@family("ArceeForCausalLM")
def arcee(c: Settings) -> DecoderSpec:
    c = filled(c, hidden_act="relu2", max_position_embeddings=4096, rms_norm_eps=1e-5)
    return _of_two_matrices(plain(c), c)


def _of_two_matrices(spec: DecoderSpec, c: Settings) -> DecoderSpec:
    spec = spec.with_mlp(gated=False, bias=bool(c.get("mlp_bias")))
    return replace(spec, names=TensorNames(gate_up=("up_proj",)))


@family("GemmaForCausalLM")
def gemma(c: Settings) -> DecoderSpec:
    """Published configs say gelu, and mean the one with tanh."""
    c = filled(
        c,
        hidden_act="gelu_pytorch_tanh",
        num_key_value_heads=16,
        head_dim=256,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    if c["hidden_act"] == "gelu":
        c = changed(c, {"hidden_act": "gelu_pytorch_tanh"})
    return replace(plain(c), norm_offset=1.0, embedding_scale=math.sqrt(c["hidden_size"]))


@family("OlmoForCausalLM", known=(LIMIT,))
def olmo(c: Settings) -> DecoderSpec:
    """Norms without weights, whose eps is always the same."""
    spec = plain(changed(filled(c, max_position_embeddings=2048), {"rms_norm_eps": 1e-5}))
    return replace(with_limit(spec, c), norm="layer without weights")
