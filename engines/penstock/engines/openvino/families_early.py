"""Families of decoders from before Llama: OPT, and kin of GPT-2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_spec import DecoderSpec, LayerNorms, TensorNames
from penstock.engines.openvino.families_dense import NUMBERED_NORMS, ONE_NUMBERED_NORM, gpt2, ungated, wide
from penstock.engines.openvino.family import Settings, changed, count, family, filled, plain, renamed, windowed

_GPTJ_ROTATED = 64
_OPT_OFFSET = 2
"""Rows of its position embeddings that no position has."""


@family("OPTForCausalLM")
def opt(c: Settings) -> DecoderSpec:
    c = filled(
        c,
        activation_function="relu",
        ffn_dim=3072,
        max_position_embeddings=2048,
        do_layer_norm_before=True,
        enable_bias=True,
        layer_norm_elementwise_affine=True,
        word_embed_proj_dim=None,
        tie_word_embeddings=True,
    )
    sizes = {"intermediate_size": c["ffn_dim"], "num_key_value_heads": c["num_attention_heads"]}
    c = changed(c, {**sizes, "layer_norm_eps": 1e-5})
    spec = plain(c, activation_key="activation_function", eps_key="layer_norm_eps", rotates=False)
    narrow = c["word_embed_proj_dim"] not in (None, spec.hidden_size)
    if narrow or not c["do_layer_norm_before"] or not c["layer_norm_elementwise_affine"]:
        raise UnsupportedError("OPT with norms behind its layers or narrower embeddings (350M) is not supported")
    names = TensorNames(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        layers="model.decoder.layers",
        norm="model.decoder.final_layer_norm",
        o="out_proj",
        mlp="",
        gate_up=("fc1",),
        down="fc2",
    )
    spec = ungated(spec, bool(c["enable_bias"])).with_layers(
        norms=LayerNorms("self_attn_layer_norm", "", "final_layer_norm")
    )
    return replace(spec, names=names, position_offset=_OPT_OFFSET)


@family("GPTBigCodeForCausalLM")
def gpt_bigcode(c: Settings) -> DecoderSpec:
    """All heads have one key and value, or each has its own."""
    c = filled(c, activation_function="gelu_pytorch_tanh", multi_query=True)
    spec = replace(gpt2(c), transposed=False)
    return spec.with_attention(**({"num_kv_heads": 1} if c["multi_query"] else {"qkv_rows": "by key head"}))


@family("GPTJForCausalLM")
def gptj(c: Settings) -> DecoderSpec:
    c = filled(c, activation_function="gelu_new", layer_norm_epsilon=1e-5)
    c = renamed(
        c,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    heads, hidden = c["num_attention_heads"], c["hidden_size"]
    head_dim = hidden // heads if type(heads) is int and heads and type(hidden) is int else 0
    c = filled(c, rotary_dim=min(_GPTJ_ROTATED, head_dim))
    c = changed(
        c,
        {
            "num_key_value_heads": heads,
            "intermediate_size": c.get("n_inner") or wide(c),
            "partial_rotary_factor": count(c, "rotary_dim") / head_dim if c["rotary_dim"] and head_dim else 1.0,
        },
    )
    spec = plain(
        c, activation_key="activation_function", eps_key="layer_norm_epsilon", may_be_partial=True
    ).with_attention(alternating_pairs=True)
    spec = ungated(spec, False).with_mlp(bias=True).with_layers(norms=ONE_NUMBERED_NORM, parallel=True)
    names = replace(_GPT_NAMES, positions="", o="out_proj", gate_up=("fc_in",), down="fc_out")
    return replace(spec, names=names, head_bias=True)


@family("GPTNeoForCausalLM")
def gpt_neo(c: Settings) -> DecoderSpec:
    """Scores are not scaled. Layers that attention_types calls local have a window."""
    c = filled(
        c,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        max_position_embeddings=2048,
        window_size=256,
        tie_word_embeddings=True,
    )
    c = renamed(c, num_hidden_layers="num_layers", num_attention_heads="num_heads")
    c = changed(
        c,
        {
            "num_key_value_heads": c["num_attention_heads"],
            "intermediate_size": c.get("intermediate_size") or wide(c),
            "sliding_window": c["window_size"],
        },
    )
    spec = plain(c, activation_key="activation_function", eps_key="layer_norm_epsilon", rotates=False)
    spec = windowed(spec.with_attention(scale=1.0), _neo_windows(c))
    spec = ungated(spec, False).with_attention(o_bias=True).with_mlp(bias=True).with_layers(norms=NUMBERED_NORMS)
    return replace(spec, names=replace(_GPT_NAMES, attention="attn.attention", o="out_proj"))


def _neo_windows(c: Settings) -> list[int]:
    layers = c["num_hidden_layers"]
    kinds = c.get("attention_layers")
    if kinds is None:
        kinds = _spread(c.get("attention_types"), layers)
    known = isinstance(kinds, list) and all(kind in ("global", "local") for kind in kinds)
    if not known or len(kinds) != layers:
        raise UnsupportedError(f"attention_types is not understood: {str(kinds)[:100]}; layers are global or local")
    return [c["window_size"] if kind == "local" else 0 for kind in kinds]


def _spread(types: Any, layers: int) -> Any:
    """Of pairs of some kinds and how often they follow each other; without them, both kinds by turns."""
    if types is None:
        return [("global", "local")[n % 2] for n in range(layers)]
    if not isinstance(types, list) or not all(isinstance(one, list) and len(one) == 2 for one in types):
        return types
    if not all(isinstance(kinds, list) and type(times) is int and 0 <= times <= layers for kinds, times in types):
        return types
    return [kind for kinds, times in types for _ in range(times) for kind in kinds]


_GPT_NAMES = TensorNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    norm="transformer.ln_f",
    attention="attn",
    gate_up=("c_fc",),
    down="c_proj",
)
"""As GPT-2's, with a matrix each for queries, keys and values."""
