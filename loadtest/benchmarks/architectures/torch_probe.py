"""Tiny models with random weights, tried on the torch engine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from penstock.engines.errors import PenstockError
from penstock.engines.torch.config import TorchConfig
from penstock.engines.torch.runner import TorchRunner

_MOST_PARAMETERS = 40_000_000
_MOST_TEXT = 110
_NOT_TRIED = "not tried: it has no small config"
_SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "q_lora_rank": 32,
}
_DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 32,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_OWN: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "bamba": _MAMBA | {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": _LATENT | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "gemma4_text": {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 300, "num_kv_shared_layers": 0},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "glm4_moe_lite": _LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": _MAMBA
    | {"layer_types": ["linear_attention", "full_attention"] * 2, "shared_intermediate_size": 64},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
    "kimi_linear": _LATENT | {"linear_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": _LATENT | {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32},
    "minicpm3": _LATENT,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "expand": 2,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 4},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "rwkv": {"attention_hidden_size": 64},
    "youtu": _LATENT,
    "zamba2": {
        "mamba_d_state": 16,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "chunk_size": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
}
"""What else is small, or valid, by model_type."""


def verdict(architecture: str, types: list[str]) -> str:
    """ "yes", or why not: of the first of its model types that is a language model alone, if there is one."""
    reasons = [_try(kind) for kind in types]
    return next((reason for reason in reasons if reason == "yes"), reasons[-1])


def _try(kind: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _run(kind, Path(folder))
        except PenstockError as e:
            return _short(e.message)
        except Exception:  # configs have rules of their own
            return _NOT_TRIED


def _run(kind: str, folder: Path) -> str:
    if any(hasattr(CONFIG_MAPPING[kind](), part) for part in ("text_config", "vision_config", "audio_config")):
        return "models that also read images or sound are refused"
    config = _config(kind)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in _model(config).parameters())
    if size > _MOST_PARAMETERS:
        return _NOT_TRIED
    _save(config, folder)
    TorchRunner(TorchConfig(folder, device="cpu", threads=1, num_blocks=64, max_model_len=256)).close()
    return "yes"


def _config(kind: str) -> PretrainedConfig:
    config_class = CONFIG_MAPPING[kind]
    names = {*getattr(config_class, "__dataclass_fields__", {}), *config_class.attribute_map}
    shape = {key: value for key, value in _SHAPE.items() if key in names}
    config: PretrainedConfig = config_class(**{**shape, **_OWN.get(kind, {})})
    return config


def _model(config: PretrainedConfig) -> Any:
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def _save(config: PretrainedConfig, folder: Path) -> None:
    """With weights large enough for logits to differ."""
    torch.manual_seed(0)
    model = _model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if parameter.ndim >= 2:
                parameter.copy_(noise * (0.4 if "emb" in name or "wte" in name else 2.0 / parameter.shape[-1] ** 0.5))
            else:
                parameter.add_(0.2 * noise)
    model.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)


def _short(message: str) -> str:
    """On one line of a table, without the name that its row has."""
    line = " ".join(message.split()).replace("|", "/")
    line = line.partition(" cannot be run: ")[2] or line
    return line if len(line) <= _MOST_TEXT else line[:_MOST_TEXT].rsplit(" ", 1)[0] + " ..."
