"""Families of decoders with one MLP in each layer that are near kin of Llama: rotation, norms, windows or the MLP
differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import DecoderSpec, LayerNorms, QueryGrowth, TensorNames
from penstock.engines.openvino.families_dense import ONE_NORM, granite, llama, mistral
from penstock.engines.openvino.family import (
    LIMIT,
    LOGITS_CAP,
    Settings,
    all_but_every_nth,
    changed,
    family,
    filled,
    growing,
    layers_by_type,
    plain,
    positive,
    rotated,
    rotating,
    windowed,
    with_limit,
)
from penstock.engines.openvino.rope import parse_rope, settings_in

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


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@family("Ministral3ForCausalLM")
def ministral3(c: Settings) -> DecoderSpec:
    """Queries grow beyond the original context, in all layers."""
    c = filled(c, sliding_window=None, head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-5)
    rope = settings_in(c, "rope_parameters") or settings_in(c, "rope_scaling") or _MINISTRAL3_ROPE
    c, growth = with_growth(c, rope)
    spec = mistral(c)
    return spec if growth is None else growing(spec, growth, [True] * spec.num_layers)


def with_growth(c: Settings, rope: Mapping[str, Any]) -> tuple[Settings, QueryGrowth | None]:
    """Settings with `rope` as rope_parameters, without what that says of queries that grow; and that."""
    beta, original = rope.get(_GROWTH), rope.get(_ORIGINAL)
    c = changed(c, {"rope_parameters": {key: value for key, value in rope.items() if key != _GROWTH}})
    if not beta:
        return c, None
    if type(original) is not int or original < 1:
        raise UnsupportedError(f"config.json has {_GROWTH}, and {_ORIGINAL}={str(original)[:50]}")
    return c, QueryGrowth(original, positive({_GROWTH: beta}, _GROWTH), 0)


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


@family("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")
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


@family("Jais2ForCausalLM")
def jais2(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        hidden_act="relu2",
        max_position_embeddings=8192,
        layer_norm_eps=1e-5,
        attention_bias=True,
        mlp_bias=True,
    )
    return replace(_of_two_matrices(plain(c, eps_key="layer_norm_eps"), c), norm="layer")


@family("ApertusForCausalLM")
def apertus(c: Settings) -> DecoderSpec:
    c = filled(c, hidden_act="xielu", max_position_embeddings=65536, rms_norm_eps=1e-5)
    if c.get("rope_parameters") is None and c.get("rope_scaling") is None:
        c = changed(c, {"rope_parameters": {**_LLAMA3_ROPE, "rope_theta": c.get("rope_theta") or 12e6}})
    spec = _of_two_matrices(plain(c).with_attention(qk_norm="each head"), c)
    return spec.with_layers(norms=LayerNorms("attention_layernorm", "", "feedforward_layernorm"))


@family("CwmForCausalLM")
def cwm(c: Settings) -> DecoderSpec:
    """Without layer_types, each fourth layer has no window, from the first on."""
    c = filled(
        c,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        sliding_window=8192,
        rope_parameters={**_LLAMA3_ROPE, "rope_theta": 1e6, "factor": 16.0},
    )
    return windowed(llama(changed(c, {"attention_bias": False})), all_but_each_fourth(c))


def all_but_each_fourth(c: Settings) -> list[int]:
    """Windows in the layers that layer_types names, or in all but each fourth, from the first on."""
    layers = c["num_hidden_layers"]
    each_fourth = ["sliding_attention" if n % 4 else "full_attention" for n in range(layers)]
    return layers_by_type(c.get("layer_types") or each_fourth, layers, c.get("sliding_window") or 0)


@family("NanoChatForCausalLM", known=(LOGITS_CAP,))
def nanochat(c: Settings) -> DecoderSpec:
    """Norms have no weights. Queries and keys turn the other way round."""
    c = filled(c, hidden_act="relu2", max_position_embeddings=2048, **{LOGITS_CAP: 15.0})
    spec = plain(c).with_attention(qk_norm="each head, weightless").with_mlp(gated=False)
    rope = spec.attention[0].rope
    assert rope is not None
    spec = spec.with_attention(rope=replace(rope, inv_freq=-rope.inv_freq))
    names = TensorNames(embedding_norm="model.norm", gate_up=("fc1",), down="fc2")
    return replace(spec, norm="rms without weights", names=names)


@family("HeliumForCausalLM")
def helium(c: Settings) -> DecoderSpec:
    c = filled(c, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-8, rope_theta=1e5)
    return llama(c).with_attention(o_bias=False, alternating_pairs=True)


@family("HyperCLOVAXForCausalLM")
def hyperclovax(c: Settings) -> DecoderSpec:
    """As Granite, but what divides Granite's logits multiplies these."""
    c = filled(c, use_post_norm=True, max_position_embeddings=2048, logits_scaling=1.0)
    if c.get("attention_multiplier") is None:
        c = changed(c, {"attention_multiplier": plain(c).attention[0].scale})
    spec = replace(granite(c), logits_scale=positive(c, "logits_scaling"))
    norms = LayerNorms("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    return spec.with_layers(norms=norms) if c["use_post_norm"] else spec


@family("MiniCPMForCausalLM")
def minicpm(c: Settings) -> DecoderSpec:
    """MiniCPM 1, 2 and 4: Llama with scales. Each token attends to all before it: MiniCPM 4's own code can leave out
    parts of long prompts."""
    if c.get("num_experts"):
        raise UnsupportedError("config.json has num_experts: of MiniCPM, mixtures of experts are not supported")
    c = filled(c, rms_norm_eps=1e-6, scale_emb=1, scale_depth=1, dim_model_base=1, tie_word_embeddings=True)
    return scaled_as_minicpm(llama(c), c)


def scaled_as_minicpm(spec: DecoderSpec, c: Settings) -> DecoderSpec:
    depth, base = c["scale_depth"], c["dim_model_base"]
    return replace(
        spec,
        embedding_scale=positive(c, "scale_emb"),
        residual_scale=1.0 if depth is None else positive(c, "scale_depth") / math.sqrt(spec.num_layers),
        logits_scale=1.0 if base is None else positive(c, "dim_model_base") / spec.hidden_size,
    )


@family("GraniteSWAForCausalLM")
def granite_swa(c: Settings) -> DecoderSpec:
    return sliding_granite(granite(c), c)


def sliding_granite(spec: DecoderSpec, c: Settings) -> DecoderSpec:
    """With windows and sinks, and with a base of its own for each layer's rotation; 0: it does not rotate."""
    spec = windowed(spec.with_attention(sinks=True), all_but_each_fourth(filled(c, sliding_window=128)))
    bases = c.get("layer_rope_theta")
    if bases is None:
        return spec
    known = isinstance(bases, list) and all(isinstance(base, int | float) and base >= 0 for base in bases)
    if not known or len(bases) != spec.num_layers:
        raise UnsupportedError(f"layer_rope_theta is not understood: {str(bases)[:100]}; each layer has a number")
    rope = settings_in(c, "rope_parameters") or settings_in(c, "rope_scaling")
    head_dim = spec.attention[0].head_dim
    own = {base: {**c, "rope_parameters": {**rope, "rope_theta": base}} for base in set(bases)}
    ropes = {base: parse_rope(settings, head_dim) if base else None for base, settings in own.items()}
    return rotated(spec, [ropes[base] for base in bases])


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
