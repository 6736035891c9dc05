"""Families of decoders with one MLP in each layer: Llama and those like it, and those with LayerNorm."""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import DecoderSpec, LayerNorms, TensorNames
from penstock.engines.openvino.family import (
    CAPS,
    LOGITS_CAP,
    SCORE_CAP,
    Settings,
    all_but_every_nth,
    changed,
    every_layer,
    family,
    filled,
    in_gguf,
    layers_by_type,
    layers_with_rope,
    plain,
    positive,
    renamed,
    rotated_by_window,
    rotating,
    upper_layers,
    windowed,
)
from penstock.engines.openvino.rope import parse_ropes_of_layer_types, settings_in

_HIDDEN_TIMES = 4
"""MLPs of GPT-2 and those after it are this much wider than the hidden state, unless config.json says otherwise."""
NORMS_BEHIND = LayerNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
ONE_NORM = LayerNorms("input_layernorm", "", "input_layernorm")
"""Attention and MLP get the same."""
NUMBERED_NORMS = LayerNorms("ln_1", "", "ln_2")
ONE_NUMBERED_NORM = LayerNorms("ln_1", "", "ln_1")


@family("LlamaForCausalLM", "LLaMAForCausalLM")
def llama(c: Settings) -> DecoderSpec:
    return plain(filled(c, max_position_embeddings=2048)).with_mlp(bias=bool(c.get("mlp_bias")))


@family("MistralForCausalLM")
def mistral(c: Settings) -> DecoderSpec:
    c = filled(c, sliding_window=4096, num_key_value_heads=8, max_position_embeddings=131072)
    return windowed(plain(c).with_attention(qkv_bias=False, o_bias=False), every_layer(c))


@family("Qwen2ForCausalLM", "MiMoForCausalLM")
def qwen2(c: Settings) -> DecoderSpec:
    c = filled(c, sliding_window=4096, max_window_layers=28, num_key_value_heads=32, max_position_embeddings=32768)
    return windowed(plain(c).with_attention(qkv_bias=True, o_bias=False), upper_layers(c))


@family("Qwen3ForCausalLM")
def qwen3(c: Settings) -> DecoderSpec:
    bias = bool(c.get("attention_bias"))
    return qwen2(filled(c, head_dim=128)).with_attention(qk_norm="each head", qkv_bias=bias, o_bias=bias)


@family("Gemma2ForCausalLM", known=CAPS)
def gemma2(c: Settings) -> DecoderSpec:
    c = filled(c, sliding_window_pattern=2, max_position_embeddings=8192, **{SCORE_CAP: 50.0, LOGITS_CAP: 30.0})
    c = _filled_gemma(c)
    return _gemma(plain(c, activation_key="hidden_activation"), c)


@family("VaultGemmaForCausalLM", known=CAPS)
def vaultgemma(c: Settings) -> DecoderSpec:
    return gemma2(c).with_layers(norms=LayerNorms("input_layernorm", "", "pre_feedforward_layernorm"))


@family("Gemma3ForCausalLM")
def gemma3(c: Settings) -> DecoderSpec:
    """Older configs scale the rotations of full attention only, and call the other base rope_local_base_freq."""
    c = _filled_gemma(c)
    spec = plain(c, activation_key="hidden_activation", rotates=False).with_attention(qk_norm="each head")
    whole = {"rope_theta": c.get("rope_theta") or 1e6, **settings_in(c, "rope_scaling")}
    local = {"rope_theta": c.get("rope_local_base_freq") or 1e4}
    ropes = parse_ropes_of_layer_types(c, _head_dim(spec), {"full_attention": whole, "sliding_attention": local})
    return rotated_by_window(_gemma(spec, c), c, ropes)


def _filled_gemma(c: Settings) -> Settings:
    return filled(
        c,
        sliding_window=4096,
        sliding_window_pattern=6,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )


