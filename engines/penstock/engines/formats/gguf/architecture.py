"""An architecture of GGUF files, one value of general.architecture: Hugging Face's names for the parts of such a file,
and what several families share of names and settings.

A function of settings takes a file's settings and config.json without them, and gives what is added to config.json, or
takes the place of what is there.

Names of tensors are those of gguf-py's tensor_mapping.py; what a file does not say and llama.cpp knows is in its
src/models, and how its converter orders rows in its conversion/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from penstock.engines.errors import EngineError
from penstock.engines.formats.gguf.container import FileSettings
from penstock.engines.formats.safetensors_file import Shape

Config = Mapping[str, Any]

USUAL_PATTERN = 4
"""Of OLMo 3, EXAONE 4, Cohere 2 and AFMoE: each fourth layer attends to all tokens."""


ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
NORMS_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
FOUR_NORMS = {**NORMS_BEHIND, "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
FEED_FORWARD = {part: name.replace("mlp.", "feed_forward.") for part, name in MLP.items()}
NORMS_OF_SEED = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}


def shared_in(prefix: str) -> Mapping[str, str]:
    """Matrices of the expert that every token has."""
    return {f"{part}_shexp": name.replace("mlp", prefix) for part, name in MLP.items()}


SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", **shared_in("mlp.shared_expert")}
SHARED_EXPERTS = shared_in("mlp.shared_experts")


@dataclass(frozen=True)
class Architecture:
    """One value of general.architecture. Names are those of a checkpoint of Hugging Face."""

    hugging_face: str
    """What config.json calls it."""
    block_parts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(ATTENTION | MLP | TWO_NORMS))
    """Of a layer's parts. A key with the kind of a tensor, as exp_probs_b.bias, stands for that tensor alone, and
    its value is a whole name."""
    expert_parts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of the matrices that have all experts of a layer, with {} for an expert's number."""
    others: tuple[str, ...] = ()
    """Further names of models that such a file may hold; `settings` says which, if it matters."""
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    other_parts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of the rest of the model; with {} for the number of one of several in a tensor."""
    eps_key: str = "rms_norm_eps"
    """Of config.json."""
    pairs_interleaved: bool = False
    """The rows of queries and keys are in llama.cpp's order for rotary embedding."""
    by_key_head: bool = False
    """Hugging Face has for each head of keys its queries, its key and its value, where the file has all queries
    first, then all keys, then all values."""
    norms_plus_one: bool = False
    """The 1 that Gemma adds to a norm's weights is in the file already."""
    differing: tuple[str, ...] = ()
    """Settings that may differ between layers. The first layer's are the common ones; `settings` reads the others."""
    stated: Mapping[str, tuple[str, Shape]] = field(default_factory=lambda: MappingProxyType({}))
    """Parts of a layer that files have as numbers in their metadata, one for each layer: part and shape by key."""
    settings: Callable[[FileSettings, Mapping[str, Any]], Mapping[str, Any]] = lambda settings, config: {}
    """What the family has beyond the common settings, or in their place; gets config.json with those."""

    @property
    def eps(self) -> str:
        """Of the metadata."""
        return f"attention.layer_norm_{'rms_' if self.eps_key == 'rms_norm_eps' else ''}epsilon"


def named(*parts: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType({key: name for part in parts for key, name in part.items()})


def of_experts(names: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType({f"{part}_exps": name for part, name in names.items()})


def experts_in(prefix: str, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> Mapping[str, str]:
    """`names`: of an expert's matrices. Files may have the first two in one."""
    parts = dict(zip(MLP, names, strict=True)) | {"ffn_gate_up": "gate_up_proj"}
    return of_experts({part: f"{prefix}.{{}}.{name}" for part, name in parts.items()})


EXPERTS = experts_in("mlp.experts")
W_NAMES = ("w1", "w3", "w2")
MIXTRAL_EXPERTS = experts_in("block_sparse_moe.experts", W_NAMES)
ROUTED = named(ATTENTION, TWO_NORMS, SHARED_EXPERT, {"ffn_gate_inp": "mlp.gate"})
LLAMA = Architecture("LlamaForCausalLM", pairs_interleaved=True)


def experts(settings: FileSettings, name: str) -> Config:
    return {name: settings.count("expert_count"), "num_experts_per_tok": settings.count("expert_used_count")}


def expert_size(settings: FileSettings) -> int:
    if settings.some_layer_has("ffn_gate_up_exps.weight"):
        return settings.rows_of("ffn_gate_up_exps") // 2
    return settings.rows_of("ffn_up_exps")


def experts_of_qwen(settings: FileSettings) -> Config:
    return {**experts(settings, "num_experts"), "moe_intermediate_size": expert_size(settings)}


def experts_of_deepseek(settings: FileSettings) -> Config:
    return {
        **experts(settings, "n_routed_experts"),
        "n_shared_experts": settings.count_or_zero("expert_shared_count"),
        "moe_intermediate_size": expert_size(settings),
        "first_k_dense_replace": settings.count_or_zero("leading_dense_block_count"),
        "routed_scaling_factor": settings.number("expert_weights_scale", 1.0),
    }


def own_layers(settings: FileSettings, config: Config) -> Config:
    """Blocks are layers, and behind them those for multi-token prediction."""
    further = settings.count_or_zero("nextn_predict_layers")
    return {"num_hidden_layers": max(config["num_hidden_layers"] - further, 0), "num_nextn_predict_layers": further}


def expert_groups(settings: FileSettings) -> Config:
    """Of which tokens choose some before they choose experts."""
    groups, chosen = settings.count("expert_group_count", 1), settings.count("expert_group_used_count", 1)
    return {"n_group": groups, "topk_group": chosen} if groups > 1 else {"n_group": 1, "topk_group": 1}


def layer_types(settings: FileSettings, config: Config) -> list[str]:
    """By a list with an entry for each layer, or the number of layers from one without a window to the next."""
    layers, pattern = config["num_hidden_layers"], settings.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        every = settings.count("attention.sliding_window_pattern", USUAL_PATTERN)
        pattern = [(n + 1) % every != 0 for n in range(layers)]
    if len(pattern) != layers:
        raise EngineError(f"the GGUF file has a pattern of windows for {len(pattern)} layers, and {layers} layers")
    return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]


def ropes_by_kind(settings: FileSettings, config: Config, **whole: Any) -> Config:
    """`whole`: what is said of layers without a window beside the base."""
    return {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **whole, "rope_theta": config["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": settings.number("rope.freq_base_swa", 1e4)},
        },
        "rope_scaling": None,
    }


def kinds_by_heads(settings: FileSettings, config: Config, recurrent: str) -> list[str]:
    """Of the layers of a hybrid: those without heads of keys are `recurrent`."""
    heads = settings.by_layer("attention.head_count_kv", config["num_hidden_layers"])
    return [recurrent if number == 0 else "full_attention" for number in heads]


def scales_of_granite(settings: FileSettings, config: Config) -> Config:
    return {
        "attention_multiplier": settings.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": settings.number("embedding_scale", 1.0),
        "residual_multiplier": settings.number("residual_scale", 1.0),
        "logits_scaling": settings.number("logit_scale", 1.0),
    }
