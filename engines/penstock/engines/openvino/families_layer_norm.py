"""Families with LayerNorm: StableLM, GPT-2 and what came after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.engines.openvino.decoder_spec import LayerNorms, TensorNames
from penstock.engines.openvino.family import Family
from penstock.engines.openvino.layer_kinds import every_layer, partial_rope, renamed

_HIDDEN_TIMES = 4
"""MLPs of GPT-2 and those after it are this much wider than the hidden state, unless config.json says otherwise."""


def _one_norm(c: Mapping[str, Any]) -> LayerNorms:
    """Attention and MLP get the same."""
    return LayerNorms("input_layernorm", "", "input_layernorm")


def _stablelm_norms(c: Mapping[str, Any]) -> LayerNorms:
    return _one_norm(c) if c.get("use_parallel_residual") else LayerNorms()


def _falcon_norms(c: Mapping[str, Any]) -> LayerNorms:
    if not _falcon_is_parallel(c):
        return LayerNorms()
    new = bool(c.get("new_decoder_architecture"))
    number = c.get("num_ln_in_parallel_attn") or (2 if new else 1)
    return LayerNorms("ln_attn", "", "ln_mlp") if new and number == 2 else _one_norm(c)


def _falcon_is_parallel(c: Mapping[str, Any]) -> bool:
    return bool(c["parallel_attn"] or c.get("new_decoder_architecture"))


def _falcon_usual(c: Mapping[str, Any]) -> dict[str, Any]:
    heads = c["num_attention_heads"]
    grouped = c.get("new_decoder_architecture") or not c["multi_query"]
    return {
        "num_key_value_heads": (c.get("num_kv_heads") or heads) if grouped else 1,
        "intermediate_size": c.get("ffn_hidden_size") or _wide(c),
    }


def _neox_usual(c: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_key_value_heads": c["num_attention_heads"],
        "partial_rotary_factor": c.get("rotary_pct", 0.25),
        "rope_theta": c.get("rotary_emb_base", 10000),
    }


def _gpt2_usual(c: Mapping[str, Any]) -> dict[str, Any]:
    usual = renamed(
        c,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    return usual | {
        "num_key_value_heads": usual["num_attention_heads"],
        "intermediate_size": c.get("n_inner") or _wide(usual),
    }


def _bloom_usual(c: Mapping[str, Any]) -> dict[str, Any]:
    """ALiBi has no longest context; seq_length is what the model was trained with."""
    usual = renamed(c, hidden_size="n_embed", num_hidden_layers="n_layer", num_attention_heads="n_head")
    return usual | {
        "num_key_value_heads": usual["num_attention_heads"],
        "max_position_embeddings": c.get("seq_length") or c.get("max_position_embeddings") or 2048,
        "intermediate_size": _wide(usual),
        "activation": "gelu_new",
    }


def _wide(c: Mapping[str, Any]) -> int | None:
    hidden = c["hidden_size"]
    return _HIDDEN_TIMES * hidden if type(hidden) is int else None


_DENSE = TensorNames(
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

LAYER_NORM_FAMILIES: dict[str, Family] = {
    "StableLmForCausalLM": Family(
        norm="layer",
        eps_key="layer_norm_eps",
        norms=_stablelm_norms,
        parallel=lambda c: bool(c.get("use_parallel_residual")),
        ropes=partial_rope,
        qkv_bias=lambda c: bool(c.get("use_qkv_bias")),
        o_bias=lambda c: False,
        defaults={
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
    ),
    "Starcoder2ForCausalLM": Family(
        norm="layer",
        eps_key="norm_epsilon",
        sliding_windows=every_layer,
        gated=False,
        qkv_bias=lambda c: bool(c["use_bias"]),
        o_bias=lambda c: bool(c["use_bias"]),
        mlp_bias=lambda c: bool(c["use_bias"]),
        names=TensorNames(gate_up=("c_fc",), down="c_proj"),
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "PhiForCausalLM": Family(
        norm="layer",
        eps_key="layer_norm_eps",
        norms=_one_norm,
        parallel=lambda c: True,
        gated=False,
        ropes=partial_rope,
        qkv_bias=lambda c: True,
        o_bias=lambda c: True,
        mlp_bias=lambda c: True,
        head_bias=True,
        names=TensorNames(norm="model.final_layernorm", o="dense", gate_up=("fc1",), down="fc2"),
        defaults={
            "hidden_act": "gelu_new",
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
    ),
    "GPTNeoXForCausalLM": Family(
        norm="layer",
        eps_key="layer_norm_eps",
        usual=_neox_usual,
        parallel=lambda c: bool(c["use_parallel_residual"]),
        gated=False,
        ropes=partial_rope,
        qkv_rows="by key head",
        qkv_bias=lambda c: bool(c["attention_bias"]),
        o_bias=lambda c: bool(c["attention_bias"]),
        mlp_bias=lambda c: True,
        names=replace(
            _DENSE,
            embedding="gpt_neox.embed_in",
            layers="gpt_neox.layers",
            norm="gpt_neox.final_layer_norm",
            head="embed_out",
            attention="attention",
        ),
        defaults={
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
            "attention_bias": True,
        },
    ),
    "FalconForCausalLM": Family(
        norm="layer",
        eps_key="layer_norm_epsilon",
        activation_key="activation",
        usual=_falcon_usual,
        norms=_falcon_norms,
        parallel=_falcon_is_parallel,
        gated=False,
        qkv_rows="by key head",
        qkv_bias=lambda c: bool(c.get("bias")),
        o_bias=lambda c: bool(c.get("bias")),
        mlp_bias=lambda c: bool(c.get("bias")),
        names=_DENSE,
        defaults={
            "activation": "gelu",
            "max_position_embeddings": 2048,
            "layer_norm_epsilon": 1e-5,
            "multi_query": True,
            "parallel_attn": True,
            "tie_word_embeddings": True,
        },
    ),
    "GPT2LMHeadModel": Family(
        norm="layer",
        eps_key="layer_norm_epsilon",
        activation_key="activation_function",
        usual=_gpt2_usual,
        norms=lambda c: LayerNorms("ln_1", "", "ln_2"),
        rotates=lambda c, windows: [False] * len(windows),
        gated=False,
        transposed=True,
        query_scale=lambda c, head_dim: head_dim**-0.5 if c["scale_attn_weights"] else 1.0,
        qkv_bias=lambda c: True,
        o_bias=lambda c: True,
        mlp_bias=lambda c: True,
        names=TensorNames(
            embedding="transformer.wte",
            positions="transformer.wpe",
            layers="transformer.h",
            norm="transformer.ln_f",
            attention="attn",
            qkv=("c_attn",),
            o="c_proj",
            gate_up=("c_fc",),
            down="c_proj",
        ),
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "tie_word_embeddings": True,
        },
    ),
    "BloomForCausalLM": Family(
        norm="layer",
        eps_key="layer_norm_epsilon",
        activation_key="activation",
        usual=_bloom_usual,
        rotates=lambda c, windows: [False] * len(windows),
        alibi=True,
        gated=False,
        qkv_rows="by key head",
        qkv_bias=lambda c: True,
        o_bias=lambda c: True,
        mlp_bias=lambda c: True,
        names=replace(_DENSE, embedding_norm="transformer.word_embeddings_layernorm"),
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    ),
}
