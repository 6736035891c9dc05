"""Architectures of llama.cpp, and how they correspond to Hugging Face's.

A function of settings takes a file's settings and config.json without them, and gives what is added to config.json, or
takes the place of what is there.

Names of tensors are those of gguf-py's tensor_mapping.py; what a file does not say and llama.cpp knows is in its
src/models, and how its converter orders rows in its conversion/.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.gguf.container import FileSettings

Config = Mapping[str, Any]

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
"""The one size of Gemma 2, and of Gemma 3, that scales its queries by another number than head_dim."""
_OLMO3 = "Olmo3ForCausalLM"
_USUAL_PATTERN = 4
"""Of OLMo 3, EXAONE 4, Cohere 2 and AFMoE: each fourth layer attends to all tokens."""


def gemma2(settings: FileSettings, config: Config) -> Config:
    return {
        "query_pre_attn_scalar": _gemma_scale(config, _GEMMA2_27B_LAYERS),
        "sliding_window": settings.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": settings.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 30.0),
    }


def gemma3(settings: FileSettings, config: Config) -> Config:
    scale = _gemma_scale(config, _GEMMA3_27B_LAYERS)
    return {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": scale}


def _gemma_scale(config: Config, layers_of_27b: int) -> int:
    is_27b = config["num_hidden_layers"] == layers_of_27b
    scale: int = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return scale


def granite(settings: FileSettings, config: Config) -> Config:
    if settings.get("rope.scaling.finetuned") is False:
        raise UnsupportedError("the GGUF file has rope.scaling.finetuned=false: Granite without rotary embedding")
    return {
        "attention_multiplier": settings.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": settings.number("embedding_scale", 1.0),
        "residual_multiplier": settings.number("residual_scale", 1.0),
        "logits_scaling": settings.number("logit_scale", 1.0),
    }


def smollm3(settings: FileSettings, config: Config) -> Config:
    return {"no_rope_layer_interval": 4}


def olmo2(settings: FileSettings, config: Config) -> Config:
    """OLMo 3 has the same name, and windows."""
    if "sliding_window" not in config:
        return {}
    return {"architectures": [_OLMO3], "layer_types": _layer_types(settings, config)}


def exaone4(settings: FileSettings, config: Config) -> Config:
    if "sliding_window" not in config:
        return {"sliding_window": None}
    return {"layer_types": _layer_types(settings, config)}


def mixtral(settings: FileSettings, config: Config) -> Config:
    return {**_experts(settings, "num_local_experts"), "intermediate_size": settings.rows_of("ffn_gate_exps")}


def qwen2moe(settings: FileSettings, config: Config) -> Config:
    return {
        **_qwen(settings),
        "norm_topk_prob": False,
        "qkv_bias": config["attention_bias"],
        "shared_expert_intermediate_size": settings.rows_of("ffn_gate_shexp"),
    }


def qwen3moe(settings: FileSettings, config: Config) -> Config:
    return {**_qwen(settings), "norm_topk_prob": True}


def olmoe(settings: FileSettings, config: Config) -> Config:
    return {
        **_experts(settings, "num_experts"),
        "intermediate_size": settings.rows_of("ffn_gate_exps"),
        "norm_topk_prob": False,
        "clip_qkv": settings.get("attention.clamp_kqv"),
    }


def gpt_oss(settings: FileSettings, config: Config) -> Config:
    scaling = {"rope_scaling": {**config["rope_scaling"], "truncate": False}} if "rope_scaling" in config else {}
    return {
        **scaling,
        **_experts(settings, "num_local_experts"),
        "intermediate_size": settings.rows_of("ffn_gate_exps"),
        "sliding_window": settings.count("attention.sliding_window"),
    }


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


def ernie4_5_moe(settings: FileSettings, config: Config) -> Config:
    return {
        **ernie4_5(settings, config),
        "moe_num_experts": settings.count("expert_count"),
        "moe_k": settings.count("expert_used_count"),
        "moe_intermediate_size": settings.rows_of("ffn_gate_exps"),
        "moe_num_shared_experts": settings.count("expert_shared_count", 0),
        "moe_layer_interval": settings.count("interleave_moe_layer_step", 1),
        "moe_layer_start_index": settings.count("leading_dense_block_count", 0),
    }


def glm4moe(settings: FileSettings, config: Config) -> Config:
    """Its blocks are layers, and behind them those for multi-token prediction."""
    further = settings.count("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": max(config["num_hidden_layers"] - further, 0),
        "num_nextn_predict_layers": further,
        "use_qk_norm": settings.has("attn_q_norm.weight"),
        **_experts_of_deepseek(settings),
        "norm_topk_prob": settings.get("expert_weights_norm") is not False,
    }


def dots1(settings: FileSettings, config: Config) -> Config:
    """The file does not say windows, which published models do not have."""
    return {
        **_experts_of_deepseek(settings),
        "norm_topk_prob": bool(settings.get("expert_weights_norm")),
        "use_sliding_window": False,
    }


def afmoe(settings: FileSettings, config: Config) -> Config:
    """llama.cpp knows the scale of the embeddings, and which layers have windows."""
    return {
        **_experts(settings, "num_experts"),
        "num_shared_experts": settings.count("expert_shared_count", 0),
        "moe_intermediate_size": settings.rows_of("ffn_gate_exps"),
        "num_dense_layers": settings.count("leading_dense_block_count", 0),
        "route_scale": settings.number("expert_weights_scale", 1.0),
        "global_attn_every_n_layers": _USUAL_PATTERN,
        "mup_enabled": True,
    }


def _experts_of_deepseek(settings: FileSettings) -> Config:
    return {
        **_experts(settings, "n_routed_experts"),
        "n_shared_experts": settings.count("expert_shared_count", 0),
        "moe_intermediate_size": settings.rows_of("ffn_gate_exps"),
        "first_k_dense_replace": settings.count("leading_dense_block_count", 0),
        "routed_scaling_factor": settings.number("expert_weights_scale", 1.0),
    }


def seed_oss(settings: FileSettings, config: Config) -> Config:
    return {"attention_out_bias": settings.has("attn_output.bias")}


def command_r(settings: FileSettings, config: Config) -> Config:
    return {"logit_scale": settings.number("logit_scale"), "use_qk_norm": settings.has("attn_q_norm.weight")}


def cohere2(settings: FileSettings, config: Config) -> Config:
    return {"logit_scale": settings.number("logit_scale"), "sliding_window_pattern": _USUAL_PATTERN}


def granitemoe(settings: FileSettings, config: Config) -> Config:
    shared: Config = {}
    if settings.has("ffn_gate_shexp.weight"):
        size = settings.rows_of("ffn_gate_shexp")
        shared = {"architectures": ["GraniteMoeSharedForCausalLM"], "shared_intermediate_size": size}
    return {
        **granite(settings, config),
        **_experts(settings, "num_local_experts"),
        "intermediate_size": settings.rows_of("ffn_gate_exps"),
        **shared,
    }


def phimoe(settings: FileSettings, config: Config) -> Config:
    return {
        **_experts(settings, "num_local_experts"),
        "intermediate_size": settings.rows_of("ffn_gate_exps"),
        "lm_head_bias": "output.bias" in settings.tensors,
    }


def olmo(settings: FileSettings, config: Config) -> Config:
    return {"clip_qkv": settings.get("attention.clamp_kqv")}


def bloom(settings: FileSettings, config: Config) -> Config:
    return {"seq_length": config["max_position_embeddings"]}


def lfm2(settings: FileSettings, config: Config) -> Config:
    """Layers with a short convolution have no heads of keys."""
    heads, layers = settings.get("attention.head_count_kv"), config["num_hidden_layers"]
    heads = heads if isinstance(heads, list) else [heads] * layers
    return {
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": settings.count("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv" if number == 0 else "full_attention" for number in heads],
    }


def lfm2moe(settings: FileSettings, config: Config) -> Config:
    return {
        **lfm2(settings, config),
        **_qwen(settings),
        "num_dense_layers": settings.count("leading_dense_block_count"),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in settings.tensors),
        "routed_scaling_factor": settings.number("expert_weights_scale", 1.0),
    }


def qwen35(settings: FileSettings, config: Config) -> Config:
    heads, further = settings.count("ssm.time_step_rank"), settings.count("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": max(config["num_hidden_layers"] - further, 0),
        "num_nextn_predict_layers": further,
        "full_attention_interval": settings.count("full_attention_interval", _USUAL_PATTERN),
        "linear_conv_kernel_dim": settings.count("ssm.conv_kernel"),
        "linear_key_head_dim": settings.count("ssm.state_size"),
        "linear_num_key_heads": settings.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": settings.count("ssm.inner_size") // heads,
    }


def qwen35moe(settings: FileSettings, config: Config) -> Config:
    shared = settings.rows_of("ffn_gate_shexp")
    return {**qwen35(settings, config), **_qwen(settings), "shared_expert_intermediate_size": shared}


def _qwen(settings: FileSettings) -> Config:
    return {**_experts(settings, "num_experts"), "moe_intermediate_size": settings.rows_of("ffn_gate_exps")}


def _experts(settings: FileSettings, name: str) -> Config:
    return {name: settings.count("expert_count"), "num_experts_per_tok": settings.count("expert_used_count")}


def _layer_types(settings: FileSettings, config: Config) -> list[str]:
    """By a list with an entry for each layer, or the number of layers from one without a window to the next."""
    layers, pattern = config["num_hidden_layers"], settings.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        every = settings.count("attention.sliding_window_pattern", _USUAL_PATTERN)
        pattern = [(n + 1) % every != 0 for n in range(layers)]
    if len(pattern) != layers:
        raise EngineError(f"the GGUF file has a pattern of windows for {len(pattern)} layers, and {layers} layers")
    return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]


_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_NORMS_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_FOUR_NORMS = {**_NORMS_BEHIND, "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"{part}_shexp": name.replace("mlp.", "mlp.shared_expert.") for part, name in _MLP.items()},
}
_NORMS_OF_SEED = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_SHARED_EXPERTS = {f"{part}_shexp": name.replace("mlp.", "mlp.shared_experts.") for part, name in _MLP.items()}
_DENSE = {
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
"""Of BLOOM, Falcon and, with another name of the attention, GPT-NeoX."""


@dataclass(frozen=True)
class Architecture:
    """One value of general.architecture. Names are those of a checkpoint of Hugging Face."""

    hugging_face: str
    """What config.json calls it."""
    block_parts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(_ATTENTION | _MLP | _TWO_NORMS))
    """Of a layer's parts."""
    expert_parts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of the matrices that have all experts of a layer, with {} for an expert's number."""
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    other_parts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of the rest of the model."""
    eps_key: str = "rms_norm_eps"
    """Of config.json."""
    pairs_interleaved: bool = False
    """The rows of queries and keys are in llama.cpp's order for rotary embedding."""
    by_key_head: bool = False
    """Hugging Face has for each head of keys its queries, its key and its value, where the file has all queries
    first, then all keys, then all values."""
    norms_plus_one: bool = False
    """The 1 that Gemma adds to a norm's weights is in the file already."""
    settings: Callable[[FileSettings, Mapping[str, Any]], Mapping[str, Any]] = lambda settings, config: {}
    """What the family has beyond the common settings, or in their place; gets config.json with those."""

    @property
    def eps(self) -> str:
        """Of the metadata."""
        return f"attention.layer_norm_{'rms_' if self.eps_key == 'rms_norm_eps' else ''}epsilon"