def _gemma(spec: DecoderSpec, c: Settings) -> DecoderSpec:
    spec = windowed(spec, all_but_every_nth(c)).with_attention(scale=positive(c, "query_pre_attn_scalar") ** -0.5)
    norms = LayerNorms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    )
    return replace(spec.with_layers(norms=norms), norm_offset=1.0, embedding_scale=math.sqrt(c["hidden_size"]))


@family("GraniteForCausalLM")
def granite(c: Settings) -> DecoderSpec:
    multipliers = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    c = filled(c, **dict.fromkeys(multipliers, 1.0))
    spec = llama(c)
    attention, embedding, residual, logits = (positive(c, key) for key in multipliers)
    return replace(
        spec.with_attention(scale=attention),
        embedding_scale=embedding,
        residual_scale=residual,
        logits_scale=1 / logits,
    )


@family("SmolLM3ForCausalLM")
def smollm3(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        num_key_value_heads=4,
        no_rope_layer_interval=4,
        rope_theta=2e6,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    spec = llama(c)
    return rotating(windowed(spec, _smollm3_windows(c)), c, layers_with_rope(c))


def _smollm3_windows(c: Settings) -> list[int]:
    """With use_sliding_window, of the layers that layer_types names, or of all that do not rotate."""
    layers = c["num_hidden_layers"]
    window = (c.get("sliding_window") or 0) if c.get("use_sliding_window") else 0
    if c.get("layer_types") is not None:
        windows = layers_by_type(c["layer_types"], layers, c.get("sliding_window") or 0)
        return windows if window else [0] * layers
    return [0 if turns else window for turns in layers_with_rope(c)]


@family("Olmo2ForCausalLM")
def olmo2(c: Settings) -> DecoderSpec:
    return _olmo(plain(_filled_olmo(c)))


@family("Olmo3ForCausalLM")
def olmo3(c: Settings) -> DecoderSpec:
    """Older configs scale the rotations of full attention only."""
    c = _filled_olmo(filled(c, sliding_window=4096, sliding_window_pattern=4))
    spec = plain(c, rotates=False)
    local = {"rope_theta": c.get("rope_theta") or 5e5}
    whole = {**local, **settings_in(c, "rope_scaling")}
    ropes = parse_ropes_of_layer_types(c, _head_dim(spec), {"full_attention": whole, "sliding_attention": local})
    return rotated_by_window(_olmo(windowed(spec, all_but_every_nth(c))), c, ropes)


def _filled_olmo(c: Settings) -> Settings:
    return filled(c, max_position_embeddings=2048, rms_norm_eps=1e-5)


def _olmo(spec: DecoderSpec) -> DecoderSpec:
    return spec.with_layers(norms=NORMS_BEHIND).with_attention(qk_norm="all heads")


@family("ExaoneForCausalLM")
def exaone(c: Settings) -> DecoderSpec:
    c = filled(c, num_key_value_heads=8, rope_theta=5e5, max_position_embeddings=4096, layer_norm_epsilon=1e-5)
    c = renamed(c, num_hidden_layers="num_layers")
    spec = plain(c, activation_key="activation_function", eps_key="layer_norm_epsilon")
    names = TensorNames(
        embedding="transformer.wte",
        layers="transformer.h",
        norm="transformer.ln_f",
        attention="attn.attention",
        o="out_proj",
        gate_up=("c_fc_0", "c_fc_1"),
        down="c_proj",
    )
    spec = spec.with_layers(norms=NUMBERED_NORMS).with_attention(qkv_bias=False, o_bias=False)
    return replace(spec, names=names)


@family("Exaone4ForCausalLM")
def exaone4(c: Settings) -> DecoderSpec:
    """Beside layers with windows, those that attend to all tokens do not rotate."""
    c = filled(
        c,
        sliding_window=4096,
        sliding_window_pattern=4,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
    )
    spec = plain(c).with_layers(norms=NORMS_BEHIND)
    spec = windowed(spec, _exaone4_windows(c)).with_attention(qk_norm="each head", qkv_bias=False, o_bias=False)
    return rotating(spec, c, [bool(window) or not c.get("sliding_window") for window in spec.windows])


def _exaone4_windows(c: Settings) -> list[int]:
    """Of the layers that layer_types names; without it, sliding_window_pattern is a number, or a text such as LLLG."""
    layers, pattern = c["num_hidden_layers"], c.get("sliding_window_pattern")
    if c.get("layer_types") is None and not c.get("sliding_window"):
        return [0] * layers
    if c.get("layer_types") is None and isinstance(pattern, str):
        if not pattern or set(pattern) - set("LG"):
            raise UnsupportedError(f"sliding_window_pattern is not understood: {pattern[:50]}; it has L and G")
        return [(c.get("sliding_window") or 0) if kind == "L" else 0 for kind in (pattern * layers)[:layers]]
    return all_but_every_nth(c)


@family("Phi3ForCausalLM")
def phi3(c: Settings) -> DecoderSpec:
    c = filled(c, max_position_embeddings=4096, rms_norm_eps=1e-5)
    spec = plain(c, may_be_partial=True).with_attention(qkv_bias=False, o_bias=False)
    names = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
    return replace(windowed(spec, every_layer(c)), names=names)


@family("StableLmForCausalLM")
def stablelm(c: Settings) -> DecoderSpec:
    c = filled(c, max_position_embeddings=4096, num_key_value_heads=32, layer_norm_eps=1e-5, partial_rotary_factor=0.25)
    spec = plain(c, eps_key="layer_norm_eps", may_be_partial=True)
    spec = spec.with_attention(qkv_bias=bool(c.get("use_qkv_bias")), o_bias=False)
    if c.get("use_parallel_residual"):
        spec = spec.with_layers(norms=ONE_NORM, parallel=True)
    return replace(spec, norm="layer")


@family("Starcoder2ForCausalLM")
def starcoder2(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=4096,
        num_key_value_heads=2,
        norm_epsilon=1e-5,
        use_bias=True,
        tie_word_embeddings=True,
    )
    spec = ungated(plain(c, eps_key="norm_epsilon"), bool(c["use_bias"]))
    return replace(windowed(spec, every_layer(c)), names=TensorNames(gate_up=("c_fc",), down="c_proj"))


@family("PhiForCausalLM")
def phi(c: Settings) -> DecoderSpec:
    c = filled(c, hidden_act="gelu_new", max_position_embeddings=2048, layer_norm_eps=1e-5, partial_rotary_factor=0.5)
    spec = ungated(plain(c, eps_key="layer_norm_eps", may_be_partial=True), True)
    names = TensorNames(norm="model.final_layernorm", o="dense", gate_up=("fc1",), down="fc2")
    return replace(spec.with_layers(norms=ONE_NORM, parallel=True), names=names, head_bias=True)


@family("GPTNeoXForCausalLM")
def gpt_neox(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        hidden_act="gelu",
        max_position_embeddings=2048,
        layer_norm_eps=1e-5,
        use_parallel_residual=True,
        attention_bias=True,
    )
    c = changed(
        c,
        {
            "num_key_value_heads": c["num_attention_heads"],
            "partial_rotary_factor": c.get("rotary_pct", 0.25),
            "rope_theta": c.get("rotary_emb_base", 10000),
        },
    )
    spec = ungated(plain(c, eps_key="layer_norm_eps", may_be_partial=True), bool(c["attention_bias"]))
    spec = spec.with_mlp(bias=True).with_layers(parallel=bool(c["use_parallel_residual"]))
    names = replace(
        _DENSE_NAMES,
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
        attention="attention",
    )
    return replace(spec.with_attention(qkv_rows="by key head"), names=names)


@family("FalconForCausalLM")
def falcon(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        activation="gelu",
        max_position_embeddings=2048,
        layer_norm_epsilon=1e-5,
        multi_query=True,
        parallel_attn=True,
        tie_word_embeddings=True,
    )
    heads, is_new = c["num_attention_heads"], bool(c.get("new_decoder_architecture"))
    kv_heads = (c.get("num_kv_heads") or heads) if is_new or not c["multi_query"] else 1
    c = changed(c, {"num_key_value_heads": kv_heads, "intermediate_size": c.get("ffn_hidden_size") or wide(c)})
    spec = ungated(plain(c, activation_key="activation", eps_key="layer_norm_epsilon"), bool(c.get("bias")))
    if c["parallel_attn"] or is_new:
        has_two = is_new and (c.get("num_ln_in_parallel_attn") or 2) == 2
        norms = LayerNorms("ln_attn", "", "ln_mlp") if has_two else ONE_NORM
        spec = spec.with_layers(norms=norms, parallel=True)
    return replace(spec.with_attention(qkv_rows="by key head"), names=_DENSE_NAMES)


@family("GPT2LMHeadModel")
def gpt2(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        scale_attn_weights=True,
        tie_word_embeddings=True,
    )
    c = renamed(
        c,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    c = changed(
        c,
        {"num_key_value_heads": c["num_attention_heads"], "intermediate_size": c.get("n_inner") or wide(c)},
    )
    spec = plain(c, activation_key="activation_function", eps_key="layer_norm_epsilon", rotates=False)
    spec = ungated(spec, True).with_layers(norms=NUMBERED_NORMS)
    if not c["scale_attn_weights"]:
        spec = spec.with_attention(scale=1.0)
    names = TensorNames(
        embedding="transformer.wte",
        positions="transformer.wpe",
        layers="transformer.h",
        norm="transformer.ln_f",
        attention="attn",
        qkv=("c_attn",),
        o="c_proj",
        gate_up=("c_fc",),
        down="c_proj",
    )
    return replace(spec, names=names, transposed=not in_gguf(c))


@family("BloomForCausalLM")
def bloom(c: Settings) -> DecoderSpec:
    """ALiBi has no longest context; seq_length is what the model was trained with."""
    c = filled(c, layer_norm_epsilon=1e-5, tie_word_embeddings=True)
    c = renamed(c, hidden_size="n_embed", num_hidden_layers="n_layer", num_attention_heads="n_head")
    c = changed(
        c,
        {
            "num_key_value_heads": c["num_attention_heads"],
            "max_position_embeddings": c.get("seq_length") or c.get("max_position_embeddings") or 2048,
            "intermediate_size": wide(c),
            "activation": "gelu_new",
        },
    )
    spec = plain(c, activation_key="activation", eps_key="layer_norm_epsilon", rotates=False)
    spec = ungated(spec, True).with_attention(alibi=True, qkv_rows="by key head")
    return replace(spec, names=replace(_DENSE_NAMES, embedding_norm="transformer.word_embeddings_layernorm"))


_DENSE_NAMES = TensorNames(
    embedding="transformer.word_embeddings",
    layers="transformer.h",
    norm="transformer.ln_f",
    attention="self_attention",
    qkv=("query_key_value",),
    o="dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)
"""Of Falcon, and for the most part of BLOOM and GPT-NeoX."""


def ungated(spec: DecoderSpec, bias: bool) -> DecoderSpec:
    """With layer norms, and MLPs of two matrices. `bias`: of all matrices in the layers."""
    spec = spec.with_attention(qkv_bias=bias, o_bias=bias).with_mlp(gated=False, bias=bias)
    return replace(spec, norm="layer")


def wide(c: Settings) -> int | None:
    hidden = c["hidden_size"]
    return _HIDDEN_TIMES * hidden if type(hidden) is int else None


def _head_dim(spec: DecoderSpec) -> int:
    return spec.attention[0].head_dim
