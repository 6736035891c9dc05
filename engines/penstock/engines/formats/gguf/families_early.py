"""Dense models of 2019 to 2023 in GGUF files."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.gguf.architecture import (
    ATTENTION,
    LLAMA,
    TWO_NORMS,
    Architecture,
    Config,
    named,
)
from penstock.engines.formats.gguf.container import FileSettings


def olmo(settings: FileSettings, config: Config) -> Config:
    return {"clip_qkv": settings.get("attention.clamp_kqv")}


def stablelm(settings: FileSettings, config: Config) -> Config:
    return {
        "use_qkv_bias": config["attention_bias"],
        "use_parallel_residual": not settings.has("ffn_norm.weight"),
        "qk_layernorm": settings.has("attn_q_norm.weight"),
    }


def starcoder2(settings: FileSettings, config: Config) -> Config:
    return {"use_bias": config["attention_bias"]}


def gpt2(settings: FileSettings, config: Config) -> Config:
    return {"n_inner": config["intermediate_size"]}


def starcoder(settings: FileSettings, config: Config) -> Config:
    if config["num_key_value_heads"] != 1:
        raise UnsupportedError("the GGUF file has starcoder.attention.head_count_kv other than 1")
    return {"n_inner": config["intermediate_size"], "multi_query": True}


def gptneox(settings: FileSettings, config: Config) -> Config:
    parallel = settings.get("use_parallel_residual")
    return {
        "rotary_pct": config.get("partial_rotary_factor", 1.0),
        "rotary_emb_base": config["rope_theta"],
        "use_parallel_residual": parallel is None or bool(parallel),
    }


def falcon(settings: FileSettings, config: Config) -> Config:
    """Old layers have one head of keys, new ones have several, with one norm or two."""
    grouped = config["num_key_value_heads"] > 1
    return {
        "num_kv_heads": config["num_key_value_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": 2 if settings.has("attn_norm_2.weight") else 1,
        "bias": config["attention_bias"],
    }


def bloom(settings: FileSettings, config: Config) -> Config:
    return {"seq_length": config["max_position_embeddings"]}


_DENSE = {
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
"""Of BLOOM, Falcon and, with another name of the attention, GPT-NeoX."""
_FALCON = Architecture(
    "FalconForCausalLM",
    named(_DENSE, {"attn_norm": "input_layernorm"}),
    layers="transformer.h",
    embedding="transformer.word_embeddings",
    norm="transformer.ln_f",
    eps_key="layer_norm_epsilon",
    by_key_head=True,
    settings=falcon,
)

_GPT2 = Architecture(
    "GPT2LMHeadModel",
    MappingProxyType(
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        }
    ),
    layers="transformer.h",
    embedding="transformer.wte",
    norm="transformer.ln_f",
    other_parts=MappingProxyType({"position_embd": "transformer.wpe"}),
    eps_key="layer_norm_epsilon",
    settings=gpt2,
)

ARCHITECTURES = {
    "olmo": replace(LLAMA, hugging_face="OlmoForCausalLM", eps_key="layer_norm_eps", settings=olmo),
    "stablelm": Architecture("StableLmForCausalLM", eps_key="layer_norm_eps", settings=stablelm),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        named(ATTENTION, TWO_NORMS, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
        eps_key="norm_epsilon",
        settings=starcoder2,
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        named(ATTENTION, TWO_NORMS, {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
        norm="model.final_layernorm",
        eps_key="layer_norm_eps",
    ),
    "gpt2": _GPT2,
    "starcoder": replace(_GPT2, hugging_face="GPTBigCodeForCausalLM", settings=starcoder),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        named({part: name.replace("self_attention", "attention") for part, name in _DENSE.items()}, TWO_NORMS),
        layers="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
        eps_key="layer_norm_eps",
        by_key_head=True,
        settings=gptneox,
    ),
    "falcon": _FALCON,
    "bloom": replace(
        _FALCON,
        hugging_face="BloomForCausalLM",
        block_parts=named(_DENSE, TWO_NORMS),
        other_parts=MappingProxyType({"token_embd_norm": "transformer.word_embeddings_layernorm"}),
        settings=bloom,
    ),
}

FALCON_OF_TWO_NORMS = replace(_FALCON, block_parts=named(_DENSE, {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}))
