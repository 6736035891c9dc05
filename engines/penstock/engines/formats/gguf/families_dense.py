"""Dense models in GGUF files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.gguf.architecture import (
    ATTENTION,
    LLAMA,
    MLP,
    NORMS_BEHIND,
    NORMS_OF_SEED,
    TWO_NORMS,
    USUAL_PATTERN,
    Architecture,
    Config,
    layer_types,
    named,
    scales_of_granite,
)
from penstock.engines.formats.gguf.container import FileSettings
from penstock.engines.formats.safetensors_file import Shape

_OLMO3 = "Olmo3ForCausalLM"


def granite(settings: FileSettings, config: Config) -> Config:
    if settings.get("rope.scaling.finetuned") is False:
        raise UnsupportedError("the GGUF file has rope.scaling.finetuned=false: Granite without rotary embedding")
    return scales_of_granite(settings, config)


def granite_swa(settings: FileSettings, config: Config) -> Config:
    if settings.get("expert_count"):
        raise UnsupportedError(
            "the GGUF file has granite_swa.expert_count: Granite with windows is read without experts"
        )
    rotates = settings.by_layer("attention.rope_pattern", config["num_hidden_layers"])
    return {
        **scales_of_granite(settings, config),
        "layer_types": layer_types(settings, config),
        "layer_rope_theta": [0 if rotating is False else config["rope_theta"] for rotating in rotates],
    }


def minicpm(settings: FileSettings, config: Config) -> Config:
    """Files of 2024 do not say the scales of MiniCPM 2B."""
    root, logits = math.sqrt(config["num_hidden_layers"]), settings.number("logit_scale", config["hidden_size"] / 256)
    return {
        "scale_emb": settings.number("embedding_scale", 12.0),
        "scale_depth": settings.number("residual_scale", 1.4 / root) * root,
        "dim_model_base": config["hidden_size"] / logits if logits else 0,
    }


def smollm3(settings: FileSettings, config: Config) -> Config:
    return {"no_rope_layer_interval": 4}


def olmo2(settings: FileSettings, config: Config) -> Config:
    """OLMo 3 has the same name, and windows."""
    if "sliding_window" not in config:
        return {}
    return {"architectures": [_OLMO3], "layer_types": layer_types(settings, config)}


def exaone4(settings: FileSettings, config: Config) -> Config:
    if "sliding_window" not in config:
        return {"sliding_window": None}
    return {"layer_types": layer_types(settings, config)}


def mistral3(settings: FileSettings, config: Config) -> Config:
    """The file has Ministral 3's growth of queries and its factor of attention; Mistral Small 3 has neither."""
    growth, weight = settings.get("attention.temperature_scale"), settings.get("rope.scaling.yarn_log_multiplier")
    rope = config.get("rope_scaling")
    if not growth or not rope:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": config.get("sliding_window")}
    mscale = {} if weight is None else {"mscale": 1.0, "mscale_all_dim": weight}
    return {"rope_scaling": {"rope_theta": config["rope_theta"], **rope, **mscale, "llama_4_scaling_beta": growth}}


def ernie4_5(settings: FileSettings, config: Config) -> Config:
    return {"use_bias": config["attention_bias"]}


def seed_oss(settings: FileSettings, config: Config) -> Config:
    return {"attention_out_bias": settings.has("attn_output.bias")}


def command_r(settings: FileSettings, config: Config) -> Config:
    return {"logit_scale": settings.number("logit_scale"), "use_qk_norm": settings.has("attn_q_norm.weight")}


def cohere2(settings: FileSettings, config: Config) -> Config:
    return {"logit_scale": settings.number("logit_scale"), "sliding_window_pattern": USUAL_PATTERN}


_XIELU: Mapping[str, Shape] = {"alpha_n": (1,), "alpha_p": (1,), "beta": (), "eps": ()}

ARCHITECTURES = {
    "llama": LLAMA,
    "chatglm": Architecture(
        "GlmForCausalLM",
        named(ATTENTION, TWO_NORMS, {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}),
    ),
    "apertus": Architecture(
        "ApertusForCausalLM",
        named(ATTENTION, MLP, {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}),
        stated=MappingProxyType({f"xielu.{name}": (f"mlp.act_fn.{name}", shape) for name, shape in _XIELU.items()}),
    ),
    "jais2": Architecture("Jais2ForCausalLM", eps_key="layer_norm_eps"),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "granite": replace(LLAMA, hugging_face="GraniteForCausalLM", settings=granite),
    "granite_swa": replace(
        LLAMA,
        hugging_face="GraniteSWAForCausalLM",
        block_parts=named(LLAMA.block_parts, {"attn_sinks.weight": "self_attn.sinks"}),
        settings=granite_swa,
    ),
    "minicpm": replace(LLAMA, hugging_face="MiniCPMForCausalLM", settings=minicpm),
    "smollm3": replace(LLAMA, hugging_face="SmolLM3ForCausalLM", settings=smollm3),
    "olmo2": Architecture("Olmo2ForCausalLM", named(ATTENTION, MLP, NORMS_BEHIND), others=(_OLMO3,), settings=olmo2),
    "exaone": Architecture("LlamaForCausalLM"),
    "exaone4": Architecture("Exaone4ForCausalLM", named(ATTENTION, MLP, NORMS_BEHIND), settings=exaone4),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        named(ATTENTION, MLP, TWO_NORMS, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    ),
    "mistral3": replace(LLAMA, hugging_face="Ministral3ForCausalLM", others=("MistralForCausalLM",), settings=mistral3),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        named(
            ATTENTION,
            {
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_self_attn_layernorm",
                "ffn_norm": "post_attention_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
            },
        ),
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", settings=ernie4_5),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM",
        named(
            ATTENTION,
            MLP,
            TWO_NORMS,
            {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        ),
    ),
    "seed_oss": Architecture("SeedOssForCausalLM", named(ATTENTION, MLP, NORMS_OF_SEED), settings=seed_oss),
    "command-r": Architecture(
        "CohereForCausalLM",
        named(ATTENTION, MLP, {"attn_norm": "input_layernorm"}),
        eps_key="layer_norm_eps",
        settings=command_r,
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        named(ATTENTION, MLP, {"attn_norm": "input_layernorm"}),
        eps_key="layer_norm_eps",
        settings=cohere2,
    ),
    "nemotron": Architecture("NemotronForCausalLM", eps_key="norm_eps", norms_plus_one=True),
    "arcee": replace(LLAMA, hugging_face="ArceeForCausalLM"),
}