def _named(*parts: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType({key: name for part in parts for key, name in part.items()})


def _of_experts(names: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType({f"{part}_exps": name for part, name in names.items()})


_EXPERTS = _of_experts({part: name.replace("mlp.", "mlp.experts.{}.") for part, name in _MLP.items()})
_MIXTRAL_EXPERTS = _of_experts(
    {part: f"block_sparse_moe.experts.{{}}.{name}" for part, name in zip(_MLP, ("w1", "w3", "w2"), strict=True)}
)
_ROUTED = _named(_ATTENTION, _TWO_NORMS, _SHARED_EXPERT, {"ffn_gate_inp": "mlp.gate"})
_LLAMA = Architecture("LlamaForCausalLM", pairs_interleaved=True)
_LFM2_PARTS = _named(
    _ATTENTION,
    {
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    },
)
_LFM2 = Architecture(
    "Lfm2ForCausalLM",
    _LFM2_PARTS,
    norm="model.embedding_norm",
    other_parts=MappingProxyType({"token_embd_norm": "model.embedding_norm"}),
    settings=lfm2,
)
_DELTA_NETS = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN35 = Architecture(
    "Qwen3_5ForCausalLM",
    _named(_ATTENTION, _MLP, _NORMS_OF_SEED, _DELTA_NETS),
    norms_plus_one=True,
    settings=qwen35,
)
_FALCON = Architecture(
    "FalconForCausalLM",
    _named(_DENSE, {"attn_norm": "input_layernorm"}),
    layers="transformer.h",
    embedding="transformer.word_embeddings",
    norm="transformer.ln_f",
    eps_key="layer_norm_epsilon",
    by_key_head=True,
    settings=falcon,
)

ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        _named(_ATTENTION, _MLP, _FOUR_NORMS),
        norms_plus_one=True,
        settings=gemma2,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        _named(_ATTENTION, _MLP, _FOUR_NORMS),
        norms_plus_one=True,
        settings=gemma3,
    ),
    "granite": replace(_LLAMA, hugging_face="GraniteForCausalLM", settings=granite),
    "smollm3": replace(_LLAMA, hugging_face="SmolLM3ForCausalLM", settings=smollm3),
    "olmo2": Architecture("Olmo2ForCausalLM", _named(_ATTENTION, _MLP, _NORMS_BEHIND), settings=olmo2),
    "exaone": Architecture("LlamaForCausalLM"),
    "exaone4": Architecture("Exaone4ForCausalLM", _named(_ATTENTION, _MLP, _NORMS_BEHIND), settings=exaone4),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        _named(_ATTENTION, _MLP, _TWO_NORMS, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    ),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _ROUTED, _EXPERTS, settings=qwen2moe),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _ROUTED, _EXPERTS, settings=qwen3moe),
    "olmoe": Architecture("OlmoeForCausalLM", _ROUTED, _EXPERTS, settings=olmoe),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _named(
            _ATTENTION,
            {
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "attn_sinks": "self_attn.sinks",
                "ffn_gate_inp": "mlp.router",
            },
        ),
        _EXPERTS,
        settings=gpt_oss,
    ),
    "mistral3": replace(_LLAMA, hugging_face="Ministral3ForCausalLM", settings=mistral3),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        _named(
            _ATTENTION,
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
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        _named(
            _ATTENTION,
            _MLP,
            {
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_inp": "mlp.gate",
                "exp_probs_b": "mlp.gate.e_score_correction_bias",
            },
            _SHARED_EXPERTS,
        ),
        _EXPERTS,
        settings=glm4moe,
    ),
    "dots1": Architecture(
        "Dots1ForCausalLM",
        _named(
            _ATTENTION,
            _MLP,
            _TWO_NORMS,
            {"ffn_gate_inp": "mlp.gate", "exp_probs_b": "mlp.gate.e_score_correction_bias"},
            _SHARED_EXPERTS,
        ),
        _EXPERTS,
        settings=dots1,
    ),
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        _named(
            _ATTENTION,
            _MLP,
            {
                "attn_gate": "self_attn.gate_proj",
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_mlp_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_gate_inp": "mlp.router.gate",
                "exp_probs_b": "mlp.expert_bias",
            },
            _SHARED_EXPERTS,
        ),
        _EXPERTS,
        settings=afmoe,
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        _named(
            _ATTENTION,
            _TWO_NORMS,
            {
                "ffn_gate_inp": "block_sparse_moe.gate",
                "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
            },
        ),
        _MIXTRAL_EXPERTS,
        settings=mixtral,
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", settings=ernie4_5),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        _named(
            _ATTENTION,
            _MLP,
            _TWO_NORMS,
            {"ffn_gate_inp": "mlp.gate", "exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
            _SHARED_EXPERTS,
        ),
        _EXPERTS,
        settings=ernie4_5_moe,
    ),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM",
        _named(
            _ATTENTION,
            _MLP,
            _TWO_NORMS,
            {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        ),
    ),
    "seed_oss": Architecture("SeedOssForCausalLM", _named(_ATTENTION, _MLP, _NORMS_OF_SEED), settings=seed_oss),
    "command-r": Architecture(
        "CohereForCausalLM",
        _named(_ATTENTION, _MLP, {"attn_norm": "input_layernorm"}),
        eps_key="layer_norm_eps",
        settings=command_r,
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        _named(_ATTENTION, _MLP, {"attn_norm": "input_layernorm"}),
        eps_key="layer_norm_eps",
        settings=cohere2,
    ),
    "granitemoe": replace(
        _LLAMA, hugging_face="GraniteMoeForCausalLM", block_parts=_ROUTED, expert_parts=_EXPERTS, settings=granitemoe
    ),
    "nemotron": Architecture("NemotronForCausalLM", eps_key="norm_eps", norms_plus_one=True),
    "arcee": replace(_LLAMA, hugging_face="ArceeForCausalLM"),
    "gemma": Architecture("GemmaForCausalLM", norms_plus_one=True),
    "olmo": replace(_LLAMA, hugging_face="OlmoForCausalLM", eps_key="layer_norm_eps", settings=olmo),
    "phimoe": Architecture(
        "PhimoeForCausalLM",
        _named(_ATTENTION, _TWO_NORMS, {"ffn_gate_inp": "block_sparse_moe.gate"}),
        _MIXTRAL_EXPERTS,
        settings=phimoe,
    ),
    "stablelm": Architecture("StableLmForCausalLM", eps_key="layer_norm_eps", settings=stablelm),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        _named(_ATTENTION, _TWO_NORMS, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
        eps_key="norm_epsilon",
        settings=starcoder2,
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        _named(_ATTENTION, _TWO_NORMS, {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
        norm="model.final_layernorm",
        eps_key="layer_norm_eps",
    ),
    "gpt2": Architecture(
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
    ),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35,
        hugging_face="Qwen3_5MoeForCausalLM",
        block_parts=_named(_ROUTED, _NORMS_OF_SEED, _DELTA_NETS),
        expert_parts=_EXPERTS,
        settings=qwen35moe,
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        hugging_face="Lfm2MoeForCausalLM",
        block_parts=_named(
            _LFM2_PARTS, {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b": "feed_forward.expert_bias"}
        ),
        expert_parts=_of_experts(
            {part: f"feed_forward.experts.{{}}.{name}" for part, name in zip(_MLP, ("w1", "w3", "w2"), strict=True)}
        ),
        settings=lfm2moe,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        _named({part: name.replace("self_attention", "attention") for part, name in _DENSE.items()}, _TWO_NORMS),
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
        block_parts=_named(_DENSE, _TWO_NORMS),
        other_parts=MappingProxyType({"token_embd_norm": "transformer.word_embeddings_layernorm"}),
        settings=bloom,
    ),
}

_VARIANTS = {
    "llama": (
        "blk.0.ffn_gate_inp.weight",
        replace(
            _LLAMA,
            hugging_face="MixtralForCausalLM",
            block_parts=_named(_ATTENTION, _TWO_NORMS, {"ffn_gate_inp": "block_sparse_moe.gate"}),
            expert_parts=_MIXTRAL_EXPERTS,
            settings=mixtral,
        ),
    ),
    "falcon": (
        "blk.0.attn_norm_2.weight",
        replace(_FALCON, block_parts=_named(_DENSE, {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})),
    ),
}
"""Architectures that have one name with another, by a tensor of theirs alone."""


def find_architecture(name: object, tensors: Container[str]) -> Architecture | None:
    """By general.architecture and the names of the file's tensors."""
    tensor, variant = _VARIANTS.get(str(name), ("", None))
    return variant if tensor in tensors else ARCHITECTURES.get(str(name))


def hugging_face_names() -> set[str]:
    """What config.json calls the architectures that are read."""
    variants = [variant for _, variant in _VARIANTS.values()]
    names = {architecture.hugging_face for architecture in (*ARCHITECTURES.values(), *variants)}
    return names | {_OLMO3}
