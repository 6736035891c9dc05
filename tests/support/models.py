"""Small models for tests: transformers classes with random weights, saved as safetensors beside a byte-level tokenizer.

Weights are larger than those of a fresh model, so that logits differ enough for greedy tokens to be compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    ApertusConfig,
    ApertusForCausalLM,
    ArceeConfig,
    ArceeForCausalLM,
    AXK1Config,
    AXK1ForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    Cohere2MoeConfig,
    Cohere2MoeForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    CwmConfig,
    CwmForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    FlexOlmoConfig,
    FlexOlmoForCausalLM,
    FlintConfig,
    FlintForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GenerationConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    GraniteMoeSWAConfig,
    GraniteMoeSWAForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
    Jais2Config,
    Jais2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoConfig,
    OlmoeConfig,
    OlmoeForCausalLM,
    OlmoForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    SolarOpenConfig,
    SolarOpenForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    VaultGemmaConfig,
    VaultGemmaForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from support.runner import VOCAB_SIZE as VOCAB_SIZE

torch.set_num_threads(1)
"""Models this small are computed several times faster without threads, most of all on a busy machine."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": EOS_TOKEN_ID,
    "bos_token_id": None,
    "pad_token_id": 0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MINISTRAL3 = _YARN | {"original_max_position_embeddings": 16, "factor": 32.0, "llama_4_scaling_beta": 0.5}
