"""Tiny models of families that the OpenVINO runner lacks, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
_GEMMA = {"head_dim": 16, **_MIXED}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {},
    "cohere2": _MIXED,
    "deepseek_v3": {
        **_EXPERTS,
        **_LATENT,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gemma2": {**_GEMMA, **_CAPS},
    "gemma3_text": _GEMMA,
    "glm4": {"head_dim": 16},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **_MIXED},
    "granite": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "olmo2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {},
    "phi3": {"sliding_window": 24},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, **_EXPERTS},
    "stablelm": {},
    "starcoder2": {"sliding_window": 24},
}
"""By model_type: what the config says beyond the common shape."""


def make_family(directory: Path, family: str, **overrides: Any) -> Path:
    """Saves a model with weights large enough for logits to differ; `directory` is returned."""
    config = CONFIG_MAPPING[family](**{**SHAPE, **FAMILIES.get(family, {}), **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                # Gemma multiplies embeddings by the square root of their size.
                embedding = 0.05 if family.startswith("gemma") else 0.4
                size = embedding if "emb" in name or "wte" in name else 2.0 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape) * size)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.save_pretrained(directory)
    return directory