_HUNYUAN = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
_GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}
_SHARED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SIGMOIDS = {**_SHARED, "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}
_SLIDING_EXPERTS = {
    **_SHARED,
    "num_experts": 6,
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_DELTA_NETS = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

FAMILIES: dict[str, tuple[type[PreTrainedModel], type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LINEAR}),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3}),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _YARN}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 24, "head_dim": 16}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-sliding": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24},
    ),
    "lfm2": (
        Lfm2ForCausalLM,
        Lfm2Config,
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    ),
    "qwen3.5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {"num_hidden_layers": 4, **_DELTA_NETS}),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
}
"""By name: the model's class, its config's class, and what its config says beyond the common shape."""
OTHER_FAMILIES: dict[str, tuple[type[PreTrainedModel], type[Any], dict[str, Any]]] = {
    "granite": (
        GraniteForCausalLM,
        GraniteConfig,
        _GRANITE,
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layer_interval": 2}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "olmo3": (Olmo3ForCausalLM, Olmo3Config, {"num_hidden_layers": 4, "sliding_window": 24}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 24,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3n": (
        Gemma3nForCausalLM,
        Gemma3nTextConfig,
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": [96, 64, 96, 80],
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE - 64,
            "laurel_rank": 8,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0],
        },
    ),
    "gemma4": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "exaone4": (Exaone4ForCausalLM, Exaone4Config, {"num_hidden_layers": 4, "sliding_window": 24}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
    "qwen2-moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, {**_SHARED_EXPERT, "mlp_only_layers": [1]}),
    "qwen3.5-moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        {**_DELTA_NETS, **_SHARED_EXPERT, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "qwen3-next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {**_DELTA_NETS, **_SHARED_EXPERT, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "head_dim": 16, "swiglu_limit": 1.0},
    ),
    "lfm2-moe": (
        Lfm2MoeForCausalLM,
        Lfm2MoeConfig,
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "olmo-hybrid": (
        OlmoHybridForCausalLM,
        OlmoHybridConfig,
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_num_value_heads": 4,
        },
    ),
    "lfm3": (
        Lfm3ForCausalLM,
        Lfm3Config,
        {"layer_types": ["conv", "sliding_attention", "full_attention"], "head_dim": 16, "sliding_window": 24},
    ),
    "llama4": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "no_rope_layer_interval": 2,
            "floor_scale": 16,
            "attention_chunk_size": 512,
            "moe_layers": [0, 2],
        },
    ),
    "ministral3": (Ministral3ForCausalLM, Ministral3Config, {"head_dim": 16, "rope_parameters": _MINISTRAL3}),
    "ministral": (
        MinistralForCausalLM,
        MinistralConfig,
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_hidden_layers": 4,
        },
    ),
    "glm": (GlmForCausalLM, GlmConfig, {"head_dim": 16, "eos_token_id": [EOS_TOKEN_ID]}),
    "glm4": (Glm4ForCausalLM, Glm4Config, {"head_dim": 16, "eos_token_id": [EOS_TOKEN_ID]}),
    "ernie4.5": (Ernie4_5ForCausalLM, Ernie4_5Config, {"head_dim": 16}),
    "hunyuan": (HunYuanDenseV1ForCausalLM, HunYuanDenseV1Config, {"head_dim": 16, "rope_parameters": _HUNYUAN}),
    "seed-oss": (SeedOssForCausalLM, SeedOssConfig, {"head_dim": 32}),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.5}),
    "cohere2": (Cohere2ForCausalLM, Cohere2Config, {"logit_scale": 0.5, "num_hidden_layers": 4, "sliding_window": 24}),
    "nemotron": (NemotronForCausalLM, NemotronConfig, {}),
    "arcee": (ArceeForCausalLM, ArceeConfig, {}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {"head_dim": 16}),
    "olmo": (OlmoForCausalLM, OlmoConfig, {}),
    "granite-moe": (
        GraniteMoeForCausalLM,
        GraniteMoeConfig,
        {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "granite-moe-shared": (
        GraniteMoeSharedForCausalLM,
        GraniteMoeSharedConfig,
        {**_GRANITE, "num_local_experts": 4, "shared_intermediate_size": 48},
    ),
    "granite-hybrid": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        {
            **_GRANITE,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "shared_intermediate_size": 48,
            "mamba_n_heads": 8,
            "mamba_d_state": 24,
        },
    ),
    "flex-olmo": (FlexOlmoForCausalLM, FlexOlmoConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "minimax-m2": (
        MiniMaxM2ForCausalLM,
        MiniMaxM2Config,
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "phi-moe": (PhimoeForCausalLM, PhimoeConfig, {"num_local_experts": 6, "router_jitter_noise": 0.2}),
    "glm4-moe": (Glm4MoeForCausalLM, Glm4MoeConfig, {**_SIGMOIDS, "use_qk_norm": True, "routed_scaling_factor": 1.5}),
    "dots1": (Dots1ForCausalLM, Dots1Config, {**_SIGMOIDS, "max_window_layers": 1, "sliding_window": 24}),
    "solar-open": (SolarOpenForCausalLM, SolarOpenConfig, {**_SIGMOIDS, "head_dim": 16}),
    "exaone-moe": (
        ExaoneMoeForCausalLM,
        ExaoneMoeConfig,
        {**_SHARED, "num_experts": 6, "num_hidden_layers": 4, "sliding_window": 24},
    ),
    "hy-v3": (HYV3ForCausalLM, HYV3Config, {**_SHARED, "num_experts": 6, "head_dim": 16, "num_shared_experts": 2}),
    "ernie4.5-moe": (
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig,
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "moe_layer_interval": 2,
        },
    ),
    "hunyuan-moe": (
        HunYuanMoEV1ForCausalLM,
        HunYuanMoEV1Config,
        {"head_dim": 16, "num_experts": 4, "moe_topk": [2] * 3},
    ),
    "deepseek-v2": (DeepseekV2ForCausalLM, DeepseekV2Config, {**_LATENT, **_SIGMOIDS}),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {**_LATENT, **_SIGMOIDS, "n_group": 1, "topk_group": 1}),
    "glm4-moe-lite": (Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig, {**_LATENT, **_SIGMOIDS}),
    "minicpm3": (
        MiniCPM3ForCausalLM,
        MiniCPM3Config,
        {**_LATENT, "dim_model_base": 32, "scale_emb": 1.5, "scale_depth": 2.8},
    ),
    "youtu": (YoutuForCausalLM, YoutuConfig, _LATENT),
    "afmoe": (
        AfmoeForCausalLM,
        AfmoeConfig,
        {
            **_SHARED,
            "num_experts": 6,
            "head_dim": 16,
            "sliding_window": 24,
            "num_hidden_layers": 4,
            "mup_enabled": True,
        },
    ),
    "cohere2-moe": (
        Cohere2MoeForCausalLM,
        Cohere2MoeConfig,
        {
            "num_experts": 4,
            "head_dim": 16,
            "logit_scale": 0.5,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 80,
            "num_shared_experts": 1,
        },
    ),
    "opt": (OPTForCausalLM, OPTConfig, {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt-bigcode": (
        GPTBigCodeForCausalLM,
        GPTBigCodeConfig,
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    ),
    "gptj": (
        GPTJForCausalLM,
        GPTJConfig,
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "rotary_dim": 8},
    ),
    "gpt-neo": (
        GPTNeoForCausalLM,
        GPTNeoConfig,
        {
            "num_layers": 3,
            "num_heads": 4,
            "attention_types": [[["local", "global"], 1], [["local"], 1]],
            "window_size": 24,
        },
    ),
    "flint": (
        FlintForCausalLM,
        FlintConfig,
        {
            **_SLIDING_EXPERTS,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [0],
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "mellum": (MellumForCausalLM, MellumConfig, {**_SLIDING_EXPERTS, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "axk1": (AXK1ForCausalLM, AXK1Config, {**_LATENT, **_SIGMOIDS, "n_group": 2, "topk_group": 1}),
    "mimo-v2": (
        MiMoV2FlashForCausalLM,
        MiMoV2FlashConfig,
        {**_SLIDING_EXPERTS, "n_routed_experts": 6, "head_dim": 24, "v_head_dim": 16},
    ),
    "vaultgemma": (
        VaultGemmaForCausalLM,
        VaultGemmaConfig,
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24, "attn_logit_softcapping": 2.0},
    ),
    "jais2": (Jais2ForCausalLM, Jais2Config, {}),
    "apertus": (ApertusForCausalLM, ApertusConfig, {}),
    "cwm": (CwmForCausalLM, CwmConfig, {"head_dim": 16, "sliding_window": 24, "bos_token_id": 1}),
    "nanochat": (NanoChatForCausalLM, NanoChatConfig, {}),
    "helium": (HeliumForCausalLM, HeliumConfig, {"head_dim": 16}),
    "hyperclovax": (HyperCLOVAXForCausalLM, HyperCLOVAXConfig, {**_GRANITE, "attention_multiplier": None}),
    "granite-swa": (
        GraniteSWAForCausalLM,
        GraniteSWAConfig,
        {**_GRANITE, "sliding_window": 24, "layer_rope_theta": [1e4, 0, 500.0]},
    ),
    "granite-moe-swa": (
        GraniteMoeSWAForCausalLM,
        GraniteMoeSWAConfig,
        {**_GRANITE, "sliding_window": 24, "num_local_experts": 4, "shared_intermediate_size": 48},
    ),
    "stablelm": (StableLmForCausalLM, StableLmConfig, {"use_qkv_bias": True}),
    "starcoder2": (Starcoder2ForCausalLM, Starcoder2Config, {"sliding_window": 24}),
    "phi": (PhiForCausalLM, PhiConfig, {}),
    "gpt-neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {}),
    "falcon": (FalconForCausalLM, FalconConfig, {}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {}),
    "bloom": (BloomForCausalLM, BloomConfig, {}),
}
"""As FAMILIES, for the OpenVINO engine alone: the others have nothing of their own for them."""


def make_model(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **overrides: Any,
) -> Path:
    """Saves a model and a tokenizer in `directory`, which is returned. `overrides` go to the model's config."""
    model_class, config_class, differences = (FAMILIES | OTHER_FAMILIES)[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SHAPE, **differences, **overrides}))
    spread(model)
    for name, values in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            values.copy_(torch.linspace(0.2, -0.2, values.numel()).reshape(values.shape))
        elif name.endswith("layer_scalar"):
            values.fill_(0.7)
    model = model.to(dtype)
    model.generation_config = GenerationConfig(eos_token_id=EOS_TOKEN_ID, pad_token_id=0)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    model.save_pretrained(directory, max_shard_size=size if shards == 1 else -(-size // shards))
    make_tokenizer().save_pretrained(directory)
    return directory


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level without merges: three special tokens, then one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def edit_config(directory: Path, **changes: Any) -> None:
    """Rewrites keys of config.json; None removes a key."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_LAYERS = (*ATTENTION_LAYERS, "gate_proj", "up_proj", "down_proj")


def make_adapter(
    directory: Path,
    model: PreTrainedModel,
    *,
    seed: int = 1,
    rank: int = 4,
    targets: Sequence[str] = LINEAR_LAYERS,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """Saves a random LoRA adapter for a model as PEFT does; `directory` is returned.

    It changes all layers whose last name is one of `targets`, enough for other tokens to be chosen. `settings` go to
    adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] not in targets:
            continue
        outputs, inputs = module.weight.shape
        if isinstance(module, Conv1D):
            inputs, outputs = outputs, inputs
        for side, shape, size in ("A", (rank, inputs), inputs), ("B", (outputs, rank), 4 * rank):
            values = torch.randn(shape, generator=generator) / size**0.5
            tensors[f"base_model.model.{path}.lora_{side}.weight"] = values.to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": 2 * rank}
    config = {**plain, "target_modules": list(targets), **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merge_adapter(model: PreTrainedModel, directory: Path, scaling: float = 2.0) -> PreTrainedModel:
    """The model, in place, with an adapter added to its weights; `scaling` is that of `make_adapter` by default."""
    tensors = load_file(directory / "adapter_model.safetensors")
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            delta = tensors[name.replace("lora_A", "lora_B")].float() @ tensors[name].float() * scaling
            with torch.no_grad():
                module.weight += delta.T if isinstance(module, Conv1D) else delta
    return model


def load_reference(directory: Path, attention: str = "eager") -> PreTrainedModel:
    """The model in float32, with transformers' plain attention unless told otherwise; it generates past EOS."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    return model.eval()


def reference_tokens(
    model: PreTrainedModel, prompt: Sequence[int], count: int, guess: Sequence[int] = (), **inputs: Any
) -> list[int]:
    """`count` greedy tokens after the prompt, EOS or not. What is right in `guess` takes one step in all, instead of
    one for each token; the answer does not depend on it. `inputs`: of the model, beside its tokens."""
    tokens: list[int] = []
    with torch.inference_mode():
        if guess:
            logits = model(torch.tensor([[*prompt, *guess[: count - 1]]]), use_cache=False, **inputs).logits[0]
            best = logits[len(prompt) - 1 :].argmax(-1).tolist()
            right = next((n for n, pair in enumerate(zip(best, guess, strict=False)) if pair[0] != pair[1]), len(best))
            tokens = best[: right + 1]
        if len(tokens) < count:
            ids = torch.tensor([[*prompt, *tokens]])
            # Without a mask, generate() hides every token of the prompt that equals the pad token.
            mask = torch.ones_like(ids)
            left = count - len(tokens)
            output = model.generate(ids, attention_mask=mask, max_new_tokens=left, do_sample=False, **inputs)
            tokens = output[0, len(prompt) :].tolist()
    return tokens


def reference_answers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], count: int, guesses: Sequence[Sequence[int]]
) -> list[list[int]]:
    """`reference_tokens` of each prompt, with its guess."""
    pairs = zip(prompts, guesses, strict=True)
    return [reference_tokens(model, prompt, count, guess) for prompt, guess in pairs]


def reference_logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """log-softmax at every position, float64 [len(token_ids), vocab]."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(token_ids)])).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def reference_hidden(model: PreTrainedModel, token_ids: Sequence[int]) -> list[float]:
    """The last hidden state of the last token, after the final norm."""
    with torch.inference_mode():
        return model.base_model(torch.tensor([list(token_ids)])).last_hidden_state[0, -1].tolist()


def spread(model: PreTrainedModel) -> None:
    """Gemma adds 1 to the weights of its norms, and multiplies embeddings by the square root of their size."""
    gemma = model.config.model_type in ("gemma", "gemma2", "gemma3_text")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                embedding = 0.05 if gemma else 0.4
                parameter.copy_(noise * (embedding if "embed" in name else 2.0 / parameter.shape[1] ** 0.5))
            elif re.search(r"(norm|ln_\w+)\.weight$", name):
                parameter.copy_((0.0 if gemma else 1.0) + 0.2 * noise)
            else:
                parameter.copy_(0.3 * noise)
